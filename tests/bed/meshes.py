"""Units whose parameters are sharded over several meshes."""

from __future__ import annotations

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard

from unshard import HSDPMeshInfo, ShardPlacementResult
from unshard.fsdp2.placements import ShardPlacementFn


def two_meshes() -> tuple[DeviceMesh, DeviceMesh]:
    """All ranks, and two replicas of half of them."""
    size = dist.get_world_size()
    flat = init_device_mesh("cpu", (size,), mesh_dim_names=("all",))
    return flat, init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("replicate", "shard"))


def biases_elsewhere(dim: int | None = None) -> ShardPlacementFn:
    """First layers' parameters over replicated halves, everything else over all ranks."""
    info = HSDPMeshInfo(two_meshes()[1], 1, 0)

    def choose(parameter: nn.Parameter) -> Shard | ShardPlacementResult | None:
        if parameter.ndim == 1:
            return ShardPlacementResult(None, info)
        return Shard(dim) if dim is not None else None

    return choose
