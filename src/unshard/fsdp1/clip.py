"""`clip_grad_norm_` of a wrapped model."""

from __future__ import annotations

import functools
import math
import warnings
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ..comm.order.waiting import SharedCall
from ..engine.api import ManagedParam
from ..optim.clip import CLIP, checked_limit, checked_order, scale
from ..torch_private import foreach_norm
from .flat_parameter import flat_sharded_of, shard_begins
from .groups import Groups
from .state import WrapperState, wrapper_states

_SUM, _MAX = dist.ReduceOp.SUM, dist.ReduceOp.MAX


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
    if not sharded:
        others.clear()  # PyTorch then adds up in the order of parameters(), not of units
    others.update(dict.fromkeys(each for each in root.parameters() if each not in sharded))
    every = {**sharded, **others}
    apart = _take_tensor_parallel(states, sharded, others)
    norm = _total_norm(sharded, others, apart, order, states[0].unit.device, states[0].call.groups)
    if states[0].call.cpu_offload.offload_params:
        norm = norm.cpu()
    gradients = _gradients(every)
    scale(gradients, torch.clamp(limit / (norm + 1e-6), max=1.0))
    if not gradients:
        warnings.warn(
            f"Rank {dist.get_rank()} has no gradients; it returns the norm of the other ranks' gradients, in float32.",
            stacklevel=4,
        )
        return norm
    return norm.to(functools.reduce(torch.promote_types, [each.dtype.to_real() for each in gradients]))


def _total_norm(
    sharded: dict[nn.Parameter, None],
    others: dict[nn.Parameter, None],
    apart: dict[Kind, list[torch.Tensor]],
    order: float,
    device: torch.device,
    groups: Groups,
) -> torch.Tensor:
    """Over the ranks of `groups.own`, which hold shards of some parameters and copies of the others."""
    of_others = _norm(_gradients(others), order, device)
    reduced = bool(sharded) or any(kind.sharded for kind in apart)
    if not reduced and not apart:
        return of_others
    call, op = SharedCall(CLIP, [groups.own, groups.replicas]), _SUM if order < math.inf else _MAX
    of_shards = _norm(_gradients(sharded), order, device)
    if math.isinf(order):
        largest = torch.maximum(of_shards, of_others)
        for kind, gradients in apart.items():
            largest = torch.maximum(largest, kind.reduced(_norm(gradients, order, device), op, call))
        call.run(partial(dist.all_reduce, largest, op, groups.own))
        return largest
    power, rest = of_shards.pow(order), of_others.pow(order)
    for kind, gradients in apart.items():
        own = kind.reduced(_norm(gradients, order, device).pow(order), op, call)
        (power if kind.sharded else rest).add_(own)
    if reduced:
        call.run(partial(dist.all_reduce, power, op, groups.own))
    return (power + rest).pow(1 / order)


# -- tensor-parallel parameters --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Kind:
    """Over which ranks gradients are distributed: those of the wrapper's group, and of these groups besides."""

    sharded: bool
    tensor_parallel: tuple[Any, ...]

    def reduced(self, number: torch.Tensor, op: Any, call: SharedCall) -> torch.Tensor:
        for group in self.tensor_parallel:
            call.run(partial(dist.all_reduce, number, op, group))
        return number


def _take_tensor_parallel(
    states: list[WrapperState], sharded: dict[nn.Parameter, None], others: dict[nn.Parameter, None]
) -> dict[Kind, list[torch.Tensor]]:
    """The gradients that tensor parallelism shards, by kind; their parameters are removed from the dicts.

    The kinds are the same on all ranks, in the same order, whichever gradients there are. Of a flat parameter the
    gradients of all its parameters are taken, of several kinds.
    """
    found: dict[Kind, list[torch.Tensor]] = {}
    for state in states:
        flat, rank = flat_sharded_of(state.unit), state.transports[0].rank
        if flat is None or state.handle is None or all(param.tp_spec is None for param in flat.params):
            continue
        kinds = [Kind(state.handle.uses_sharded_strategy, _groups(param)) for param in flat.params]
        if not any(kind.tensor_parallel for kind in kinds):
            continue
        if flat.originals:
            taken = {
                param.sharded: kind for param, kind in zip(flat.params, kinds, strict=True) if kind.tensor_parallel
            }
            for parameter, kind in taken.items():
                found.setdefault(kind, []).extend(_gradients({parameter: None}))
        else:
            taken = dict.fromkeys([flat.flat.sharded], kinds[0])
            for kind in kinds:
                found.setdefault(kind, [])
            for index, begin in shard_begins(flat, rank):
                count = flat.params[index].sharding.elements(rank)[1]  # type: ignore[union-attr]
                whole = flat.flat.sharded.grad
                if whole is not None and count:
                    found[kinds[index]].append(whole[begin : begin + count])
        for parameter in taken:
            sharded.pop(parameter, None)
            others.pop(parameter, None)
    return found


def _groups(param: ManagedParam) -> tuple[Any, ...]:
    """The groups of the mesh dimensions over which tensor parallelism shards a parameter."""
    spec = param.tp_spec
    if spec is None:
        return ()
    return tuple(spec.mesh.get_group(number) for number, each in enumerate(spec.placements) if each.is_shard())


def _gradients(parameters: dict[nn.Parameter, None]) -> list[torch.Tensor]:
    return [each.grad for each in parameters if each.grad is not None]


def _norm(gradients: list[torch.Tensor], order: float, device: torch.device) -> torch.Tensor:
    """A norm of norms, in float32 whatever dtypes the gradients have; of float64 it is rounded at the end."""
    if not gradients:
        return torch.zeros((), device=device)
    gradients = [each.abs() if each.is_complex() else each for each in gradients]
    dtype = functools.reduce(torch.promote_types, [each.dtype for each in gradients], torch.float32)
    norms = [each.to(gradients[0].device) for each in foreach_norm(gradients, order, dtype=dtype)]
    return torch.linalg.vector_norm(torch.stack(norms), order, dtype=dtype).to(device, torch.float32)
