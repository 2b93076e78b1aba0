"""Reduce-scatters of NCCL have a process group of their own."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from bed import world
from bed.packing import path
from bed.stack import Stack, assert_at_rest, assert_gradients, batch, sharded, units
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from unshard.comm.groups import group_like
from unshard.comm.transports import SplitTransport
from unshard.engine.unit import Unit
from unshard.layout.collective_tensors import PackingRule
from unshard.torch_private import group_timeout, nccl_options

DEVICE = torch.device("cuda", 0)


def loss_of(model: nn.Module, rank: int) -> torch.Tensor:
    return model(batch(rank).cuda()).square().mean()


def check(model: nn.Module) -> None:
    """Two steps have the gradients of the unsharded model."""
    reference = Stack().cuda()
    for _ in range(2):
        loss_of(model, dist.get_rank()).backward()
        torch.stack([loss_of(reference, rank) for rank in range(dist.get_world_size())]).mean().backward()
        assert_gradients(model, reference, rtol=1e-4, atol=1e-6)
        model.zero_grad()
        reference.zero_grad()
    assert_at_rest(model)


def transport_of(unit: Unit) -> Any:
    """The transport behind the order check."""
    return unit.param_groups[0].shards._base


def second(unit: Unit) -> Any:
    """The transport of the second process group, once it is made."""
    transport = transport_of(unit)
    reduces = transport.reduce_scatter.__self__
    return None if reduces is transport else reduces


@world(2, 3, 4, backend="nccl")
@path("mixed")
def test_a_group_of_its_own_is_made_for_a_backward() -> None:
    timeout, options = timedelta(seconds=99), dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    options._timeout = timeout
    group = dist.new_group(backend="nccl", timeout=timeout, pg_options=options)
    model = sharded(Stack().cuda(), mesh=DeviceMesh.from_group(group, "cuda"))
    with torch.no_grad():
        loss_of(model, 0)
    assert all(isinstance(transport_of(unit), SplitTransport) and second(unit) is None for unit in units(model))
    check(model)
    own = group_like(group, "nccl", DEVICE, meet=lambda: None)
    assert {second(unit)._group for unit in units(model)} == {own}
    assert own is not group and dist.get_process_group_ranks(own) == dist.get_process_group_ranks(group)
    assert group_timeout(own, DEVICE) == timeout
    assert nccl_options(own, DEVICE).is_high_priority_stream


@world(2, backend="nccl")
def test_what_nccl_packs() -> None:
    packing = units(sharded(Stack().cuda()))[0].param_groups[0].shards.traits.packing
    assert packing == PackingRule(below=4 * 1024 * 1024, least=3)


@world(2, backend="nccl")
@path("mixed")
def test_one_group_for_both() -> None:
    model = sharded(Stack().cuda())
    model.set_separate_reduce_scatter_group(False)
    assert not any(isinstance(transport_of(unit), SplitTransport) for unit in units(model))
    check(model)
    model.set_separate_reduce_scatter_group(True)
    check(model)
    assert all(second(unit) is not None for unit in units(model))


@contextmanager
def job_of_bound_ranks(store: Path, backend: str) -> Iterator[None]:
    """The default group is bound to the device: torch then makes further groups by splitting its communicator."""
    rank, size = dist.get_rank(), dist.get_world_size()
    # Torch says so whenever it splits a group that has Gloo too; `init_device_mesh` does it in such jobs.
    warnings.filterwarnings("ignore", "Tried to pass options to ProcessGroupGloo::split")
    dist.destroy_process_group()
    torch.cuda.set_device(DEVICE)
    files = dist.FileStore(str(store), size)
    dist.init_process_group(backend, store=files, rank=rank, world_size=size, device_id=DEVICE)
    yield


@pytest.mark.parametrize("backend", ["nccl", "cpu:gloo,cuda:nccl"])
@world(4, backend="nccl")
@path("mixed")
def test_ranks_that_are_bound_to_their_device(backend: str, tmp_path: Path) -> None:
    with job_of_bound_ranks(tmp_path / "store", backend):
        model = sharded(Stack().cuda())
        check(model)
        assert all(second(unit)._group.size() == 4 for unit in units(model))
        check(sharded(Stack().cuda(), reshard_after_forward=2))
        model = sharded(Stack().cuda(), mesh=two_by_two())
        check(model)
        assert all(second(unit)._group.size() == 2 for unit in units(model))


def two_by_two() -> DeviceMesh:
    """`init_device_mesh` would split the group of the job, where torch crashes if it is the second of the process."""
    groups = {}
    for name, all_ranks in (("replicate", ([0, 2], [1, 3])), ("shard", ([0, 1], [2, 3]))):
        for ranks in all_ranks:
            group = dist.new_group(ranks)
            if dist.get_rank() in ranks:
                groups[name] = group
    names = ("replicate", "shard")
    return DeviceMesh.from_group([groups[name] for name in names], "cuda", mesh=[[0, 1], [2, 3]], mesh_dim_names=names)
