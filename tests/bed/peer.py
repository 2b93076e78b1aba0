"""PyTorch's own `fully_shard`, for tests that compare with it and for testing the bed itself."""

from __future__ import annotations

from collections.abc import Callable

import torch.distributed as dist
from bed.models import Case
from bed.parity import each_unit
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


def peer(case: Case, device: str = "cpu", **options: object) -> Callable[[nn.Module], None]:
    """Shards each unit of the case over all ranks."""
    mesh = init_device_mesh(device, (dist.get_world_size(),))

    def shard(model: nn.Module) -> None:
        for module in model.modules():
            if isinstance(module, nn.ReLU):
                module.inplace = False  # it forbids a unit to begin by overwriting its input
        each_unit(case, fully_shard, mesh=mesh, **options)(model)

    return shard
