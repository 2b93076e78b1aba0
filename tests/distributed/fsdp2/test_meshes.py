"""Meshes of every kind, on the wire and against the unsharded model."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from bed import loopback, world
from bed.models import CASES, Case
from bed.parity import check_parity
from bed.recorders import Collectives
from bed.stack import Stack, assert_at_rest, assert_gradients, batch, loss_of, mesh, sharded
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from unshard import fully_shard


@pytest.mark.parametrize(
    ("replicas", "gathers", "scatters", "reductions"), [(1, 8, 4, 0), (2, 8, 4, 4), (4, 0, 0, 4)], ids=str
)
@world(4)
def test_what_each_shape_sends(replicas: int, gathers: int, scatters: int, reductions: int) -> None:
    """Contract MESH-07, MESH-08, CM-14; MESH-11 improved: one replica needs no all-reduce, one shard no gather."""
    model = sharded(mesh=mesh(replicas), reshard_after_forward=True)
    assert model.head.weight.placements == (Replicate(), Shard(0))
    for _ in range(2):
        with Collectives() as calls:
            loss_of(model).backward()
        counts = [len(calls.of(kind)) for kind in ("gather", "reduce_scatter", "all_reduce")]
        assert counts == [gathers, scatters, reductions] and len(calls.calls) == sum(counts)


@world(2)
def test_replicas_keep_the_values_they_had() -> None:
    """Contract MESH-09: nothing is broadcast; a program that wants equal replicas starts with equal ones."""
    layer = nn.Linear(3, 4)
    nn.init.constant_(layer.weight, float(dist.get_rank()))
    fully_shard(layer, mesh=mesh(2))
    layer(torch.ones(2, 3)).sum().backward()
    assert torch.equal(layer.weight.to_local().detach(), torch.full((4, 3), float(dist.get_rank())))


@world(4)
def test_meshes_made_of_groups() -> None:
    """Contract MESH-10: `DeviceMesh.from_group` is as good as `init_device_mesh`."""
    rank = dist.get_rank()
    rows = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])]
    columns = [dist.new_group(ranks) for ranks in ([0, 2], [1, 3])]
    groups = [columns[rank % 2], rows[rank // 2]]
    square = DeviceMesh.from_group(
        groups, "cpu", mesh=torch.arange(4).view(2, 2), mesh_dim_names=("replicate", "shard")
    )
    line = DeviceMesh.from_group(dist.group.WORLD, "cpu")
    for own, other in ((square, mesh(2)), (line, init_device_mesh("cpu", (4,)))):
        model, twin = sharded(mesh=own), sharded(mesh=other)
        for each in (model, twin):
            loss_of(each, rank).backward()
        for mine, theirs in zip(model.parameters(), twin.parameters(), strict=True):
            assert mine.placements == theirs.placements
            assert torch.equal(mine.to_local(), theirs.to_local())
            assert torch.equal(mine.grad.to_local(), theirs.grad.to_local())


def _mixed(model: nn.Module, units: list[nn.Module]) -> None:
    """Every unit on another mesh: all ranks, replicas of shards, replicas only."""
    size = dist.get_world_size()
    kinds = [init_device_mesh("cpu", (size,))]
    kinds += [mesh(replicas) for replicas in range(1, size + 1) if size % replicas == 0]
    for number, unit in enumerate(units):
        fully_shard(unit, mesh=kinds[number % len(kinds)])


@pytest.mark.parametrize("case", CASES[:3], ids=str)
@world(1, 2, 3, 4)
def test_parity_of_several_meshes_in_one_model(case: Case) -> None:
    """Contract MESH-05: one- and two-dimensional meshes nested under one root."""
    record, _ = check_parity(case, lambda model: _mixed(model, case.units(model)), steps=3)
    assert record.losses


@world(4)
def test_accumulation_over_several_meshes() -> None:
    """Contract MESH-05, ACC-09."""
    model, reference = Stack(), Stack()
    for number, block in enumerate(model.blocks):
        fully_shard(block, mesh=mesh((1, 2, 4)[number]))
    fully_shard(model)
    for seed in range(4):
        model.set_requires_gradient_sync(seed % 2 == 1)
        loss_of(model, seed).backward()
        loss_of(reference, seed).backward()
    assert_gradients(model, reference)
    assert_at_rest(model)


@pytest.mark.parametrize("replicas", [1, 2, 4])
@world(4)
def test_optimizers_work_on_shards_of_several_meshes(replicas: int) -> None:
    """Contract MESH-05 and the last half of TPX-13: foreach steps over DTensors of different meshes."""
    model, reference = Stack(1), Stack(1)
    fully_shard(model.blocks[0], mesh=mesh(replicas))
    fully_shard(model)
    optimizers = [torch.optim.AdamW(each.parameters(), lr=1e-2, foreach=True) for each in (model, reference)]
    for seed in range(2):
        for each, optimizer in zip((model, reference), optimizers, strict=True):
            loss_of(each, seed).backward()
            optimizer.step()
            optimizer.zero_grad()
    for mine, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(mine.detach().full_tensor(), theirs.detach(), rtol=1e-4, atol=1e-6)


@world(2, 4)
def test_clipping_by_the_norm() -> None:
    """Contract INT-08: torch's own clip; its result is a DTensor whose full value is the norm of all gradients."""
    model, reference = sharded(), Stack()
    norms = []
    for each in (model, reference):
        loss_of(each).backward()
        norms.append(nn.utils.clip_grad_norm_(each.parameters(), 1e-3))
    assert isinstance(norms[0], DTensor)
    torch.testing.assert_close(norms[0].full_tensor(), norms[1])
    assert norms[1] > 1e-2
    assert_gradients(model, reference)


@pytest.mark.parametrize("delay", [0.0, 0.005])
def test_slow_collectives_of_replicas(delay: float) -> None:
    """Contract CM-41, CM-42: reduced over shards, then over replicas, then visible; whatever takes how long.

    The outputs hold NaN until the wait, so a gradient that was handed out too early would show.
    """
    with loopback.job(4, delay=delay) as group:
        model, reference = Stack(), Stack()
        for each in (model, reference):
            loopback.repeat_shards(each, 2)
        sharded(model, mesh=mesh(2))
        for seed in range(2):
            group.log.clear()
            loss_of(model, seed).backward()
            loss_of(reference, seed).backward()
            reductions = [call.kind for call in group.log if call.kind != "gather"]
            assert sorted(reductions) == ["all_reduce"] * 4 + ["reduce_scatter"] * 4
            for end in range(1, len(reductions) + 1):  # no all-reduce before its reduce-scatter
                assert reductions[:end].count("all_reduce") <= reductions[:end].count("reduce_scatter")
        assert group.unwaited() == []
        compared = 0
        for mine, theirs in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(mine.grad.to_local(), theirs.grad.chunk(2)[0], rtol=1e-5, atol=1e-7)
            compared += 1
        assert compared == 14
        with torch.no_grad():
            assert model(batch()).isfinite().all()
