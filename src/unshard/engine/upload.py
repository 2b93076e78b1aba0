"""The way of a shard that rests on the host into the memory of a gather."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from ..comm.interface import Done, Work
from ..torch_private import foreach_copy
from .buffers import Buffer
from .lane import Lane, Mark
from .shard import Shard
from .writes import Samples


@dataclass(frozen=True)
class Way:
    """How a shard on the host is reached."""

    lane: Lane
    writes: Callable[[], int]
    """Grows when the shard is written."""
    samples: Samples
    """Of the shard, where writes show that are not counted."""


class Upload:
    """One copy of the whole shard as it is stored, then the cast on the device; both in a lane.

    The copy waits for nothing but the lane, so it runs while an earlier unit computes. The cast has to wait for the
    computation, to which the memory belonged before.
    """

    def __init__(self, shard: Shard, runs: Sequence[torch.Tensor], device: torch.device, way: Way):
        """`runs`: the pieces of the shard that are gathered."""
        self._resting = shard.flat(torch.uint8, 0, shard.placement.nbytes)
        self._arrived = Buffer(shard.placement.nbytes, device)
        self._whole = self._arrived.tensor(torch.uint8, 0, (shard.placement.nbytes,))
        base = self._resting.data_ptr()
        self._runs = [self._arrived.tensor(run.dtype, run.data_ptr() - base, run.shape) for run in runs]
        self._arrived.release()
        self._way = way
        self._sent: tuple[int, list[torch.Tensor]] | None = None
        """Writes and samples at the time when a copy set out that nobody has asked for yet."""

    def send(self) -> None:
        """Let the copy set out before anybody asks for it. Whoever does looks whether the shard was written since."""
        if not self._on_its_way():
            self._set_out()

    def _set_out(self) -> None:
        self._sent = self._way.writes(), self._way.samples.take()
        self._way.lane.queue(_nothing, first=self._copy)

    def recall(self) -> None:
        """What was sent is out of date."""
        self._sent = None

    def start(self, targets: list[torch.Tensor], issue: Callable[[], Work] = Done) -> Work:
        """Fill `targets`, one for each run, then issue a collective, all in the lane."""
        carried = Carried()
        on_its_way = self._on_its_way()
        self._sent = None

        def finish() -> None:
            if targets:  # else the shard is the full buffer itself
                foreach_copy(targets, self._runs)
            self._arrived.release()
            carried.work = issue()

        carried.mark = self._way.lane.queue(finish, first=None if on_its_way else self._copy)
        return carried

    def _on_its_way(self) -> bool:
        """Whether what was sent is what the shard holds now."""
        if self._sent is None:
            return False
        writes, samples = self._sent
        return self._way.writes() == writes and self._way.samples.same(samples)

    def _copy(self) -> None:
        self._arrived.take()
        self._whole.copy_(self._resting, non_blocking=True)


def _nothing() -> None:
    pass


class Carried:
    """A collective that was issued in a lane."""

    mark: Mark

    def __init__(self) -> None:
        self.work: Work = Done()

    def wait(self) -> None:
        self.mark.wait()
        self.work.wait()
