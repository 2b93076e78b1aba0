"""Sharded tensors in state dicts: made of unsharded ones, and unsharded again."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from ..comm.transports import transport_for
from ..layout.rows import RowSharding
from ..torch_private import ShardedTensor, make_dtensor, make_sharded_tensor, read_sharded_tensor
from .state import WrapperState
from .tensor_parallel import shard_on_meshes


def shard_tensor(unsharded: torch.Tensor, state: WrapperState, offload: bool) -> Any:
    """An unsharded parameter, or a state of it, as a sharded state dict has it; a DTensor if it is tensor parallel.

    In a model with tensor parallelism, plain parameters are on the same mesh as the others, replicated.
    """
    groups, meshes = state.call.groups, state.tensor_parallel_meshes()
    if isinstance(unsharded, DTensor):
        return shard_on_meshes(unsharded, groups, unsharded.device_mesh, offload)
    if len(meshes) == 1 and groups.mesh is not None:
        return shard_on_meshes(unsharded, groups, meshes[0], offload)
    return shard_rows(offloaded(unsharded, offload), groups.own, groups.mesh)


def shard_rows(unsharded: torch.Tensor, group: Any, mesh: DeviceMesh | None) -> Any:
    """This rank's rows, as a DTensor on the mesh or, without one, as a ShardedTensor of the group.

    A rank without rows has an empty shard: `torch.distributed.checkpoint` leaves out a ShardedTensor without shards on
    a rank, takes the checkpoint for one of an old version then, and does not find the optimizer's `param_groups`.
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
    """This rank's shard of a flat tensor, which has padding, as a ShardedTensor without padding."""
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
    """A DTensor or ShardedTensor unsharded; another value as it is. All ranks of the group have to call."""
    if isinstance(value, DTensor):
        return value.full_tensor()
    if not isinstance(value, ShardedTensor):
        return value
    shape, dtype, local = read_sharded_tensor(value)
    cut = RowSharding(shape, group.size())
    padded = torch.zeros((cut.chunk, *shape[1:]), dtype=dtype, device=device)
    if local is not None:
        padded[: local.shape[0]] = local.to(device)
    if group.size() == 1:
        return padded[: shape[0]]
    unsharded = torch.empty((cut.chunk * group.size(), *shape[1:]), dtype=dtype, device=device)
    transport_for(group, device).all_gather([unsharded.view(torch.uint8)], [padded.view(torch.uint8)]).wait()
    return unsharded[: shape[0]]


def offloaded(tensor: torch.Tensor, offload: bool) -> torch.Tensor:
    return tensor.cpu() if offload else tensor
