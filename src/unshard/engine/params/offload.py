"""Offload: where shards and optimizer state are kept, and how offloaded shards are copied to the device."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property

import torch

from ...comm.interface import Done, Work
from ...policies import CPUOffloadPolicy, OffloadPolicy, OptimizerOffloadPolicy
from ...torch_private import foreach_copy, stack_level_of_program
from ..side_stream import CopyStreams, SideStream, copy_streams_of
from .buffers import Buffer, Shard


@dataclass(frozen=True)
class OffloadPlan:
    """Where shards and sharded gradients are kept. `copy_streams` is set if the units compute on another device."""

    device: torch.device
    pin: bool = False
    copy_streams: CopyStreams | None = None
    states: OffloadPlan | None = None
    """Where optimizer state is kept, if not with the shards."""

    @property
    def offloaded(self) -> bool:
        return self.copy_streams is not None

    def memory(self, nbytes: int, what: str = "shards") -> torch.Tensor:
        """Allocate zeroed bytes, which stay allocated."""
        if not self.pin:
            return torch.zeros(nbytes, dtype=torch.uint8, device=self.device)
        try:
            return torch.zeros(nbytes, dtype=torch.uint8, device=self.device, pin_memory=True)
        except RuntimeError as error:
            reason = str(error).strip().partition("\n")[0]
            warnings.warn(
                f"{nbytes / 2**20:.1f} MiB of page-locked host memory for {what} could not be allocated "
                f"({reason}). Falling back to ordinary memory: copies to and from the device take several "
                "times as long and do not overlap with compute. Raise the limit of locked memory (ulimit -l, the "
                "container's memory), offload fewer units, or pass pin_memory=False to silence this warning.",
                stacklevel=2,
            )
            return torch.zeros(nbytes, dtype=torch.uint8, device=self.device)


def offload_plan_for(policy: OffloadPolicy, compute: torch.device) -> OffloadPlan:
    if not isinstance(policy, CPUOffloadPolicy | OptimizerOffloadPolicy):
        return OffloadPlan(compute)
    pin = policy.pin_memory and torch.accelerator.is_available()
    if policy.pin_memory and not pin:
        _warn_of_unpinned()
    host = OffloadPlan(torch.device("cpu"), pin, copy_streams_of(compute))
    return host if isinstance(policy, CPUOffloadPolicy) else OffloadPlan(compute, states=host)


@cache
def _warn_of_unpinned() -> None:
    """Warn that memory is not page-locked, once per process instead of once per unit."""
    warnings.warn(
        "pin_memory=True needs an accelerator and none is available: shards and optimizer state are in ordinary host "
        "memory. Pass pin_memory=False to the offload policy to silence this warning.",
        stacklevel=stack_level_of_program(),
    )


class Upload:
    """Copies an offloaded shard to the device, in the stored dtypes, and casts it there; both on a side stream.

    The copy waits only for earlier work of the side stream, so it runs while an earlier unit computes. The cast waits
    for the compute stream, which may still read earlier contents of the targets' memory.
    """

    SAMPLES = 64

    def __init__(self, shard: Shard, device: torch.device, stream: SideStream, writes: Callable[[], tuple[int, int]]):
        """`writes` returns a value that changes when the shard is written, as far as torch counts writes."""
        self._source, self._locals = shard.memory, shard.locals
        self._buffer = Buffer(self._source.numel(), device)
        self._target = self._buffer.tensor(torch.uint8, 0, (self._source.numel(),))
        self._buffer.release()
        self._stream, self._writes = stream, writes
        self._early: tuple[tuple[int, int], list[torch.Tensor]] | None = None
        """Writes and samples at the time of a copy that no all-gather has used yet."""

    def views(self, runs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return, for each of `runs`, which are views of the shard, the same view of the copy on the device."""
        self._buffer.take()
        base = self._source.data_ptr()
        views = [self._buffer.tensor(run.dtype, run.data_ptr() - base, run.shape) for run in runs]
        self._buffer.release()
        return views

    def start_early(self) -> None:
        """Copy ahead of the all-gather, which then checks that the shard was not written in between."""
        if not self._is_current():
            self._copy_early()

    def _copy_early(self) -> None:
        self._early = self._writes(), [each.clone() for each in self._samples]
        self._stream.queue(lambda: None, first=self._copy)

    def forget(self) -> None:
        """Discard the copy that `start_early` made. Call this when the shard has changed."""
        self._early = None

    def start(self, targets: list[torch.Tensor], views: list[torch.Tensor], issue: Callable[[], Work] = Done) -> Work:
        """Copy the shard, cast `views` of the copy into `targets` and issue a collective, all on the side stream."""
        current = self._is_current()
        self._early = None

        def cast_and_issue() -> Work:
            if targets:  # else the shard is the unsharded buffer itself
                foreach_copy(targets, views)
            # Free the memory now: it belongs to this stream, so its next owner queues behind the cast.
            self._buffer.release()
            return issue()

        return IssuedOnSideStream(self._stream, cast_and_issue, first=None if current else self._copy)

    def _is_current(self) -> bool:
        """Return True if an early copy exists and the shard was not written since. A NaN sample counts as a write."""
        if self._early is None:
            return False
        writes, samples = self._early
        return self._writes() == writes and all(map(torch.equal, self._samples, samples))

    @cached_property
    def _samples(self) -> list[torch.Tensor]:
        """A few elements of every parameter, evenly spread, to detect writes that are not counted (through `.data`)."""
        steps = [max(1, each.numel() // self.SAMPLES) for each in self._locals]
        return [
            each.detach().as_strided((-(-each.numel() // step),), (step,))
            for each, step in zip(self._locals, steps, strict=True)
        ]

    def _copy(self) -> None:
        self._buffer.take()
        self._target.copy_(self._source, non_blocking=True)


class IssuedOnSideStream:
    """A collective that is issued on a side stream, after everything that the compute stream has queued so far."""

    def __init__(self, stream: SideStream, issue: Callable[[], Work], first: Callable[[], object] | None = None):
        """`first` is queued before `issue`, and does not wait for the compute stream."""
        self._work: Work = Done()

        def run() -> None:
            self._work = issue()

        self._event = stream.queue(run, first)

    def wait(self) -> None:
        self._event.wait()  # for what the side stream did besides the collective, such as casts
        self._work.wait()
