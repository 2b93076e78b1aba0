"""Where the shards rest: on the device that computes, or on the host."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..errors import StateError
from ..policies import CPUOffloadPolicy, OffloadPolicy


@dataclass(frozen=True)
class Residence:
    """`device` holds the master and gradient shards; `away` is true if that is not where gathers run."""

    device: torch.device
    away: bool
    pin: bool


def residence_for(policy: OffloadPolicy, compute: torch.device) -> Residence:
    if not isinstance(policy, CPUOffloadPolicy):
        return Residence(compute, away=False, pin=False)
    if policy.pin_memory and not torch.accelerator.is_available():
        raise StateError(
            "CPUOffloadPolicy(pin_memory=True) needs an accelerator and none is available. "
            "Pass CPUOffloadPolicy(pin_memory=False)."
        )
    return Residence(torch.device("cpu"), away=compute.type != "cpu", pin=policy.pin_memory)
