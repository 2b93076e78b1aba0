"""Training on a CUDA device, compared on the host; and transports that a test chooses."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from unittest import mock

import torch
import torch.distributed as dist
from bed.models import Case
from bed.parity import assert_close, each_unit, full, train
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from unshard import fully_shard
from unshard.comm import process_group
from unshard.comm.memory import CudaPool, pool_of_group
from unshard.comm.process_group import ProcessGroupTransport
from unshard.comm.solo import SoloTransport
from unshard.fsdp2 import meshes
from unshard.layout import collective_tensors as packing


@contextmanager
def path(way: str) -> Iterator[None]:
    """ "rows" sends even small parameters in regions of their own, as large ones are; "packed" packs even few."""
    unpacked_limit = 0 if way == "packed" else process_group.UNPACKED_LIMIT
    with (
        mock.patch.object(packing, "PACK_BELOW", 0 if way == "rows" else packing.PACK_BELOW),
        mock.patch.object(process_group, "UNPACKED_LIMIT", unpacked_limit),
        mock.patch.object(SoloTransport, "traits", replace(SoloTransport.traits, unpacked_limit=unpacked_limit)),
    ):
        yield


def full_on_host(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Full tensors, gathered where the backend can: DTensor's own gather is not made for Gloo with CUDA tensors."""
    if not isinstance(tensors[0], DTensor):
        return [each.cpu() for each in tensors]
    mesh, device = tensors[0].device_mesh, "cuda"
    if dist.get_backend() == "gloo":
        mesh, device = init_device_mesh("cpu", tuple(mesh.shape), mesh_dim_names=mesh.mesh_dim_names), "cpu"
    on_device = [
        DTensor.from_local(
            each.to_local().to(device), mesh, each.placements, run_check=False, shape=each.shape, stride=each.stride()
        )
        for each in tensors
    ]
    return [each.cpu() for each in full(on_device)]


def check(each: Case, steps: int = 10, **options: object) -> nn.Module:
    reference = train(each.build().cuda(), each, steps, read=full_on_host, device="cuda")
    model = each.build().cuda()
    each_unit(each, fully_shard, **options)(model)
    rank, size = dist.get_rank(), dist.get_world_size()
    record = train(model, each, steps, rank=rank, size=size, read=full_on_host, device="cuda")
    assert_close(record, reference)
    return model


def rows_of_rank(tensor: torch.Tensor) -> torch.Tensor:
    """What `fully_shard` gives this rank of a parameter, if it is sharded over all ranks."""
    pieces, rank = tensor.chunk(dist.get_world_size()), dist.get_rank()
    return pieces[rank] if rank < len(pieces) else tensor[:0]


@contextmanager
def real_collectives(pooled: bool = False) -> Iterator[None]:
    """NCCL's collectives even for one rank, where the engine otherwise sends nothing."""

    def transport_for(group: object, device: torch.device) -> ProcessGroupTransport:
        transport = ProcessGroupTransport(group, device)
        if pooled:
            # NCCL offers memory of its own only where several devices can share it; any pool shows the way.
            transport.pool = pool_of_group(group, device) or CudaPool(torch.cuda.MemPool(), device)
        return transport

    with mock.patch.object(meshes, "transport_for", transport_for):
        yield
