"""Equal weights on all ranks: tensors are broadcast from the first rank of a group."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from ..errors import StateError, listed
from .agreement import require_agreement
from .groups import staging_device
from .transports import transport_for

_BUCKET = 64 * 1024 * 1024  # bytes of one broadcast


def sync_module_states(module: nn.Module, process_group: Any = None) -> None:
    """Give the parameters and buffers of `module` the values of the group's first rank, on all its ranks.

    All ranks of the group (by default all ranks of the job) call it before they shard the module. The parameters stay
    the same objects.
    """
    group = dist.group.WORLD if process_group is None else process_group
    named = [*module.named_parameters(), *module.named_buffers()]
    sharded = [name for name, each in named if isinstance(each, DTensor)]
    if sharded:
        raise StateError(
            f"sync_module_states needs plain tensors, but {listed(sharded)} of {type(module).__name__} are DTensors. "
            "Call it before fully_shard."
        )
    on_meta = [name for name, each in named if each.is_meta]
    if on_meta:
        raise StateError(
            f"{listed(on_meta)} of {type(module).__name__} are on the meta device and have no values to send. "
            "Initialise them first."
        )
    device = staging_device(group, [each for _, each in named])
    facts = [f"{name} with shape {tuple(each.shape)} and {each.dtype}" for name, each in named]
    require_agreement(transport_for(group, device), device, "the parameters and buffers to broadcast", facts)
    broadcast_tensors([each for _, each in named], [group], device)


@torch.no_grad()
def broadcast_tensors(tensors: Iterable[torch.Tensor], groups: Iterable[Any], device: torch.device) -> None:
    """Send the values of each group's first rank to its other ranks, many tensors of one dtype at once."""
    by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
    for each in tensors:
        by_dtype.setdefault(each.dtype, []).append(each.detach())
    for group in groups:
        if group.size() > 1:
            for same in by_dtype.values():
                for bucket in _buckets(same):
                    flat = torch.cat([each.reshape(-1).to(device) for each in bucket])
                    dist.broadcast(flat.view(torch.uint8), group=group, group_src=0)
                    for each, part in zip(bucket, flat.split([each.numel() for each in bucket]), strict=True):
                        each.copy_(part.view(each.shape))


def _buckets(tensors: list[torch.Tensor]) -> Iterable[list[torch.Tensor]]:
    bucket: list[torch.Tensor] = []
    size = 0
    for each in tensors:
        bucket.append(each)
        size += each.numel() * each.element_size()
        if size >= _BUCKET:
            yield bucket
            bucket, size = [], 0
    if bucket:
        yield bucket
