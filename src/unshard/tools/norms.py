"""Norms, maxima and means of parameters and gradients by name, for any sharding, with one all-gather."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from ..comm.groups import covering_group, group_of, staging_device
from ..comm.order.waiting import SharedCall
from ..engine.api import FlatShardedParams, ManagedParam, ParamGroup, refuse_in_scope
from ..state.boxes import Box, BoxMap, box_map_of_dtensor, box_map_of_param, full_box
from ..torch_private import local_part, spec_of
from .precision_plan import ModelPlan

Statistics = dict[str, float]
"""`norm`, `max` (of absolute values) and `mean`."""

_COLUMNS = 9  # first element, number of elements, has a gradient; squares, maximum, sum of the gradient and the value


@dataclass(frozen=True)
class _Share:
    """This rank's elements of one parameter. Ranks with the same `first` hold copies of the same elements."""

    name: str
    numel: int
    """Number of elements of the whole parameter."""
    first: int
    value: torch.Tensor
    gradient: torch.Tensor | None


@torch.no_grad()
def tensor_norms(plan: ModelPlan) -> dict[str, dict[str, Statistics | None]]:
    """Return the statistics of the `gradient` and the `value` of every parameter, by name.

    Every rank must call this function. A parameter without a gradient on all ranks has None. Parameters whose elements
    are not real numbers are left out.
    """
    refuse_in_scope([each.parameter for each in plan.params], "norms()", "The ranks have not added up their gradients")
    shares = list(_shares(plan))
    group, groups = _group_of(plan)
    device = staging_device(group, [each.value for each in shares]) if group is not None else torch.device("cpu")
    numbers = [number for each in shares for number in _row(each)]
    mine = torch.stack([each.to(device, torch.float64) for each in numbers]) if numbers else torch.zeros(0)
    if group is None or group.size() == 1:
        table = mine[None]
    else:
        table = mine.new_empty(group.size() * len(mine))
        call = SharedCall("measure parameters and gradients (norms)", groups)
        renamed = hasattr(dist, "all_gather_single")  # since torch 2.13
        all_gather = dist.all_gather_single if renamed else dist.all_gather_into_tensor
        call.run(partial(all_gather, table, mine, group))
    rows = table.view(-1, len(shares), _COLUMNS).transpose(0, 1).tolist()
    return {each.name: _combined(each.numel, of_ranks) for each, of_ranks in zip(shares, rows, strict=True)}


def _combined(numel: int, rows: list[list[float]]) -> dict[str, Statistics | None]:
    # One row per distinct share: replicas hold the same elements.
    distinct = list({row[0]: row for row in rows if row[1]}.values())
    any_gradient = any(row[2] for row in distinct)
    return {
        "gradient": _statistics(numel, [row[3:6] for row in distinct]) if any_gradient else None,
        "value": _statistics(numel, [row[6:9] for row in distinct]),
    }


def _statistics(numel: int, parts: list[list[float]]) -> Statistics:
    largest = [part[1] for part in parts]
    return {
        "norm": math.sqrt(sum(part[0] for part in parts)),
        "max": math.nan if any(map(math.isnan, largest)) else max(largest, default=0.0),
        "mean": sum(part[2] for part in parts) / numel if numel else 0.0,
    }


def _row(share: _Share) -> Iterator[torch.Tensor]:
    facts = share.first, share.value.numel(), share.gradient is not None
    yield from torch.tensor(facts, dtype=torch.float64)
    for tensor in (share.gradient, share.value):
        if tensor is None or not tensor.numel():
            yield from torch.zeros(3, dtype=torch.float64)
            continue
        yield torch.linalg.vector_norm(tensor, dtype=torch.float64).square()
        yield torch.linalg.vector_norm(tensor, math.inf)
        yield tensor.sum(dtype=torch.float64)


# -- this rank's shares ------------------------------------------------------------------------------------------


def _shares(plan: ModelPlan) -> Iterator[_Share]:
    names = {each.param: each.name for each in plan.params}
    for unit in plan.units:
        for group in unit.state.unit.param_groups:
            for param in group.params:
                if param.local.is_floating_point() and not param.packed:
                    yield _share_of(names[param], param, group)
    for name, parameter in plan.unmanaged:
        if parameter.is_floating_point():
            gradient = parameter.grad
            if isinstance(parameter, DTensor):
                if gradient is not None and spec_of(gradient).placements != spec_of(parameter).placements:
                    gradient = gradient.redistribute(placements=spec_of(parameter).placements)
                box_map = box_map_of_dtensor(name, parameter)
            else:
                box_map = BoxMap(tuple(parameter.shape), (full_box(parameter.shape),), ())
            yield _share(name, box_map, local_part(parameter), gradient)


def _share_of(name: str, param: ManagedParam, group: ParamGroup) -> _Share:
    sharded, rank = group.sharded, group.shards.rank
    value, gradient = local_part(param.sharded), param.sharded.grad
    if isinstance(sharded, FlatShardedParams) and not sharded.originals:
        value = param.local
        if gradient is not None:
            sharding: Any = param.sharding
            begin = max(sharding.begin - rank * sharding.shard_numel, 0)
            gradient = gradient[begin : begin + value.numel()]
    box_map = box_map_of_param(name, param, rank, in_a_row=isinstance(sharded, FlatShardedParams))
    return _share(name, box_map, value, gradient)


def _share(name: str, box_map: BoxMap, value: torch.Tensor, gradient: torch.Tensor | None) -> _Share:
    whole = full_box(box_map.shape)
    first = _first(box_map.boxes[0], whole) if box_map.boxes else 0
    local = None if gradient is None else local_part(gradient)
    return _Share(name, whole.numel, first, value.detach(), local)


def _first(box: Box, whole: Box) -> int:
    return box.elements_in(whole)[0] if box.numel else 0


# -- the ranks that hold the parameters --------------------------------------------------------------------------


def _group_of(plan: ModelPlan) -> tuple[Any, list[Any]]:
    """Return the process group of all ranks that hold the parameters, and the groups over which they are sharded."""
    if not dist.is_initialized():
        return None, []
    parameters = [each.param.sharded for each in plan.params] + [each for _, each in plan.unmanaged]
    specs = [spec_of(each) for each in parameters if isinstance(each, DTensor)]
    specs += [each.param.tp_spec for each in plan.params if each.param.tp_spec is not None]
    meshes: dict[int, DeviceMesh] = {id(spec.mesh): spec.mesh for spec in specs}
    groups = [mesh.get_group(dim) for mesh in meshes.values() for dim in range(mesh.ndim)]
    flat = [
        group
        for unit in plan.units
        for group in unit.state.unit.param_groups
        if isinstance(group.sharded, FlatShardedParams)
    ]
    if flat:
        ranks = sorted({rank for group in flat for rank in group.shards.compared_ranks})
        alone = not meshes and all(group.replicas.world == 1 for group in flat)
        subset = alone and 0 < len(ranks) < dist.get_world_size() and dist.get_rank() in ranks
        return (group_of(ranks, "gradients") if subset else dist.group.WORLD), groups
    return (covering_group(list(meshes.values())) if meshes else dist.group.WORLD), groups
