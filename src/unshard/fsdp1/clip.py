"""`clip_grad_norm_` of a wrapped model."""

from __future__ import annotations

import functools
import math
import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ..optim.clip import checked_limit, checked_order, scale
from ..torch_private import foreach_norm
from .flat_parameter import flat_sharded_of
from .state import wrapper_states


def clip_grad_norm(root: nn.Module, max_norm: Any, norm_type: Any) -> torch.Tensor:
    """The norm of all gradients below `root`, before they are scaled, in the dtype that theirs promote to.

    Sums are added up in PyTorch's order, so that the norm is the same bit for bit where the gradients are.
    """
    limit, order = checked_limit(max_norm), checked_order(norm_type)
    states = wrapper_states(root)
    sharded: dict[nn.Parameter, None] = {}
    others: dict[nn.Parameter, None] = {}
    for state in states:
        flat = flat_sharded_of(state.unit)
        if flat is not None and state.handle is not None:
            own = [param.sharded for param in flat.params] if flat.originals else [flat.flat.sharded]
            (sharded if state.handle.uses_sharded_strategy else others).update(dict.fromkeys(own))
    others.update(dict.fromkeys(each for each in root.parameters() if each not in sharded))
    norm = _total_norm(sharded, others, order, states[0].unit.device, states[0].call.groups.own)
    if states[0].call.cpu_offload.offload_params:
        norm = norm.cpu()
    gradients = _gradients({**sharded, **others})
    scale(gradients, torch.clamp(limit / (norm + 1e-6), max=1.0))
    if not gradients:
        warnings.warn(
            f"Rank {dist.get_rank()} has no gradients; it returns the norm of the other ranks' gradients, in float32.",
            stacklevel=4,
        )
        return norm
    return norm.to(functools.reduce(torch.promote_types, [each.dtype for each in gradients]))


def _total_norm(
    sharded: dict[nn.Parameter, None], others: dict[nn.Parameter, None], order: float, device: torch.device, group: Any
) -> torch.Tensor:
    """Over the ranks of `group`, which hold shards of some parameters and copies of the others."""
    of_others = _norm(_gradients(others), order, device)
    if not sharded:
        return of_others
    of_shards = _norm(_gradients(sharded), order, device)
    if math.isinf(order):
        largest = torch.maximum(of_shards, of_others)
        dist.all_reduce(largest, dist.ReduceOp.MAX, group)
        return largest
    power = of_shards.pow(order)
    dist.all_reduce(power, group=group)
    return (power + of_others.pow(order)).pow(1 / order)


def _gradients(parameters: dict[nn.Parameter, None]) -> list[torch.Tensor]:
    return [each.grad for each in parameters if each.grad is not None]


def _norm(gradients: list[torch.Tensor], order: float, device: torch.device) -> torch.Tensor:
    """A norm of norms, in float32 whatever dtypes the gradients have."""
    if not gradients:
        return torch.zeros((), device=device)
    norms = [each.to(gradients[0].device) for each in foreach_norm(gradients, order, dtype=torch.float32)]
    return torch.linalg.vector_norm(torch.stack(norms), order, dtype=torch.float32).to(device)
