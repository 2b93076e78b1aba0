"""`clip_grad_norm_` of a wrapped model: the norm of gradients that are sharded as flat parameters.

`optim/clip.py` checks the arguments and scales. Only the norm differs: it adds up in PyTorch's order and in float32, so
that equal gradients have a bitwise identical norm.
"""

from __future__ import annotations

import functools
import math
import warnings
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ..comm.order.waiting import SharedCall
from ..optim.clip import CLIP, checked_limit, checked_order, clip
from ..torch_private import foreach_norm
from .flat_parameter import flat_sharded_of, shard_begins
from .groups import Groups
from .state import WrapperState, wrapper_states

Params = dict[nn.Parameter, None]
"""An ordered set."""
Kind = tuple[bool, tuple[Any, ...]]
"""True if the wrapper's ranks hold shards, False if they hold copies; and the groups that tensor parallelism shards
over."""


def clip_grad_norm(root: nn.Module, max_norm: Any, norm_type: Any) -> torch.Tensor:
    """Return the norm of all gradients below `root` before scaling, in the dtype that their dtypes promote to."""
    limit, order = checked_limit(max_norm), checked_order(norm_type, positive=True)
    states = wrapper_states(root)
    sharded: Params = {}
    others: Params = {}
    for state in states:
        flat = flat_sharded_of(state.unit)
        if flat is not None and state.handle is not None:
            own = [param.sharded for param in flat.params] if flat.originals else [flat.flat.sharded]
            (sharded if state.handle.uses_sharded_strategy else others).update(dict.fromkeys(own))
    if not sharded:
        others.clear()  # PyTorch then adds up in the order of parameters(), not of units
    others.update(dict.fromkeys(each for each in root.parameters() if each not in sharded))
    gradients = _gradients({**sharded, **others})
    apart = _take_tensor_parallel(states, sharded, others)
    norm = _total_norm(sharded, others, apart, order, states[0].unit.device, states[0].call.groups)
    if states[0].call.cpu_offload.offload_params:
        norm = norm.cpu()
    clip(gradients, norm, limit)
    if not gradients:
        warnings.warn(
            f"Rank {dist.get_rank()} has no gradients; it returns the norm of the other ranks' gradients, in float32.",
            stacklevel=4,
        )
        return norm
    return norm.to(functools.reduce(torch.promote_types, [each.dtype.to_real() for each in gradients]))


def _total_norm(
    sharded: Params,
    others: Params,
    apart: dict[Kind, list[torch.Tensor]],
    order: float,
    device: torch.device,
    groups: Groups,
) -> torch.Tensor:
    """The norm over the ranks of `groups.own`, which hold shards of some parameters and copies of the others."""
    if not sharded and not apart:
        return _norm(_gradients(others), order, device)
    call, largest = SharedCall(CLIP, [groups.own, groups.replicas]), math.isinf(order)
    op = dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM
    add = torch.maximum if largest else torch.add
    totals = {True: torch.zeros((), device=device), False: torch.zeros((), device=device)}
    measured: list[tuple[bool, tuple[Any, ...], list[torch.Tensor]]]
    measured = [(True, (), _gradients(sharded)), (False, (), _gradients(others))]
    measured += [(*kind, gradients) for kind, gradients in apart.items()]
    for is_sharded, tensor_parallel, gradients in measured:
        own = _norm(gradients, order, device)
        own = own if largest else own.pow(order)
        for group in tensor_parallel:
            call.run(partial(dist.all_reduce, own, op, group))
        totals[is_sharded] = add(totals[is_sharded], own)
    if largest:
        found = torch.maximum(totals[True], totals[False])
        call.run(partial(dist.all_reduce, found, op, groups.own))
        return found
    if sharded or any(is_sharded for is_sharded, _ in apart):
        call.run(partial(dist.all_reduce, totals[True], op, groups.own))
    return (totals[True] + totals[False]).pow(1 / order)


def _take_tensor_parallel(
    states: list[WrapperState], sharded: Params, others: Params
) -> dict[Kind, list[torch.Tensor]]:
    """Remove the parameters that tensor parallelism shards from `sharded` and `others`; return their gradients by kind.

    The kinds and their order are the same on all ranks, whichever gradients there are. A flat parameter is taken as a
    whole, and its gradients may be of several kinds.
    """
    found: dict[Kind, list[torch.Tensor]] = {}
    for state in states:
        flat, rank = flat_sharded_of(state.unit), state.transports[0].rank
        if flat is None or state.handle is None:
            continue
        is_sharded = state.handle.uses_sharded_strategy
        kinds = [(is_sharded, _tensor_parallel_groups(param.tp_spec)) for param in flat.params]
        if not any(tensor_parallel for _, tensor_parallel in kinds):
            continue
        if flat.originals:
            taken = {param.sharded: kind for param, kind in zip(flat.params, kinds, strict=True) if kind[1]}
            for parameter, kind in taken.items():
                found.setdefault(kind, []).extend(_gradients({parameter: None}))
        else:
            taken = {flat.flat.sharded: kinds[0]}
            for kind in kinds:
                found.setdefault(kind, [])
            whole = flat.flat.sharded.grad
            for index, begin in shard_begins(flat, rank):
                count = flat.params[index].sharding.elements(rank)[1]  # type: ignore[union-attr]
                if whole is not None and count:
                    found[kinds[index]].append(whole[begin : begin + count])
        for parameter in taken:
            sharded.pop(parameter, None)
            others.pop(parameter, None)
    return found


def _tensor_parallel_groups(spec: Any) -> tuple[Any, ...]:
    """The groups of the mesh dimensions over which tensor parallelism shards a parameter."""
    placements = () if spec is None else spec.placements
    return tuple(spec.mesh.get_group(number) for number, each in enumerate(placements) if each.is_shard())


def _gradients(parameters: Params) -> list[torch.Tensor]:
    return [each.grad for each in parameters if each.grad is not None]


def _norm(gradients: list[torch.Tensor], order: float, device: torch.device) -> torch.Tensor:
    """A norm of norms in float32, whatever dtypes the gradients have; float64 is rounded at the end."""
    if not gradients:
        return torch.zeros((), device=device)
    gradients = [each.abs() if each.is_complex() else each for each in gradients]
    dtype = functools.reduce(torch.promote_types, [each.dtype for each in gradients], torch.float32)
    norms = [each.to(gradients[0].device) for each in foreach_norm(gradients, order, dtype=dtype)]
    return torch.linalg.vector_norm(torch.stack(norms), order, dtype=dtype).to(device, torch.float32)
