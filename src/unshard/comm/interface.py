"""What the engine asks of a transport: the collectives between the ranks of one process group."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol

import torch

from ..layout.collective_tensors import PACK_SMALL, PackingRule


class Work(Protocol):
    """A collective in flight. Its tensors may be neither read, written nor freed before `wait` has returned.

    A transport's own works also take `wait(timeout)`, which raises RuntimeError when the time is over, and tell by
    `is_completed()` whether that was the collective's own error instead.
    """

    def wait(self) -> object: ...


class Pool(Protocol):
    """Memory that a transport reaches faster than any other."""

    def allocating(self) -> AbstractContextManager[None]:
        """Allocations in here come from the pool."""


class Label:
    """Names a collective that is issued again and again: one object per param group and purpose, made once.

    The ranks compare labels to find out whether they issue the same collective.
    """

    __slots__ = ("describe", "number", "unit")

    def __init__(self, describe: Callable[[], str], unit: int = 0) -> None:
        self.describe = describe  # what a rank "wants to" do, for the error
        self.unit = unit  # which unit of its process group, in the order they were made; names can be exchanged
        self.number = -1  # given at the first use: then all ranks agree on it, whatever else they have made


@dataclass(frozen=True)
class Traits:
    """What layout and streams the engine must choose for a transport."""

    gathers_groups: bool
    """`all_gather` takes several tensors in one collective."""
    reduces_groups: bool
    """`reduce_scatter` takes several tensors in one collective."""
    packing: PackingRule = PACK_SMALL
    """What is packed, where a collective takes several tensors."""
    in_place_only: bool = False
    """`all_gather` reads this rank's piece only from its place in the output."""
    reduces_in_place: bool = False
    """`reduce_scatter` has nothing to add up and takes its outputs as inputs."""
    gathers_on_any_stream: bool = False
    """`all_gather` can be issued from a side stream, and waited for elsewhere: it allocates nothing itself."""
    waits_in_stream: bool = False
    """`wait` of a reduction makes the current stream wait, and not the host."""
    piece_alignment: int = 1
    """Bytes to which packed pieces are padded."""
    reduce_scatter_ignores_timeout: bool = False
    """`wait(timeout)` of the backend's own reduce-scatter returns only when the collective is complete."""
    gathers: bool = True
    """There is an all-gather; an object that only looks like a process group may have none."""


class CallOrder(Protocol):
    """Compares what the ranks of one process group do; its transports share one."""

    name: str
    error: str

    @property
    def ranks(self) -> list[int]:
        """The members of the process group, as the whole job numbers them."""

    def meet(self, what: str) -> Label:
        """Wait until all ranks want to do `what`; raises if one of them wants something else."""

    def compare_step(self) -> None:
        """To be called before an optimizer steps parameters of this process group."""


class Transport(ABC):
    """Moves the pieces of a unit between the ranks that shard it.

    Each method issues one collective, or one group of them, from the current stream and returns at once.
    """

    rank: int
    world: int
    traits: Traits
    pool: Pool | None = None
    """Where the buffers of collectives should come from, if not from the usual allocator."""
    order: CallOrder | None = None
    """None if collectives are not compared."""

    @abstractmethod
    def all_gather(self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], label: Label | None = None) -> Work:
        """outputs[i] <- inputs[i] of every rank, in the order of ranks. An input may be its place in the output.

        A collective without a label is not compared between the ranks.
        """

    @abstractmethod
    def reduce_scatter(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], label: Label | None = None, *, average: bool
    ) -> Work:
        """outputs[i] <- this rank's piece of the sum (or mean) of inputs[i] over the ranks.

        An input of another dtype than its output is sent as it is and added up in the output's dtype.
        """

    @abstractmethod
    def all_reduce(self, tensors: list[torch.Tensor], label: Label | None = None, *, average: bool) -> Work:
        """Each tensor <- its sum (or mean) over the ranks."""

    def carrier(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype an all-gather of `dtype` is sent as: itself, or bytes where the backend does not know it."""
        return dtype

    def next_unit_number(self) -> int:
        """A number for the next unit, the same on all ranks; 0 where collectives are not compared."""
        return 0

    @property
    def compared_ranks(self) -> list[int]:
        """The ranks whose collectives are compared, as the whole job numbers them; none where nothing is compared."""
        return []

    def announce(self, what: str) -> None:  # noqa: B027
        """Name the next collective without a label, for the error of a rank that waits for others to issue it."""

    def raised(self, text: str) -> bool:
        """Tell the other ranks of an exception on this one; false where ranks do not tell each other anything."""
        return False

    def wrapped(self, wrap: Callable[[Transport], Transport]) -> Transport:
        """`wrap` applied to what sends. A transport that only checks calls stays outside."""
        return wrap(self)


class Works:
    """Several works waited for as one."""

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
        """Of the one that `wait` comes to next."""
        return not self.works or self.works[0].is_completed()


class Done:
    """A work that had nothing to do."""

    def wait(self, timeout: timedelta | None = None) -> None:
        pass

    def is_completed(self) -> bool:
        return True
