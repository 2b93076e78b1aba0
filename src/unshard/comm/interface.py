"""What the engine asks of whatever moves its tensors."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol

import torch

from .order import Event


class Work(Protocol):
    """A collective under way. Its tensors may be neither read, written nor freed before `wait` has returned."""

    def wait(self) -> object: ...


class Pool(Protocol):
    """Memory that a transport reaches faster than any other."""

    def allocating(self) -> AbstractContextManager[None]:
        """Allocations in here come from the pool."""


class Transport(ABC):
    """Moves the pieces of a unit between the ranks that shard it.

    The traits say what layout the engine must choose; the verbs issue one collective, or one group of
    them, from the current stream and return at once.
    """

    rank: int
    world: int
    gathers_groups: bool
    """`gather` takes several tensors in one collective."""
    reduces_groups: bool
    """`reduce_scatter` takes several tensors in one collective."""
    few: int = 0
    """So many small tensors cost less in a group than the copies that packing takes."""
    in_place_only: bool = False
    """`gather` reads this rank's piece only from its place in the output."""
    reduces_in_place: bool = False
    """`reduce_scatter` has nothing to add up and takes its outputs as inputs."""
    stays_in_lane: bool = False
    """`gather` can be issued from a lane, and waited for elsewhere: all memory it touches is what it is given."""
    waits_in_stream: bool = False
    """`wait` of a reduction makes the current stream wait, and not the host."""
    piece_alignment: int = 1
    """Bytes to which packed pieces are padded."""
    pool: Pool | None = None
    """Where the buffers of collectives should come from, if not from the usual allocator."""

    @abstractmethod
    def gather(self, outputs: list[torch.Tensor], inputs: list[torch.Tensor]) -> Work:
        """outputs[i] <- inputs[i] of every rank, one after the other. An input may lie in its output's place."""

    @abstractmethod
    def reduce_scatter(self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], *, average: bool) -> Work:
        """outputs[i] <- this rank's piece of the sum (or mean) of inputs[i] over the ranks.

        An input of another dtype than its output travels as it is and is added up in the output's dtype.
        """

    @abstractmethod
    def all_reduce(self, tensors: list[torch.Tensor], *, average: bool) -> Work:
        """Each tensor <- its sum (or mean) over the ranks."""

    def serial(self) -> int:
        """A number for the next unit, the same on all ranks; 0 where there are no peers to disagree with."""
        return 0

    def announce(self, event: Event, describe: Callable[[], str]) -> None:
        """Say which collective comes next, before it is issued; raises where another rank wants another one.

        `describe` tells what a rank "wants to" do, for the error.
        """
        return

    def carrier(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype a gather of `dtype` is sent as: itself, or bytes where the backend does not know it."""
        return dtype


class Works:
    """Several works waited for as one."""

    def __init__(self, works: list[Work]):
        self._works = works

    def wait(self) -> None:
        for work in self._works:
            work.wait()


class Done:
    """A work that had nothing to do."""

    def wait(self) -> None:
        pass
