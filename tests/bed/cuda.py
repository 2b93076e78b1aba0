"""Training on a CUDA device, compared on the host; and transports that a test chooses."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from bed.models import Case
from bed.parity import assert_close, each_unit, full, train
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from unshard import fully_shard
from unshard.comm.groups import Pool, pool_of_group
from unshard.comm.process_group import ProcessGroupTransport
from unshard.fsdp2 import placements


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
            transport.pool = pool_of_group(group, device) or Pool(torch.cuda.MemPool(), device)
        return transport

    with mock.patch.object(placements, "transport_for", transport_for):
        yield


class _Unwaited:
    """A work for which nobody waits; it lives on, so that the backend keeps its tensors."""

    def __init__(self, work: object) -> None:
        self._work = work

    def wait(self, *unused: object) -> None:
        pass


@contextmanager
def waits_left_out(skipped: set[int]) -> Iterator[list[str]]:
    """Collectives leave NaN until they are done. Of those with the numbers, the last rank is late, and nobody waits.

    Yields the names of the collectives that were issued.
    """
    issued: list[str] = []

    def late(issue: Callable[..., Any], name: str) -> Callable[..., Any]:
        def issue_late(self: ProcessGroupTransport, outputs: Any, inputs: Any, *rest: Any, **options: Any) -> Any:
            if not outputs[0].is_floating_point():  # what ranks compare before they begin
                return issue(self, outputs, inputs, *rest, **options)
            number = len(issued)
            issued.append(name)
            _poison(outputs, inputs)
            if self.rank == self.world - 1 and number in skipped:
                torch.cuda._sleep(400_000_000)  # cycles, about 200 ms: longer than the host takes for some units
            work = issue(self, outputs, inputs, *rest, **options)
            return _Unwaited(work) if number in skipped else work

        return issue_late

    gather, reduce_scatter = ProcessGroupTransport.all_gather, ProcessGroupTransport.reduce_scatter
    with (
        mock.patch.object(ProcessGroupTransport, "all_gather", late(gather, "all-gather")),
        mock.patch.object(ProcessGroupTransport, "reduce_scatter", late(reduce_scatter, "reduce-scatter")),
    ):
        yield issued


def _poison(outputs: list[torch.Tensor], inputs: list[torch.Tensor]) -> None:
    """NaN in the outputs, except where an input lies."""
    for output, piece in zip(outputs, inputs, strict=True):
        kept = piece.clone() if output.numel() > piece.numel() else None
        output.fill_(torch.nan)
        if kept is not None:
            piece.copy_(kept)  # its own place in the output, or elsewhere and not changed
