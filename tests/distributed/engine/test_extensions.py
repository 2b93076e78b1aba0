"""Shards that bring their own gather protocol."""

from __future__ import annotations

import copy
import types
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from bed import loopback, world
from bed.recorders import Collectives
from bed.stack import Stack, assert_at_rest, assert_gradients, batch, loss_of, sharded, units
from bed.tensor_subclass import SplitTensor, with_split_weights
from bed.user_collectives import ToyGather, ignore_old_names
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from unshard import MixedPrecisionPolicy, fully_shard

POLICIES = [None, MixedPrecisionPolicy(param_dtype=torch.float64, reduce_dtype=torch.float32)]


@pytest.mark.parametrize("policy", POLICIES, ids=["plain", "mixed"])
@pytest.mark.parametrize("reshard", [True, False, None])
@world(1, 2, 3, 4)
def test_parity_of_a_tensor_subclass(reshard: bool | None, policy: MixedPrecisionPolicy | None) -> None:
    """Contract EXT-01, EXT-02, EXT-04 to EXT-09: several tensors per parameter, several dtypes, uneven shards."""
    model, reference = with_split_weights(Stack()), Stack()
    sharded(model, reshard_after_forward=reshard, mp_policy=policy)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, reference)]
    for seed in range(3):
        for each in (model, reference):
            loss_of(each, seed).backward()
        assert_gradients(model, reference, rtol=1e-4, atol=1e-6)
        with torch.no_grad():
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    mesh, size, stride, module, seen_policy = SplitTensor.seen[-1]
    assert size == module.weight.shape and stride == (size[1], 1) and isinstance(module, nn.Linear)
    assert seen_policy == (policy or MixedPrecisionPolicy()) and mesh.size() == dist.get_world_size()
    assert_at_rest(model)
    with torch.no_grad():
        torch.testing.assert_close(model(batch()).float(), reference(batch()), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("reshard", [True, False])
@world(3, 4)
def test_padding_that_is_left_to_the_engine(reshard: bool) -> None:
    """The unsharded tensor has other sizes than the parameter, also when it is filled again."""
    model, reference = with_split_weights(Stack()), Stack()
    sharded(model, reshard_after_forward=reshard)
    assert any(each.shape[0] % dist.get_world_size() for each in reference.parameters() if each.ndim > 1)
    with mock.patch.object(SplitTensor, "trims", False):
        for seed in range(2):
            for each in (model, reference):
                loss_of(each, seed).backward()
            assert_gradients(model, reference, rtol=1e-4, atol=1e-6)


def patch(local: torch.Tensor, calls: list[str]) -> None:
    """The older protocol, on a plain tensor: everything is sent negated."""

    def pre(self, mesh):
        calls.append(f"pre {mesh.ndim}")
        return (-self,), None

    def post(self, gathered, metadata, param_dtype, *, out=None):
        calls.append("post" if out is None else "fill")
        if out is None:
            whole = -gathered[0]
            return whole, (whole,)
        torch.neg(gathered[0], out=out)

    local.fsdp_pre_all_gather = types.MethodType(pre, local)
    local.fsdp_post_all_gather = types.MethodType(post, local)


@world(2)
def test_methods_patched_onto_plain_shards() -> None:
    """Contract EXT-02, EXT-12, LZY-13: found at the first forward; the shard object stays."""
    model, reference, calls = sharded(reshard_after_forward=True), Stack(), []
    local = model.blocks[0].first.weight._local_tensor
    patch(local, calls)
    for _ in range(2):
        for each in (model, reference):
            loss_of(each).backward()
        assert_gradients(model, reference)
    assert calls == ["pre 1", "post", "pre 1", "fill", "pre 1", "fill", "pre 1", "fill"]
    assert model.blocks[0].first.weight._local_tensor is local
    assert_at_rest(model)


@world(4)
def test_the_mesh_is_that_of_the_shards() -> None:
    """Contract EXT-03: one dimension, also with replicas."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model, reference = sharded(with_split_weights(Stack()), mesh=mesh), Stack()
    for each in (model, reference):
        loss_of(each).backward()
    assert_gradients(model, reference, rtol=1e-4, atol=1e-6)
    seen: DeviceMesh = SplitTensor.seen[-1][0]
    assert seen.ndim == 1 and seen.mesh_dim_names == ("shard",)


@world(2)
def test_memory_comes_and_goes() -> None:
    """Contract EXT-06: what was gathered and what it became are emptied with the unit; the parameter object stays."""
    model = with_split_weights(nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6)))
    for layer in model:
        fully_shard(layer, reshard_after_forward=True)
    fully_shard(model)
    parameters: list[nn.Parameter] = []
    model[0].register_forward_pre_hook(lambda module, args: parameters.append(module.weight))
    for _ in range(2):
        loss = model(torch.ones(2, 6, requires_grad=True)).sum()
        extension = units(model)[1].param_groups[0]._unsharded._extensions._members[0]
        assert parameters[-1].untyped_storage().nbytes() == 0
        assert not any(buffer.held for buffer in extension._buffers)
        loss.backward()
    assert parameters[0] is parameters[1]


@world(2)
def test_one_extra_collective_of_bytes() -> None:
    """Contract EXT-05, CM-01: a backend that cannot group gathers all such tensors of a unit at once, as bytes."""
    model = sharded(with_split_weights(Stack()), reshard_after_forward=True)
    with Collectives() as calls:
        loss_of(model)
    assert len(calls.of("gather")) == 8 + 7  # what ranks agree on at first, one for each such weight
    with Collectives() as calls:
        loss_of(model)
    assert len(calls.of("gather")) == 8
    assert max(call.bytes_in for call in calls.of("gather")) == 2 * 66 * 132 * 6


def test_one_group_where_the_backend_can() -> None:
    with loopback.job(world=2) as group:
        model = fully_shard(with_split_weights(nn.Sequential(nn.Linear(160, 160))))
        for _ in range(2):
            group.log.clear()
            with torch.no_grad():
                model(torch.ones(1, 160))
        gathers = [call for call in group.log if call.kind == "gather"]
        assert len(gathers) == 1 and len(gathers[0].inputs) == 3


@ignore_old_names
@world(2)
def test_copies_state_plugins_and_conversions() -> None:
    """Contract EXT-10."""
    model, reference = sharded(with_split_weights(Stack())), Stack()
    model.blocks[1].set_custom_all_gather(ToyGather())
    loss_of(model).backward()
    loss_of(reference).backward()
    assert_gradients(model, reference, rtol=1e-4, atol=1e-6)
    twin = copy.deepcopy(model)
    twin.load_state_dict(model.state_dict())
    for _ in range(2):
        loss_of(twin)
    loss_of(twin).backward()
    assert_gradients(twin, reference, rtol=1e-4, atol=1e-6)
    model.set_requires_gradient_sync(False)
    loss_of(model, 1).backward()
    model.set_requires_gradient_sync(True)
    loss_of(model, 2).backward()
    for seed in (1, 2):
        loss_of(reference, seed).backward()
    assert_gradients(model, reference, rtol=1e-4, atol=1e-6)


@world(2)
def test_meta_parameters_become_real_ones() -> None:
    """Contract EXT-10: materialised, then found."""
    with torch.device("meta"):
        model = with_split_weights(nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 2)))
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    model.to_empty(device="cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter._local_tensor.copy_(torch.full(parameter._local_tensor.shape, 0.5))
    expected = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 2))
    with torch.no_grad():
        for parameter in expected.parameters():
            parameter.fill_(0.5)
    torch.testing.assert_close(model(torch.ones(1, 6)), expected(torch.ones(1, 6)))


@world(2)
def test_protocols_that_are_not_followed() -> None:
    """Contract EXT-01, EXT-02, EXT-09, EXT-11: named on every rank, and no rank waits for another."""
    model = sharded()
    local = model.head.weight._local_tensor
    local.fsdp_pre_all_gather = lambda mesh: ((local,), None)
    with pytest.raises(AssertionError, match=r"'head.weight' has fsdp_pre_all_gather but not"):
        loss_of(model)
    local.fsdp_post_all_gather = lambda gathered, metadata, dtype, out=None: None
    local.fsdp_pre_all_gather = lambda mesh, size: ((local,), None)
    with pytest.raises(AssertionError, match=r"'head.weight' takes 2 arguments"):
        loss_of(model)
    local.fsdp_pre_all_gather = lambda mesh: ((local[: 1 - dist.get_rank()],), None)
    with pytest.raises(
        ValueError, match=r"disagree about what fsdp_pre_all_gather returns for parameter 'head.weight'"
    ):
        loss_of(model)
    local.fsdp_pre_all_gather = lambda mesh: ((local,), None)
    local.fsdp_post_all_gather = lambda gathered, metadata, dtype, out=None: (gathered[0][:1], ())
    with pytest.raises(AssertionError, match=r"'head.weight' on rank . returned a tensor of shape \(1, 132\)"):
        loss_of(model)
    patch(local, [])  # what was wrong is mended, and the model is as good as new
    reference = Stack()
    for each in (model, reference):
        loss_of(each).backward()
    assert_gradients(model, reference)


@world(4)
def test_no_slices_of_them() -> None:
    model = sharded(with_split_weights(Stack()), reshard_after_forward=2)
    with pytest.raises(NotImplementedError, match=r"own gather protocol \(head.weight"):
        loss_of(model)
