"""`clip_grad_norm_` of a wrapped model."""

from __future__ import annotations

import functools
import math
import warnings

import torch
import torch.distributed as dist
from torch import nn

from ..torch_private import foreach_mul, foreach_norm
from .state import wrapper_states


def clip_grad_norm(root: nn.Module, max_norm: float, norm_type: float) -> torch.Tensor:
    """The norm of all gradients below `root`, before they are scaled, in the dtype that theirs promote to."""
    states = wrapper_states(root)
    sharded: set[int] = set()
    for state in states:
        if state.handle is not None and state.handle.uses_sharded_strategy:
            sharded.update(id(param.sharded) for param in state.unit.params)
    gradients = [(id(each) in sharded, each.grad) for each in root.parameters() if each.grad is not None]
    device = states[0].unit.device
    shards = _power([each for is_sharded, each in gradients if is_sharded], norm_type, device)
    others = _power([each for is_sharded, each in gradients if not is_sharded], norm_type, device)
    if sharded:
        group = states[0].call.groups.own
        dist.all_reduce(shards, dist.ReduceOp.MAX if math.isinf(norm_type) else dist.ReduceOp.SUM, group)
    norm = torch.maximum(shards, others) if math.isinf(norm_type) else (shards + others).pow(1 / norm_type)
    if states[0].call.cpu_offload.offload_params:
        norm = norm.cpu()
    _scale([each for _, each in gradients], torch.clamp(max_norm / (norm + 1e-6), max=1.0))
    if not gradients:
        warnings.warn(
            f"Rank {dist.get_rank()} has no gradients; it returns the norm of the other ranks' gradients, in float32.",
            stacklevel=4,
        )
        return norm
    return norm.to(functools.reduce(torch.promote_types, [each.dtype for _, each in gradients]))


def _power(gradients: list[torch.Tensor], norm_type: float, device: torch.device) -> torch.Tensor:
    """The norm to the power of `norm_type`, or the largest element; in float32 whatever dtypes the gradients have."""
    if not gradients:
        return torch.zeros((), device=device)
    low = (torch.float16, torch.bfloat16)
    by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
    for each in gradients:
        by_dtype.setdefault(torch.float32 if each.dtype in low else each.dtype, []).append(each)
    norms: list[torch.Tensor] = []
    for dtype, same in by_dtype.items():
        norms += foreach_norm(same, norm_type, dtype=dtype)
    stacked = torch.stack([norm.to(device, torch.float32) for norm in norms])
    return stacked.amax() if math.isinf(norm_type) else stacked.pow(norm_type).sum()


def _scale(gradients: list[torch.Tensor], factor: torch.Tensor) -> None:
    buckets: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for each in gradients:
        buckets.setdefault((each.device, each.dtype), []).append(each)
    for (device, _), same in buckets.items():
        foreach_mul(same, factor.to(device))
