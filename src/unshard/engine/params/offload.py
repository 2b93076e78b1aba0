"""Offload to the host: the location of shards and optimizer state, and copies of offloaded shards to the device."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property

import torch

from ...comm.interface import Done, Work
from ...policies import CPUOffloadPolicy, OffloadPolicy, OptimizerOffloadPolicy
from ...torch_private import foreach_copy, stack_level_of_program
from .. import side_stream
from ..side_stream import CopyStreams, SideStream, copy_streams_of
from .buffers import Buffer, Shard


@dataclass(frozen=True)
class OffloadPlan:
    """The location of shards and sharded gradients.

    `copy_streams` is not None if this location is the host and the units compute on a device.
    """

    device: torch.device
    pin: bool = False
    copy_streams: CopyStreams | None = None
    states: OffloadPlan | None = None
    """The location of optimizer state, or None if optimizer state is in the same location as the shards."""

    @property
    def offloaded(self) -> bool:
        return self.copy_streams is not None

    def memory(self, nbytes: int, what: str = "shards") -> torch.Tensor:
        """Allocate zeroed memory that is never freed. `what` names its contents in warnings."""
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
    pin = policy.pin_memory and (side_stream.simulated or torch.accelerator.is_available())
    if policy.pin_memory and not pin:
        _warn_of_unpinned()
    host = OffloadPlan(torch.device("cpu"), pin, copy_streams_of(compute))
    return host if isinstance(policy, CPUOffloadPolicy) else OffloadPlan(compute, states=host)


@cache  # warn once per process, not once per unit
def _warn_of_unpinned() -> None:
    warnings.warn(
        "pin_memory=True needs an accelerator and none is available: shards and optimizer state are in ordinary host "
        "memory. Pass pin_memory=False to the offload policy to silence this warning.",
        stacklevel=stack_level_of_program(),
    )


class Upload:
    """Copies an offloaded shard to the device and casts the copy to the compute dtypes. Both run on a side stream.

    The copy waits only for earlier work on the side stream, so the copy can run while an earlier unit computes. The
    cast also waits for the compute stream, because this stream may still be reading the memory that the cast
    overwrites.
    """

    SAMPLES = 64

    def __init__(self, shard: Shard, device: torch.device, stream: SideStream, writes: Callable[[], tuple[int, int]]):
        """Prepare uploads of `shard` on `stream`.

        `writes` must return a value that changes when torch detects a write to the shard.
        """
        self._source, self._locals = shard.memory, shard.locals
        self._buffer = Buffer(self._source.numel(), device)
        self._target = self._buffer.tensor(torch.uint8, 0, (self._source.numel(),))
        self._buffer.release()
        self._stream, self._writes = stream, writes
        self._early: tuple[tuple[int, int], list[torch.Tensor]] | None = None
        """The result of `writes` and the samples when an unused early copy began, or None without such a copy."""

    def views(self, runs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the views of the device copy that correspond to `runs`, which are views of the shard."""
        self._buffer.take()
        base = self._source.data_ptr()
        views = [self._buffer.tensor(run.dtype, run.data_ptr() - base, run.shape) for run in runs]
        self._buffer.release()
        return views

    def start_early(self) -> None:
        """Start to copy the shard before the next all-gather is issued.

        The all-gather uses this copy only if the shard has not been written since.
        """
        if not self._is_current():
            self._copy_early()

    def _copy_early(self) -> None:
        self._early = self._writes(), [each.clone() for each in self._samples]
        self._stream.queue(lambda: None, first=self._copy)

    def forget(self) -> None:
        """Discard the copy that `start_early` made. Call this method when the shard has changed."""
        self._early = None

    def start(self, targets: list[torch.Tensor], views: list[torch.Tensor], issue: Callable[[], Work] = Done) -> Work:
        """Copy the shard, cast `views` of the copy into `targets`, and issue a collective.

        All three use the side stream.
        """
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
        """Return True if there is an early copy, and the shard was not written since. NaN samples count as writes."""
        if self._early is None:
            return False
        writes, samples = self._early
        return self._writes() == writes and all(map(torch.equal, self._samples, samples))

    @cached_property
    def _samples(self) -> list[torch.Tensor]:
        """A few elements of every parameter, evenly spaced.

        They reveal writes through `.data`, which torch does not count.
        """
        steps = [max(1, each.numel() // self.SAMPLES) for each in self._locals]
        return [
            each.detach().as_strided((-(-each.numel() // step),), (step,))
            for each, step in zip(self._locals, steps, strict=True)
        ]

    def _copy(self) -> None:
        self._buffer.take()
        self._target.copy_(self._source, non_blocking=True)


class IssuedOnSideStream:
    """A collective that is issued on a side stream, after the work that is queued on the compute stream."""

    def __init__(self, stream: SideStream, issue: Callable[[], Work], first: Callable[[], object] | None = None):
        """Issue the collective.

        If `first` is given, it is queued before `issue` and does not wait for the compute stream.
        """
        self._work: Work = Done()

        def run() -> None:
            self._work = issue()

        self._event = stream.queue(run, first)

    def wait(self) -> None:
        self._event.wait()  # for what the side stream did besides the collective, such as casts
        self._work.wait()
