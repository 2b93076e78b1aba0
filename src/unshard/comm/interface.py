"""The interface between the engine and a transport, which issues the collectives of one process group."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

from ..layout.collective_tensors import PACK_SMALL, PackingRule
from .groups import Pool as Pool
from .order.check import Label as Label
from .order.check import Order

Tensors = list[torch.Tensor]


class Work(Protocol):
    """A collective in flight. Do not read, write or free its tensors before `wait` has returned.

    The works of unshard's transports also accept `wait(timeout)`, which raises RuntimeError when the timeout expires.
    `is_completed()` then returns False. If `wait` raised because the collective failed, `is_completed()` returns True.
    """

    def wait(self) -> object: ...


@dataclass(frozen=True)
class Traits:
    """Properties of a transport. The engine uses them to choose layouts and streams."""

    gathers_groups: bool
    """`all_gather` takes several tensors in one collective."""
    reduces_groups: bool
    """`reduce_scatter` takes several tensors in one collective."""
    packing: PackingRule = PACK_SMALL
    """Decides which parameters are packed if a collective takes several tensors."""
    in_place_only: bool = False
    """`all_gather` reads this rank's piece from the output and ignores the inputs."""
    reduces_in_place: bool = False
    """The outputs of `reduce_scatter` may be its inputs, because the transport has nothing to add up."""
    gathers_on_any_stream: bool = False
    """`all_gather` allocates nothing, so it can be issued on one stream and waited for on another."""
    waits_in_stream: bool = False
    """`wait` of a reduction blocks the current stream, not the host."""
    piece_alignment: int = 1
    """Packed pieces are padded to a multiple of this number of bytes."""
    reduce_scatter_ignores_timeout: bool = False
    """`wait(timeout)` of the backend's own reduce-scatter ignores the timeout."""
    gathers: bool = True
    """False for an object that only looks like a process group and has no all-gather."""


