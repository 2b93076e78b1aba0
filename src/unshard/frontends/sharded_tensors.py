"""Whole tensors as one rank's rows of a distributed one, and back: what sharded state dicts hold."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from ..comm.process_group import transport_for
from ..layout.rows import Cut
from ..torch_private import ShardedTensor, make_dtensor, make_sharded_tensor, read_sharded_tensor


def cut_rows(whole: torch.Tensor, group: Any, mesh: DeviceMesh | None) -> Any:
    """This rank's rows, as a DTensor on the mesh or, without one, as a ShardedTensor of the group.

    A rank without rows has an empty piece: `torch.distributed.checkpoint` leaves out a ShardedTensor without pieces on
    a rank, takes the checkpoint for one of an old version then, and does not find the optimizer's `param_groups`.
    """
    cut = Cut(tuple(whole.shape), group.size())
    rows = whole.narrow(0, *cut.rows(group.rank())).clone()
    if mesh is not None:
        placements = (*[Replicate()] * (mesh.ndim - 1), Shard(0))
        return make_dtensor(rows, mesh, placements, whole.shape)
    pieces = []
    for rank in range(group.size()):
        offsets = [cut.rows(rank)[0], *[0] * (whole.ndim - 1)]
        pieces.append((offsets, list(cut.local_shape(rank)), dist.get_global_rank(group, rank)))
    return make_sharded_tensor(rows, pieces, tuple(whole.shape), group)


def flat_piece(local: torch.Tensor, length: int, group: Any) -> Any:
    """This rank's piece of a flat tensor, which comes padded, as a ShardedTensor without padding."""
    share, rank = local.numel(), group.rank()
    pieces = []
    for each in range(group.size()):
        first, count = each * share, min(max(length - each * share, 0), share)
        if count:
            pieces.append(([first], [count], dist.get_global_rank(group, each)))
    mine = min(max(length - rank * share, 0), share)
    return make_sharded_tensor(local[:mine].clone(), pieces, (length,), group)


def is_sharded(value: Any) -> bool:
    return isinstance(value, DTensor | ShardedTensor)


@torch.no_grad()
def whole_of(value: Any, group: Any, device: torch.device) -> Any:
    """A tensor made whole again, whatever kind it is. All ranks of the group have to call."""
    if isinstance(value, DTensor):
        return value.full_tensor()
    if not isinstance(value, ShardedTensor):
        return value
    shape, dtype, local = read_sharded_tensor(value)
    cut = Cut(shape, group.size())
    padded = torch.zeros((cut.chunk, *shape[1:]), dtype=dtype, device=device)
    if local is not None:
        padded[: local.shape[0]] = local.to(device)
    if group.size() == 1:
        return padded[: shape[0]]
    whole = torch.empty((cut.chunk * group.size(), *shape[1:]), dtype=dtype, device=device)
    transport_for(group, device).gather([whole], [padded]).wait()
    return whole[: shape[0]]
