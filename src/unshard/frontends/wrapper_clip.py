"""Clipping of a wrapped model's gradients by their norm over all ranks."""

from __future__ import annotations

import functools
import math
import warnings

import torch
import torch.distributed as dist
from torch import nn

from ..torch_private import foreach_mul, foreach_norm
from .wrapper_state import wrapper_states


def clip_gradients(root: nn.Module, limit: float, order: float) -> torch.Tensor:
    """The norm that all gradients below `root` had together, in the dtype that theirs promote to."""
    states = wrapper_states(root)
    cut: dict[int, torch.Tensor] = {}
    for state in states:
        if state.handle is not None and state.handle.uses_sharded_strategy:
            cut.update((id(slot.sharded), slot.sharded) for slot in state.unit.slots)
    present = [parameter for parameter in root.parameters() if parameter.grad is not None]
    device = states[0].unit.device
    local = _power([each.grad for each in present if id(each) in cut], order, device)  # type: ignore[misc]
    whole = _power([each.grad for each in present if id(each) not in cut], order, device)  # type: ignore[misc]
    if cut:
        group = states[0].call.groups.own
        dist.all_reduce(local, dist.ReduceOp.MAX if math.isinf(order) else dist.ReduceOp.SUM, group)
    norm = torch.maximum(local, whole) if math.isinf(order) else (local + whole).pow(1 / order)
    if states[0].call.cpu_offload.offload_params:
        norm = norm.cpu()
    gradients = [each.grad for each in present if each.grad is not None]
    _scale(gradients, torch.clamp(limit / (norm + 1e-6), max=1.0))
    if not gradients:
        warnings.warn(
            f"Rank {dist.get_rank()} has no gradients; the norm it returns is that of the others, in float32.",
            stacklevel=4,
        )
        return norm
    return norm.to(functools.reduce(torch.promote_types, [each.dtype for each in gradients]))


def _power(gradients: list[torch.Tensor], order: float, device: torch.device) -> torch.Tensor:
    """The norm to the power of its order, or the largest element; in float32 whatever the gradients are in."""
    if not gradients:
        return torch.zeros((), device=device)
    wide = [torch.float32 if each.dtype in (torch.float16, torch.bfloat16) else each.dtype for each in gradients]
    norms: list[torch.Tensor] = []
    for dtype in dict.fromkeys(wide):
        same = [each for each, own in zip(gradients, wide, strict=True) if own == dtype]
        norms += foreach_norm(same, order, dtype=dtype)
    stacked = torch.stack([norm.to(device, torch.float32) for norm in norms])
    return stacked.amax() if math.isinf(order) else stacked.pow(order).sum()


def _scale(gradients: list[torch.Tensor], factor: torch.Tensor) -> None:
    buckets: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for each in gradients:
        buckets.setdefault((each.device, each.dtype), []).append(each)
    for (device, _), same in buckets.items():
        foreach_mul(same, factor.to(device))
