"""Offload: where shards and optimizer state rest, and copies of offloaded shards to the device."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property

import torch

from ...comm.interface import Done, Work
from ...policies import CPUOffloadPolicy, OffloadPolicy, OptimizerOffloadPolicy
from ...torch_private import foreach_copy, stack_level_of_program
from ..side_stream import CopyStreams, SideStream, StreamEvent, copy_streams_of
from .buffers import Buffer, ShardLayout


@dataclass(frozen=True)
class OffloadPlan:
    """`device` holds shards and sharded gradients. If units compute elsewhere, `copy_streams` copy there and back."""

    device: torch.device
    pin: bool = False
    copy_streams: CopyStreams | None = None
    states: OffloadPlan | None = None
    """Where the optimizer keeps its state, if that is to be apart from the shards."""

    @property
    def offloaded(self) -> bool:
        return self.copy_streams is not None

    def memory(self, nbytes: int, what: str = "shards") -> torch.Tensor:
        """Zeroed bytes that stay."""
        if not self.pin:
            return torch.zeros(nbytes, dtype=torch.uint8, device=self.device)
        try:
            return torch.zeros(nbytes, dtype=torch.uint8, device=self.device, pin_memory=True)
        except RuntimeError as error:
            warnings.warn(
                f"{nbytes / 2**20:.1f} MiB of page-locked host memory for {what} could not be had ({_first_line(error)}"
                "). They lie in ordinary memory instead: copies to and from the device take several times as long and "
                "no longer overlap with the computation. Raise the limit of locked memory (ulimit -l, the container's "
                "memory), offload fewer units, or pass pin_memory=False to have this without a warning.",
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
    """Once per process: every unit would repeat it."""
    warnings.warn(
        "pin_memory=True needs an accelerator and none is available: shards and optimizer state are in ordinary host "
        "memory. Pass pin_memory=False to the offload policy to have this without a warning.",
        stacklevel=stack_level_of_program(),
    )


def _first_line(error: RuntimeError) -> str:
    return str(error).strip().partition("\n")[0]


class Samples:
    """A few elements of every tensor, evenly spread. They reveal writes through `.data`, which autograd does not count.

    Only for tensors on the host, which can be read at once.
    """

    MOST = 64

    def __init__(self, tensors: Sequence[torch.Tensor]):
        """`tensors` have no gaps."""
        self._tensors = tensors

    @cached_property
    def _places(self) -> list[torch.Tensor]:
        steps = [max(1, each.numel() // self.MOST) for each in self._tensors]
        return [
            each.detach().as_strided((-(-each.numel() // step),), (step,))
            for each, step in zip(self._tensors, steps, strict=True)
        ]

    def take(self) -> list[torch.Tensor]:
        return [each.clone() for each in self._places]

    def same(self, before: list[torch.Tensor]) -> bool:
        """Whether nothing was written to them since; NaN counts as written."""
        return all(map(torch.equal, self._places, before))


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
