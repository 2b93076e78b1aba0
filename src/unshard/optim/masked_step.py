"""An optimizer step that the device skips by itself: in a recorded step the host cannot look at what was found."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor

from ..names import optimizer_parameters
from ..torch_private import local_of


@torch.no_grad()
def step_unless(optimizer: torch.optim.Optimizer, found: list[torch.Tensor], *args: Any, **kwargs: Any) -> None:
    """Step, and undo that where any of `found` is positive.

    Takes the memory of parameters and state a second time. Optimizers with kernels of their own for it (fused=True) do
    not need this.
    """
    skip = found[0] > 0 if len(found) == 1 else torch.stack([each.to(found[0].device) for each in found]).amax() > 0
    before = [(tensor, tensor.clone()) for tensor in _written(optimizer, skip.device)]
    optimizer.step(*args, **kwargs)
    for tensor, copy in before:
        tensor.copy_(torch.where(skip.to(tensor.device), copy, tensor))


def _written(optimizer: torch.optim.Optimizer, device: torch.device) -> list[torch.Tensor]:
    """The local tensors that a step may write, each once: flat optimizers have several views of one counter.

    Of tensors that are attributes of the optimizer, those on `device`; captured steps refuse writes to others.
    """
    groups, entries = optimizer.param_groups, optimizer.state.values()
    dicts = [*groups, *(entry for entry in entries if isinstance(entry, dict))]
    others = [value for each in dicts for value in each.values() if isinstance(value, torch.Tensor)]
    attributes = [value for value in vars(optimizer).values() if isinstance(value, torch.Tensor)]
    others += [value for value in attributes if value.device == device]
    tensors = [
        local_of(each) if isinstance(each, DTensor) else each for each in (*optimizer_parameters(optimizer), *others)
    ]
    return list({id(each): each for each in tensors}.values())
