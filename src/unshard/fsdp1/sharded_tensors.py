"""Converts unsharded tensors to the sharded ones of state dicts (ShardedTensor, DTensor), and back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from ..comm.transports import transport_for
from ..engine.api import ManagedParam
from ..errors import UnsupportedError
from ..layout.rows import RowSharding
from ..torch_private import (
    ShardedTensor,
    concatenated_mesh,
    local_of,
    local_part,
    make_dtensor,
    make_sharded_tensor,
    read_sharded_tensor,
)
from .groups import Groups
from .state import WrapperState


def shard_tensor(unsharded: torch.Tensor, state: WrapperState, offload: bool) -> Any:
    """Shard a parameter or its state for a sharded state dict. A tensor-parallel one is passed as a DTensor.

    In a model with tensor parallelism, plain parameters are replicated on the mesh of the others.
    """
    groups, meshes = state.call.groups, state.tensor_parallel_meshes()
    if isinstance(unsharded, DTensor):
        return shard_on_meshes(unsharded, groups, unsharded.device_mesh, offload)
    if len(meshes) == 1 and groups.mesh is not None:
        return shard_on_meshes(unsharded, groups, meshes[0], offload)
    return shard_rows(offloaded(unsharded, offload), groups.own, groups.mesh)


def shard_rows(unsharded: torch.Tensor, group: Any, mesh: DeviceMesh | None) -> Any:
    """This rank's rows, as a DTensor on the mesh or, without one, as a ShardedTensor of the group.

    A rank without rows has an empty shard. `torch.distributed.checkpoint` skips a ShardedTensor without local shards,
    then takes the checkpoint for one of an old version, and does not find the optimizer's `param_groups`.
    """
    cut = RowSharding(tuple(unsharded.shape), group.size())
    rows = unsharded.narrow(0, *cut.rows(group.rank())).clone()
    if mesh is not None:
        placements = (*[Replicate()] * (mesh.ndim - 1), Shard(0))
        return make_dtensor(rows, mesh, placements, unsharded.shape)
    shards = []
    for rank in range(group.size()):
        offsets = [cut.rows(rank)[0], *[0] * (unsharded.ndim - 1)]
        shards.append((offsets, list(cut.local_shape(rank)), dist.get_global_rank(group, rank)))
    return make_sharded_tensor(rows, shards, tuple(unsharded.shape), group)


def shard_flat(local: torch.Tensor, length: int, group: Any) -> Any:
    """Convert this rank's padded shard of a flat tensor to a ShardedTensor without padding."""
    shard_numel, rank = local.numel(), group.rank()
    shards = []
    for each in range(group.size()):
        first, count = each * shard_numel, min(max(length - each * shard_numel, 0), shard_numel)
        if count or (each == 0 and not length):  # torch refuses a ShardedTensor without shards
            shards.append(([first], [count], dist.get_global_rank(group, each)))
    mine = min(max(length - rank * shard_numel, 0), shard_numel)
    return make_sharded_tensor(local[:mine].clone(), shards, (length,), group)


def is_sharded(value: Any) -> bool:
    return isinstance(value, DTensor | ShardedTensor)


@torch.no_grad()
def full_tensor(value: Any, group: Any, device: torch.device) -> Any:
    """Unshard a DTensor or ShardedTensor; return any other value unchanged. Collective over the group."""
    if isinstance(value, DTensor):
        return value.full_tensor()
    if not isinstance(value, ShardedTensor):
        return value
    shape, dtype, local = read_sharded_tensor(value)
    cut = RowSharding(shape, group.size())
    padded = torch.zeros((cut.chunk, *shape[1:]), dtype=dtype, device=device)
    if local is not None:
        padded[: local.shape[0]] = local.to(device)
    return all_gathered(padded, group, device)[: shape[0]]


def all_gathered(shard: torch.Tensor, group: Any, device: torch.device) -> torch.Tensor:
    """All-gather shards of equal shape along dim 0. They are sent as bytes: backends do not support all dtypes."""
    if group is None or group.size() == 1:
        return shard
    shard = shard.contiguous().to(device)
    unsharded = shard.new_empty((shard.shape[0] * group.size(), *shard.shape[1:]))
    transport_for(group, device).all_gather([unsharded.view(torch.uint8)], [shard.view(torch.uint8)]).wait()
    return unsharded


def offloaded(tensor: torch.Tensor, offload: bool) -> torch.Tensor:
    return tensor.cpu() if offload else tensor


# -- tensor-parallel parameters ----------------------------------------------------------------------------------


def full_value(value: torch.Tensor) -> torch.Tensor:
    """The full tensor of an unsharded parameter or state. Collective over the tensor-parallel mesh."""
    return value.full_tensor() if isinstance(value, DTensor) else value


def tp_local(param: ManagedParam, value: Any) -> Any:
    """Cut a full parameter or state to what this rank computes with, if the parameter is tensor parallel.

    `value` may also be a DTensor on the tensor-parallel mesh, as in `summon_full_params`. Values of another shape are
    returned unchanged.
    """
    spec = param.tp_spec
    if spec is None or not isinstance(value, torch.Tensor) or value.shape != spec.shape:
        return value
    if isinstance(value, DTensor):
        if value.device_mesh == spec.mesh and value.placements == spec.placements:
            return local_of(value)
        value = value.full_tensor()
    return _cut(value, spec.mesh, spec.placements).contiguous()


def shard_on_meshes(value: torch.Tensor, groups: Groups, tp_mesh: DeviceMesh, offload: bool) -> DTensor:
    """Convert an unsharded parameter or state to a DTensor over the mesh of the unit and `tp_mesh` together.

    Like PyTorch's wrapper: data parallelism shards dim 0 first, and tensor parallelism shards the result.
    """
    if groups.mesh is None:
        raise UnsupportedError(
            "A sharded state dict of a model with tensor-parallel parameters needs the mesh of the other ranks: wrap "
            'with device_mesh=mesh["dp"] instead of process_group, or set FULL_STATE_DICT.'
        )
    over_tp: Sequence[Placement] = value.placements if isinstance(value, DTensor) else [Replicate()] * tp_mesh.ndim
    mesh = concatenated_mesh([groups.mesh, tp_mesh])
    placements = (*[Replicate()] * (groups.mesh.ndim - 1), Shard(0), *over_tp)
    if any(each.is_shard(0) for each in over_tp):
        mine = _cut(full_value(value), mesh, placements)
    else:
        mine = _cut(local_part(value), groups.mesh, placements[: groups.mesh.ndim])
    mine = mine.cpu() if offload and mine.device.type != "cpu" else mine.clone()
    return make_dtensor(mine.contiguous(), mesh, placements, value.shape)


def _cut(whole: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> torch.Tensor:
    """A view of this rank's elements: each mesh dimension in turn chunks the result of the previous one."""
    for number, placement in enumerate(placements):
        if isinstance(placement, Shard):
            rows = RowSharding((whole.shape[placement.dim],), mesh.size(number))
            whole = whole.narrow(placement.dim, *rows.rows(mesh.get_local_rank(number)))
    return whole
