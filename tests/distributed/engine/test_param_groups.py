"""Several meshes in one model, and in one call."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from bed import world
from bed.meshes import biases_elsewhere, two_meshes
from bed.recorders import Collectives
from bed.stack import Stack, assert_at_rest, assert_gradients, batch, loss_of, sharded, units
from bed.user_collectives import ToyGather, ToyReduceScatter, ignore_old_names
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard

from unshard import (
    DDPMeshInfo,
    FSDPMeshInfo,
    FSDPModule,
    HSDPMeshInfo,
    MixedPrecisionPolicy,
    ShardPlacementResult,
    fully_shard,
)
from unshard.engine.unit import Unit
from unshard.errors import StateError
from unshard.torch_private import number_of_groups


@pytest.mark.parametrize("policy", [None, MixedPrecisionPolicy(reduce_dtype=torch.float64)], ids=["plain", "mixed"])
@pytest.mark.parametrize("dim", [None, 1])
@world(2, 4)
def test_one_call_may_cut_over_several_meshes(dim: int | None, policy: MixedPrecisionPolicy | None) -> None:
    """Contract LAY-11, LAY-12, CM-28: each set of ranks has collectives of its own."""
    size, model, reference = dist.get_world_size(), Stack(), Stack()
    sharded(model, shard_placement_fn=biases_elsewhere(dim), mp_policy=policy, reshard_after_forward=True)
    assert model.head.bias.placements == (Replicate(), Shard(0))
    assert model.head.weight.placements == (Shard(dim or 0),)
    assert [len(unit.param_groups) for unit in units(model)] == [2] * 4
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, reference)]
    for seed in range(3):
        with Collectives() as calls:
            loss_of(model, seed).backward()
        loss_of(reference, seed).backward()
        assert_gradients(model, reference)
        parts = 1 if size == 2 else 2  # replicas of one rank gather nothing
        assert len(calls.of("gather")) == 8 * parts
        assert len(calls.of("reduce_scatter")) == 4 * parts
        assert len(calls.of("all_reduce")) == 4
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert_at_rest(model)


@world(4)
def test_state_copies_accumulation_and_slices_over_several_meshes() -> None:
    """Contract LAY-15, ACC-07: everything else works on several param groups as on one."""
    model, reference = sharded(shard_placement_fn=biases_elsewhere(), reshard_after_forward=2), Stack()
    for seed in range(3):
        model.set_requires_all_reduce(seed == 2)
        loss_of(model, seed).backward()
        loss_of(reference, seed).backward()
    for parameter in model.parameters():
        assert parameter.grad is not None
    assert_gradients(model, reference)
    twin = copy.deepcopy(model)
    twin.load_state_dict(model.state_dict())
    with torch.no_grad():
        torch.testing.assert_close(twin(batch()), reference(batch()))
    assert_at_rest(twin)


@world(4)
def test_calls_with_different_meshes_under_one_root() -> None:
    """Contract MESH-05, MESH-06, MESH-10: one dimension, two dimensions and a slice of a larger mesh, mixed."""
    flat, hybrid = two_meshes()
    other = DeviceMesh.from_group(
        [hybrid.get_group(0), hybrid.get_group(1)], "cpu", hybrid.mesh, mesh_dim_names=("r", "s")
    )
    model, reference = Stack(), Stack()
    for block, mesh in zip(model.blocks, (flat, hybrid, other), strict=True):
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=flat)
    for _ in range(2):
        loss_of(model).backward()
        loss_of(reference).backward()
    assert_gradients(model, reference)
    assert_at_rest(model)


@world(4)
def test_replicated_parameters_beside_sharded_ones() -> None:
    """A parameter that is too small to cut stays unsharded; its gradient is averaged over all ranks."""
    info = DDPMeshInfo(two_meshes()[0], None, 0)

    def choose(parameter: nn.Parameter) -> ShardPlacementResult | None:
        return ShardPlacementResult(None, info) if parameter.ndim == 1 else None

    model, reference = sharded(shard_placement_fn=choose), Stack()
    assert model.head.bias.placements == (Replicate(),) and model.head.bias.to_local().shape == (2,)
    with Collectives() as calls:
        loss_of(model).backward()
    assert len(calls.of("all_reduce")) == 4
    loss_of(reference).backward()
    assert_gradients(model, reference)


@ignore_old_names
@world(4)
def test_plugins_serve_every_param_group() -> None:
    """Contract API-11, API-12 improved: a user's collectives are called for each set of ranks."""
    model, reference = sharded(shard_placement_fn=biases_elsewhere()), Stack()
    gather, scatter = ToyGather(), ToyReduceScatter()
    model.blocks[0].set_custom_all_gather(gather)
    model.blocks[0].set_custom_reduce_scatter(scatter)
    seen: list[int] = []
    model.blocks[0].set_all_reduce_hook(lambda flat: seen.append(flat.numel()))
    for _ in range(2):
        loss_of(model).backward()
        loss_of(reference).backward()
    assert_gradients(model, reference)
    assert (gather.calls, scatter.calls, len(seen)) == (8, 4, 4)
    assert_at_rest(model)


