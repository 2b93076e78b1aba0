"""Parameters that are cut along another dimension than the first."""

from __future__ import annotations

import copy
import io

import pytest
import torch
import torch.distributed as dist
from bed import world
from bed.recorders import Collectives
from bed.stack import Stack, assert_at_rest, assert_gradients, batch, loss_of, sharded
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from unshard import MixedPrecisionPolicy, fully_shard


def last(parameter: nn.Parameter) -> Shard | None:
    """Weights along their last dimension, everything else as usual."""
    return Shard(-1) if parameter.ndim > 1 else None


@pytest.mark.parametrize("policy", [None, MixedPrecisionPolicy(reduce_dtype=torch.float64)], ids=["plain", "mixed"])
@world(1, 2, 3, 4)
def test_parity(policy: MixedPrecisionPolicy | None) -> None:
    """Contract LAY-06, LAY-08, LAY-16: right numbers, contiguous locals, as many collectives and bytes as ever."""
    for reshard in (True, False):  # in one job, which plans its operations on DTensors once
        check_parity(reshard, policy)


def check_parity(reshard: bool, policy: MixedPrecisionPolicy | None) -> None:
    size, model, reference = dist.get_world_size(), Stack(), Stack()
    sharded(model, reshard_after_forward=reshard, shard_placement_fn=last, mp_policy=policy)
    assert model.head.weight.placements == (Shard(1),)
    assert model.head.weight.to_local().shape == (2, 132 // size)
    optimizers = [torch.optim.AdamW(each.parameters(), lr=1e-2, foreach=True) for each in (model, reference)]
    for seed in range(3):
        with Collectives() as calls:
            loss_of(model, seed).backward()
        loss_of(reference, seed).backward()
        if size > 1:
            assert len(calls.of("gather")) == (8 if reshard else 4) and len(calls.of("reduce_scatter")) == 4
            piece = 2 * (132 * 132 // size + -(-132 // size))
            assert max(call.bytes_in for call in calls.of("gather")) == 4 * piece
        assert_gradients(model, reference)
        assert model.head.weight.grad.placements == (Shard(1),)
        assert model.head.weight.to_local().is_contiguous() and model.head.weight.grad.to_local().is_contiguous()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for mine, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(mine.detach().full_tensor(), theirs.detach(), rtol=1e-4, atol=1e-6)
    assert_at_rest(model)


@pytest.mark.filterwarnings("ignore:A state dict of shards")
@world(2)
def test_accumulation_state_and_copies() -> None:
    model, reference = sharded(shard_placement_fn=last), Stack()
    for seed in range(3):
        model.set_requires_gradient_sync(seed > 0)
        loss_of(model, seed).backward()
        loss_of(reference, seed).backward()
    assert_gradients(model, reference)
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    other = sharded(shard_placement_fn=last)
    other.load_state_dict(torch.load(file, weights_only=False))
    twin = copy.deepcopy(other)
    mesh = model.head.weight.device_mesh
    state = {n: distribute_tensor(v.detach(), mesh, (last(v) or Shard(0),)) for n, v in reference.named_parameters()}
    twin.load_state_dict(state, assign=True)
    with torch.no_grad():
        for each in (other, twin, model):
            torch.testing.assert_close(each(batch()), reference(batch()))


@world(4)
def test_with_replicas() -> None:
    """Contract MESH-02 with another dimension."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model, reference = sharded(mesh=mesh, shard_placement_fn=last), Stack()
    assert model.head.weight.placements == (Replicate(), Shard(1))
    loss_of(model).backward()
    loss_of(reference).backward()
    assert_gradients(model, reference)


@world(2)
def test_wrong_placements() -> None:
    """Contract LAY-07, LAY-09, LAY-10; nothing is changed by a refused call."""
    layer = nn.Linear(5, 4)
    for choice, error, message in (
        (Shard(1), NotImplementedError, "size 5.*2 shards"),
        (Shard(2), AssertionError, "2 dimensions"),
        (Replicate(), ValueError, "got Replicate"),
    ):
        with pytest.raises(error, match=message):
            fully_shard(layer, shard_placement_fn=lambda p, c=choice: c if p.ndim > 1 else None)
    assert type(layer) is nn.Linear and type(layer.weight) is nn.Parameter
