"""The part of a parameter's gradient that lies on this rank, as a plain dense tensor."""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor

from ..torch_private import local_of


def local_gradient(parameter: torch.Tensor) -> torch.Tensor | None:
    """What a write to it changes in the gradient; None if there is no gradient, or nothing of it here."""
    gradient = parameter.grad
    if gradient is None:
        return None
    if isinstance(gradient, DTensor):
        gradient = local_of(gradient)
    elif gradient.is_sparse:
        # Entries of one row add up: only their sum can be measured, and it may overflow where they did not.
        if not gradient.is_coalesced():
            parameter.grad = gradient = gradient.coalesce()
        gradient = gradient.values()
    return gradient if gradient.numel() else None
