"""Parameters that are DTensors before they are sharded: distributed over other ranks, as in tensor parallelism."""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor

from ..torch_private import DTensorSpec


def local_gradient(gradient: torch.Tensor, spec: DTensorSpec, summed: frozenset[int]) -> torch.Tensor:
    """This rank's piece of a gradient, distributed as its parameter is.

    Over the mesh dimensions in `summed` the reduction that follows adds up; there a gradient may stay unsummed.
    """
    if not isinstance(gradient, DTensor):
        return gradient
    pairs = zip(gradient.placements, spec.placements, strict=True)
    wanted = tuple(g if dim in summed and g.is_partial() else p for dim, (g, p) in enumerate(pairs))
    if gradient.placements != wanted:
        gradient = gradient.redistribute(placements=wanted)
    local = gradient.to_local()
    # Collectives inside autograd may hand over a tensor that is still on its way.
    return local.wait() if hasattr(local, "wait") else local
