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
from .groups import Pool
from .order.check import Label, Order

Tensors = list[torch.Tensor]


class Work(Protocol):
    """A collective in flight. Do not read, write or free its tensors before `wait` has returned.

    Works of the transports here also have `wait(timeout)`, which raises RuntimeError after the timeout. Then,
    `is_completed()` is False; if the collective itself failed instead, it is True.
    """

    def wait(self) -> object: ...


@dataclass(frozen=True)
class Traits:
    """Properties of a transport, from which the engine chooses layouts and streams."""

    gathers_groups: bool
    """`all_gather` takes several tensors in one collective."""
    reduces_groups: bool
    """`reduce_scatter` takes several tensors in one collective."""
    packing: PackingRule = PACK_SMALL
    """Decides which parameters are packed if a collective takes several tensors."""
    in_place_only: bool = False
    """`all_gather` reads this rank's piece from the output and ignores the inputs."""
    reduces_in_place: bool = False
    """`reduce_scatter` has nothing to add up, so its outputs may be its inputs."""
    gathers_on_any_stream: bool = False
    """`all_gather` allocates nothing, so it can be issued on one stream and waited for on another."""
    waits_in_stream: bool = False
    """`wait` of a reduction blocks the current stream, not the host."""
    piece_alignment: int = 1
    """Bytes to which packed pieces are padded."""
    reduce_scatter_ignores_timeout: bool = False
    """`wait(timeout)` of the backend's own reduce-scatter ignores the timeout."""
    gathers: bool = True
    """False for an object that only looks like a process group and has no all-gather."""


class Transport(ABC):
    """Moves the pieces of a unit between the ranks that shard it.

    Each method issues one collective, or one group of them, on the current stream and returns at once. Ranks compare
    labels before they issue a collective; collectives without a label are not compared.
    """

    rank: int
    world: int
    traits: Traits
    pool: Pool | None = None
    """Allocates the buffers of collectives; None for torch's allocator."""
    order: Order | None = None
    """None if collectives are not compared."""

    @abstractmethod
    def all_gather(self, outputs: Tensors, inputs: Tensors, *, label: Label | None = None) -> Work:
        """Fill outputs[i] with inputs[i] of every rank, in the order of ranks. An input may be a view of its output."""

    @abstractmethod
    def reduce_scatter(self, outputs: Tensors, inputs: Tensors, *, label: Label | None = None, average: bool) -> Work:
        """Fill outputs[i] with this rank's piece of the sum (or mean) of inputs[i] over the ranks.

        If input and output have different dtypes, pieces are sent in the input's and added up in the output's dtype.
        """

    @abstractmethod
    def all_reduce(self, tensors: Tensors, *, label: Label | None = None, average: bool) -> Work:
        """Replace each tensor by its sum (or mean) over the ranks."""

    def carrier(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype in which an all-gather sends `dtype`: `dtype` if the backend can, else uint8."""
        return dtype

    def next_unit_number(self) -> int:
        """Return the number of the next unit, the same on all ranks; 0 if collectives are not compared."""
        return 0 if self.order is None else self.order.next_unit_number()

    @property
    def compared_ranks(self) -> list[int]:
        """The global ranks of the process group; empty if collectives are not compared."""
        return [] if self.order is None else self.order.ranks

    def announce(self, what: str) -> None:
        """Describe the next collective without a label, for messages about ranks that wait."""
        if self.order is not None:
            self.order.progress.next_unlabelled = what

    def raised(self, text: str) -> bool:
        """Announce an exception to the other ranks; return False if collectives are not compared."""
        return self.order is not None and self.order.raised(text)

    def wrapped(self, wrap: Callable[[Transport], Transport]) -> Transport:
        """Return this transport with `wrap` applied to the part that sends. The order check stays outermost."""
        return wrap(self)


class Works:
    """Several works that are waited for as one."""

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
        """Return True if the first work that `wait` has not waited for yet is complete."""
        return not self.works or self.works[0].is_completed()


def joined(works: list[Any]) -> Work:
    """Return one work for all `works`, which may contain None: a process group written in Python may return that."""
    return works[0] or Done() if len(works) == 1 else Works([work or Done() for work in works])


class WorkThen:
    """A collective in flight. Its first `wait` also runs `then`, which adds up received pieces or copies the result.

    `then` also keeps tensors alive until the wait. Works of a user's class get no timeout, as they may not accept one.
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
    """A work that had nothing to do."""

    def wait(self, timeout: timedelta | None = None) -> None:
        pass

    def is_completed(self) -> bool:
        return True


class Comm(ABC):
    """A user's collective, which also allocates the tensors that it works on."""

    @abstractmethod
    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return an uninitialized tensor for the collective to work on."""


class AllGather(Comm):
    """A user's all-gather.

    A subclass may also define `gather_many(outputs, inputs, group) -> Work | None`, which gathers several tensors of
    several dtypes at once, directly into the parameters' memory. Then nothing is allocated or copied.
    """

    @abstractmethod
    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> Work | None:
        """Fill `output_tensor` with the `input_tensor` of every rank. The input is this rank's piece of the output."""


class ReduceScatter(Comm):
    """A user's reduce-scatter.

    A subclass may also define `reduce_scatter_many(outputs, inputs, group, op) -> Work | None`, which reduces several
    tensors at once, without allocations and copies: the counterpart of `AllGather.gather_many`.
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
