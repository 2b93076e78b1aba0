"""An integer `reshard_after_forward`: each of k ranks keeps a slice between forward and backward."""

from __future__ import annotations

import copy
import logging

import pytest
import torch
import torch.distributed as dist
from bed import world
from bed.models import CASES, Case
from bed.parity import check_parity, each_unit
from bed.recorders import Collectives
from bed.stack import Stack, assert_at_rest, assert_gradients, batch, loss_of, sharded, units
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from unshard import MixedPrecisionPolicy, fully_shard


@pytest.mark.parametrize("case", CASES, ids=str)
@world(4)
def test_parity_with_two_slices(case: Case) -> None:
    """Contract RAF-04, RAF-05."""
    check_parity(case, each_unit(case, fully_shard, reshard_after_forward=2), steps=4)


@pytest.mark.parametrize("slices", [1, 2, 3])
@world(1, 2, 3)
def test_as_many_slices_as_ranks_or_one(slices: int) -> None:
    """Contract RAF-06: k = N frees everything, k = 1 keeps everything; numbers never change."""
    size = dist.get_world_size()
    if size % slices:
        with pytest.raises(ValueError, match=f"divide the number of shards, which is {size}"):
            fully_shard(nn.Linear(4, 4), reshard_after_forward=slices)
        return
    model, reference = sharded(reshard_after_forward=slices), Stack()
    for _ in range(2):
        with Collectives() as calls:
            loss_of(model).backward()
        loss_of(reference).backward()
        assert_gradients(model, reference)
        assert len(calls.of("gather")) == (0 if size == 1 else 4 if slices == 1 else 8)
    assert_at_rest(model)


@pytest.mark.parametrize("policy", [None, MixedPrecisionPolicy(param_dtype=torch.bfloat16)], ids=["plain", "mixed"])
@world(4)
def test_what_is_held_and_sent(policy: MixedPrecisionPolicy | None) -> None:
    """Contract RAF-04, RAF-05, CM-13, ME-10: slices in the compute dtype, gathered among neighbours, then gone."""
    dtype = torch.float32 if policy is None else torch.bfloat16
    model = sharded(reshard_after_forward=2, mp_policy=policy)
    shard = model.blocks[0].first.weight
    with Collectives() as forward:
        loss = loss_of(model)
    kept = model.blocks[0].first.weight
    assert kept is not shard and kept.dtype == dtype and shard.dtype == torch.float32
    assert kept.placements == (Replicate(), Shard(0)) and tuple(kept.device_mesh.shape) == (2, 2)
    assert kept.to_local().shape == (66, 132)
    torch.testing.assert_close(kept.detach().full_tensor(), shard.detach().full_tensor().to(dtype), rtol=0, atol=0)
    part = units(model)[1].param_groups[0]
    assert part._unsharded.slices._buffer.held and not part.held
    assert (
        part._unsharded.slices._buffer.nbytes == 2 * (132 * 132 + 132) // 2 * dtype.itemsize
    )  # half the unit, nothing more
    with Collectives() as backward:
        loss.backward()
    elements = 2 * (132 * 132 + 132)
    gathers = [forward.of("gather"), backward.of("gather")]
    assert [len(calls) for calls in gathers] == [4, 4] and len(backward.of("reduce_scatter")) == 4
    assert max(call.bytes_in for call in gathers[0]) == elements // 4 * dtype.itemsize
    assert max(call.bytes_in for call in gathers[1]) == elements // 2 * dtype.itemsize
    assert {call.ranks for call in gathers[1]} <= {0, 2}
    assert model.blocks[0].first.weight is shard and not part._unsharded.slices._buffer.held
    assert_at_rest(model)


@world(4)
def test_replicas_of_slices() -> None:
    """Contract RAF-10: neighbours among all ranks of the mesh."""
    mesh = init_device_mesh("cpu", (1, 4), mesh_dim_names=("replicate", "shard"))
    model, reference = sharded(mesh=mesh, reshard_after_forward=2), Stack()
    loss = loss_of(model)
    assert model.head.weight.device_mesh.mesh.tolist() == [[0, 1], [2, 3]]
    loss.backward()
    loss_of(reference).backward()
    assert_gradients(model, reference)