class Transport(ABC):
    """Issues the collectives of one process group, which move the pieces of units between ranks.

    `all_gather`, `reduce_scatter` and `all_reduce` issue one collective, or one group of collectives, on the current
    stream. They return without waiting. The order check covers only collectives that have a label.
    """

    rank: int
    world: int
    traits: Traits
    pool: Pool | None = None
    """Allocates the buffers of collectives. None means torch's allocator."""
    divides: bool = False
    """True if reductions always divide by the number of ranks, even with `average=False`."""
    order: Order | None = None
    """Compares the collectives of the ranks, or None if collectives are not compared."""

    @abstractmethod
    def all_gather(self, outputs: Tensors, inputs: Tensors, *, label: Label | None = None) -> Work:
        """Fill `outputs[i]` with the `inputs[i]` of all ranks in rank order. An input may be a view of its output."""

    @abstractmethod
    def reduce_scatter(self, outputs: Tensors, inputs: Tensors, *, label: Label | None = None, average: bool) -> Work:
        """Fill `outputs[i]` with this rank's piece of the sum of all ranks' `inputs[i]`, or the mean if `average`.

        Pieces are sent in the dtype of `inputs[i]` and added up in the dtype of `outputs[i]`.
        """

    @abstractmethod
    def all_reduce(self, tensors: Tensors, *, label: Label | None = None, average: bool) -> Work:
        """Replace each tensor by its sum over the ranks, or by its mean if `average`."""

    def carrier(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype in which an all-gather sends tensors of `dtype`: uint8 if the backend lacks `dtype`."""
        return dtype

    def next_unit_number(self) -> int:
        """Return a new unit number, which is the same on all ranks. Return 0 if collectives are not compared."""
        return 0 if self.order is None else self.order.next_unit_number()

    @property
    def compared_ranks(self) -> list[int]:
        """The global ranks of the process group, or an empty list if collectives are not compared."""
        return [] if self.order is None else self.order.ranks

    def announce(self, what: str) -> None:
        """Set the description of the next collective that has no label. Messages about waiting ranks show it."""
        if self.order is not None:
            self.order.progress.next_unlabelled = what

    def raised(self, text: str, left: bool = False) -> bool:
        """Announce an exception to the other ranks. Return False if collectives are not compared.

        `left` is True if the exception left a block and the other ranks wait for the end of that block.
        """
        return self.order is not None and self.order.raised(text, left)

    def wrapped(self, wrap: Callable[[Transport], Transport]) -> Transport:
        """Return `wrap(self)`. A transport that compares labels applies `wrap` to its base transport instead."""
        return wrap(self)


class Works:
    """Combines several works into one."""

    def __init__(self, works: list[Any]):
        self.works = works

    def wait(self, timeout: timedelta | None = None) -> None:
        while self.works:
            if timeout is None:
                self.works[0].wait()
            else:
                self.works[0].wait(timeout)
            del self.works[0]

    def is_completed(self) -> bool:
        """Return True if the work that `wait` waits for next is complete, or if no works are left."""
        return not self.works or self.works[0].is_completed()


def joined(works: list[Any]) -> Work:
    """Combine `works` into one work. Works may be None, because process groups written in Python may return None."""
    return works[0] or Done() if len(works) == 1 else Works([work or Done() for work in works])


class WorkThen:
    """A collective whose first `wait` also runs `then`, which adds up received pieces or copies the result.

    Tensors that `then` refers to stay alive until that `wait`. `wait` passes no timeout to a user-defined work, because
    such a work may not accept one.
    """

    def __init__(self, work: Any, then: Callable[[], object] | None = None):
        self._work, self._then = work, then

    def wait(self, timeout: timedelta | None = None) -> None:
        if timeout is not None and isinstance(self._work, (dist.Work, Works, Done)):
            self._work.wait(timeout)
        elif self._work is not None:
            self._work.wait()
        then, self._work, self._then = self._then, None, None
        if then is not None:
            then()

    def is_completed(self) -> bool:
        return not isinstance(self._work, (dist.Work, Works, Done)) or self._work.is_completed()


class Done:
    def wait(self, timeout: timedelta | None = None) -> None:
        pass

    def is_completed(self) -> bool:
        return True


class Comm(ABC):
    """Base class of user-defined collectives, which also allocate the tensors that they work on."""

    @abstractmethod
    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return an uninitialized tensor of `size`, `dtype` and `device` for the collective to work on."""


class AllGather(Comm):
    """Base class of user-defined all-gathers.

    A subclass may also define `gather_many(outputs, inputs, group) -> Work | None`, which gathers several tensors of
    different dtypes at once. The outputs are the parameters' memory, so this method needs no allocations or copies.

    Example::

        class Gather(AllGather):
            def allocate(self, size, *, dtype, device):
                return torch.empty(size, dtype=dtype, device=device)

            def __call__(self, output_tensor, input_tensor, group, async_op=False):
                return dist.all_gather_into_tensor(output_tensor, input_tensor, group=group, async_op=async_op)

        model.set_custom_all_gather(Gather())
    """

    @abstractmethod
    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> Work | None:
        """Fill `output_tensor` with the `input_tensor` of every rank. The input is this rank's piece of the output."""


class ReduceScatter(Comm):
    """Base class of user-defined reduce-scatters.

    A subclass may also define `reduce_scatter_many(outputs, inputs, group, op) -> Work | None`, which reduces several
    tensors at once and needs no allocations or copies.

    Example::

        class Reduce(ReduceScatter):
            def allocate(self, size, *, dtype, device):
                return torch.empty(size, dtype=dtype, device=device)

            def __call__(self, output_tensor, input_tensor, group, op, async_op=False):
                return dist.reduce_scatter_tensor(output_tensor, input_tensor, op, group=group, async_op=async_op)

        model.set_custom_reduce_scatter(Reduce())
    """

    @abstractmethod
    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> Work | None:
        """Fill `output_tensor` with this rank's piece of the reduced `input_tensor`s."""
