"""Copies an offloaded shard to the device, into the memory of its all-gather."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from ...comm.interface import Done, Work
from ...torch_private import foreach_copy
from ..params.buffers import Buffer
from ..params.shard import ShardLayout
from ..params.writes import Samples
from ..side_stream import SideStream, StreamEvent


@dataclass(frozen=True)
class HostCopy:
    """How an offloaded shard is reached, and how a write to it is noticed."""

    stream: SideStream
    writes: Callable[[], tuple[int, int]]
    """Grows when the shard is written."""
    samples: Samples
    """Of the shard: they show writes that are not counted."""


class Upload:
    """One copy of the shard as it is stored, then the cast on the device; both on a side stream.

    The copy waits for nothing but the stream, so it runs while an earlier unit computes. The cast waits for the compute
    stream, which had the memory before.
    """

    def __init__(self, shard: ShardLayout, runs: Sequence[torch.Tensor], device: torch.device, host_copy: HostCopy):
        """`runs`: the pieces of the shard that are gathered."""
        self._source = shard.flat(torch.uint8, 0, shard.buffer_layout.nbytes)
        self._buffer = Buffer(shard.buffer_layout.nbytes, device)
        self._target = self._buffer.tensor(torch.uint8, 0, (shard.buffer_layout.nbytes,))
        base = self._source.data_ptr()
        self._runs = [self._buffer.tensor(run.dtype, run.data_ptr() - base, run.shape) for run in runs]
        self._buffer.release()
        self._host_copy = host_copy
        self._early: tuple[tuple[int, int], list[torch.Tensor]] | None = None
        """Writes and samples at the time of a copy that no all-gather has used yet."""

    def start_early(self) -> None:
        """Copy before the all-gather asks for it. That one looks whether the shard was written since."""
        if not self._is_current():
            self._copy_early()

    def _copy_early(self) -> None:
        self._early = self._host_copy.writes(), self._host_copy.samples.take()
        self._host_copy.stream.queue(_nothing, first=self._copy)

    def forget(self) -> None:
        """What was copied early is out of date."""
        self._early = None

    def start(self, targets: list[torch.Tensor], issue: Callable[[], Work] = Done) -> Work:
        """Fill `targets`, one for each run, then issue a collective, all on the side stream."""
        issued = IssuedOnSideStream()
        current = self._is_current()
        self._early = None

        def finish() -> None:
            if targets:  # else the shard is the unsharded buffer itself
                foreach_copy(targets, self._runs)
            self._buffer.release()
            issued.work = issue()

        issued.event = self._host_copy.stream.queue(finish, first=None if current else self._copy)
        return issued

    def _is_current(self) -> bool:
        """Whether what was copied early is what the shard holds now."""
        if self._early is None:
            return False
        writes, samples = self._early
        return self._host_copy.writes() == writes and self._host_copy.samples.same(samples)

    def _copy(self) -> None:
        self._buffer.take()
        self._target.copy_(self._source, non_blocking=True)


def _nothing() -> None:
    pass


class IssuedOnSideStream:
    """A collective that was issued on a side stream."""

    event: StreamEvent

    def __init__(self) -> None:
        self.work: Work = Done()

    def wait(self) -> None:
        self.event.wait()
        self.work.wait()