@world(4)
def test_slices_are_dropped_by_whatever_brings_the_shards_back() -> None:
    """Contract RAF-11, RAF-12, SDT-02: reshard, state dicts, conversions; backward then gathers from the shards."""
    for bring_back in (nn.Module.state_dict, lambda m: [u.reshard() for u in units(m)], lambda m: m.to(torch.float32)):
        model, reference = sharded(reshard_after_forward=2), Stack()
        loss = loss_of(model)
        bring_back(model)
        assert_at_rest(model)
        with Collectives() as calls:
            loss.backward()
        assert {call.ranks for call in calls.of("gather")} <= {0, 4}
        loss_of(reference).backward()
        assert_gradients(model, reference)


@world(4)
def test_no_stale_slices() -> None:
    """Contract RAF-13: shards written after a forward count in the next one; evaluation leaves no slices at all."""
    model, reference = sharded(reshard_after_forward=2), Stack()
    shards = dict(model.named_parameters())
    loss_of(model)
    with torch.no_grad():
        for name, parameter in reference.named_parameters():
            shards[name].add_(0.1)
            parameter.add_(0.1)
        torch.testing.assert_close(model(batch()), reference(batch()))
    assert_at_rest(model)
    assert all(isinstance(parameter, DTensor) and parameter.requires_grad for parameter in model.parameters())


@world(4)
def test_several_forwards_accumulation_freezing_and_switching() -> None:
    """Contract ACC-10, FRZ-05, API-07, MUL-04 with slices."""
    model, reference = sharded(reshard_after_forward=2), Stack()
    for each in (model, reference):
        each.blocks[1].requires_grad_(False)
    for seed in range(3):
        model.set_requires_gradient_sync(seed == 2)
        with Collectives() as calls:
            loss_of(model, seed).backward()
        assert len(calls.of("gather")) == 8
        loss_of(reference, seed).backward()
    (loss_of(model, 3) + loss_of(model, 4)).backward()
    (loss_of(reference, 3) + loss_of(reference, 4)).backward()
    assert_gradients(model, reference)
    for each in (model, reference):
        each.blocks[1].requires_grad_(True)
    model.set_reshard_after_forward(True)
    loss = loss_of(model, 5)
    assert all(parameter.device_mesh.ndim == 1 for parameter in model.parameters())
    loss.backward()
    loss_of(reference, 5).backward()
    assert_gradients(model, reference)


@world(4)
def test_copies_and_exceptions() -> None:
    model, reference = sharded(reshard_after_forward=2), Stack()
    loss_of(model).backward()
    twin = copy.deepcopy(model)
    handle = model.blocks[2].register_forward_pre_hook(lambda *unused: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        loss_of(model)
    handle.remove()
    assert_at_rest(model)
    loss_of(reference).backward()
    assert_gradients(model, reference)
    model.zero_grad()
    for each in (model, twin):
        loss_of(each).backward()
        assert_gradients(each, reference)


@world(4)
def test_a_mesh_that_is_part_of_the_job() -> None:
    """Ranks of other meshes are not needed to make the smaller groups."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("stage", "dp"))
    if dist.get_rank() < 2:
        with pytest.raises(ValueError, match="number of shards, which is 2"):
            sharded(mesh=mesh["dp"], reshard_after_forward=4)
    model, reference = sharded(mesh=mesh["dp"], reshard_after_forward=2), Stack()
    loss_of(model).backward()
    loss_of(reference).backward()
    assert_gradients(model, reference)


@world(2)
def test_wrong_numbers() -> None:
    """Contract RAF-06, RAF-07, RAF-09."""
    layer = nn.Linear(4, 4)
    for wrong in (0, 3, -1, 1.5, "2"):
        with pytest.raises(ValueError, match="reshard_after_forward"):
            fully_shard(layer, reshard_after_forward=wrong)
    assert type(layer) is nn.Linear


@world(4)
def test_slices_of_other_dimensions_are_refused() -> None:
    """Contract RAF-09 improved: said by fully_shard, with the parameter's name."""
    layer = nn.Linear(4, 4)
    with pytest.raises(NotImplementedError, match="'weight' is sharded along dimension 1"):
        fully_shard(layer, reshard_after_forward=2, shard_placement_fn=lambda p: Shard(p.ndim - 1))
    assert type(layer) is nn.Linear and type(layer.weight) is nn.Parameter


@world(2)
def test_one_slice_is_said_once() -> None:
    """Contract RAF-06: a warning."""
    from unshard.fsdp2.fully_shard import _warn_about_one

    _warn_about_one.cache_clear()
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]
    logging.getLogger("unshard").addHandler(handler)
    for _ in range(2):
        fully_shard(nn.Linear(2, 2), reshard_after_forward=1)
    logging.getLogger("unshard").removeHandler(handler)
    assert len(records) == 1 and "does not reshard after forward" in records[0].getMessage()