@world(2)
def test_two_names_for_the_same_ranks_are_one_param_group() -> None:
    """Contract LAY-13 improved: equal groups are recognised, whatever object names them."""
    mesh = init_device_mesh("cpu", (2,))
    infos = [FSDPMeshInfo(mesh, 0), FSDPMeshInfo(mesh, 0)]
    model = fully_shard(
        nn.Linear(4, 4), mesh=mesh, shard_placement_fn=lambda p: ShardPlacementResult(None, infos[p.ndim - 1])
    )
    assert len(units(model)[0].param_groups) == 1


@world(4)
def test_wrong_meshes() -> None:
    """Contract LAY-10, MESH-03, MESH-04: named, on every rank, and nothing is changed."""
    flat, hybrid = two_meshes()
    layer = nn.Linear(4, 4)
    half = hybrid["shard"]
    elsewhere = DeviceMesh("cpu", [0, 1], mesh_dim_names=("low",))
    for result, message in (
        (ShardPlacementResult(None, flat), "mesh_info of 'weight'"),
        (ShardPlacementResult(Shard(3), FSDPMeshInfo(half, 0)), "2 dimensions"),
        (ShardPlacementResult("rows", FSDPMeshInfo(half, 0)), "must return a Shard"),
    ):
        with pytest.raises((ValueError, AssertionError), match=message):
            fully_shard(layer, mesh=flat, shard_placement_fn=lambda p, r=result: r if p.ndim > 1 else None)
    if dist.get_rank() > 1:
        with pytest.raises(ValueError, match="which this rank is not part of"):
            info = FSDPMeshInfo(elsewhere, 0)
            fully_shard(layer, mesh=flat, shard_placement_fn=lambda p: ShardPlacementResult(None, info))
    for make, message in (
        (lambda: FSDPMeshInfo(flat), "shard_mesh_dim"),
        (lambda: HSDPMeshInfo(hybrid, 1), "replicate_mesh_dim"),
        (lambda: FSDPMeshInfo(flat, 1), "names dimension 1"),
    ):
        with pytest.raises(ValueError, match=message):
            make()
    assert type(layer) is nn.Linear and type(layer.weight) is nn.Parameter


@world(2, 3)
def test_reductions_in_a_group_of_their_own() -> None:
    """Contract API-20: same numbers, other process group; it is made once and can be left again."""
    model, reference = sharded(), Stack()
    usual = dist.group.WORLD
    groups: list[object] = []
    for enable in (True, True, False, True):
        model.set_separate_reduce_scatter_group(enable)
        loss_of(model).backward()
        loss_of(reference).backward()
        assert_gradients(model, reference)
        groups.append(reduce_group(units(model)[0]))
    assert groups[0] is groups[1] is groups[3] and groups[0] is not usual
    assert groups[2] is usual
    assert dist.get_process_group_ranks(groups[0]) == dist.get_process_group_ranks(usual)
    assert {reduce_group(unit) for unit in units(model)} == {groups[0]}
    assert_at_rest(model)


@world(2)
def test_what_is_set_already_changes_nothing() -> None:
    """Contract API-20: also between forward and backward, and while gradients are accumulated."""
    model, reference = sharded(), Stack()
    for top in (model, reference):
        if top is model:
            model.set_requires_gradient_sync(False)
        loss_of(top).backward()
        if top is model:
            model.set_separate_reduce_scatter_group(False)
            with pytest.raises(StateError, match="did not reduce"):
                model.set_separate_reduce_scatter_group(True)
            model.set_separate_reduce_scatter_group(False)
            model.set_requires_gradient_sync(True)
        loss = loss_of(top, 1)
        if top is model:
            model.set_separate_reduce_scatter_group(False)
        loss.backward()
    assert_gradients(model, reference)


@ignore_old_names
@world(2)
def test_a_second_group_and_a_users_collectives() -> None:
    """A user's reduce-scatter does not make the second group; beside a user's all-gather, the library's own uses it."""
    for gather, reduce_scatter in ((False, True), (True, True), (True, False)):
        model, reference, groups = sharded(), Stack(), number_of_groups()
        model.set_separate_reduce_scatter_group(True)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                if gather:
                    module.set_custom_all_gather(ToyGather())
                if reduce_scatter:
                    module.set_custom_reduce_scatter(ToyReduceScatter())
        for top in (model, reference):
            loss_of(top).backward()
        assert_gradients(model, reference)
        assert number_of_groups() - groups == (not reduce_scatter)


def reduce_group(unit: Unit) -> object:
    """The process group of its reduce-scatters, behind the order check."""
    return unit.param_groups[0].shards._base.reduce_scatter.__self__._group
