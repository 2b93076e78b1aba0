"""Where shards and optimizer state rest: on the device that computes, or offloaded to the host."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from functools import cache

import torch

from ...policies import CPUOffloadPolicy, OffloadPolicy, OptimizerOffloadPolicy
from ..checks.caller import stack_level_of_program
from ..side_stream import CopyStreams, copy_streams_of


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
