"""Shards that bring their own gather protocol."""

from __future__ import annotations

import copy
import types

import pytest
import torch
import torch.distributed as dist
from bed import loopback, world
from bed.recorders import Collectives
from distributed.test_fully_shard import Stack, assert_at_rest, assert_gradients, batch, loss_of, sharded, units
from distributed.test_plugins import IGNORED, ToyGather
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils._pytree import tree_map_only

from unshard import MixedPrecisionPolicy, fully_shard


class Travels(torch.Tensor):
    """A weight that travels as two tensors, a half-precision body and what is missing to the full one."""

    KEPT = {
        torch.ops.aten.detach.default,
        torch.ops.aten.slice.Tensor,
        torch.ops.aten.clone.default,
        torch.ops.aten._to_copy.default,
        torch.ops.aten.copy_.default,
        torch.ops.aten.view.default,
        torch.ops.aten.split.Tensor,
        torch.ops.aten.empty_like.default,
        torch.ops.aten.zeros_like.default,
        torch.ops.aten.new_zeros.default,
    }
    seen: list[tuple] = []

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Travels:
        return torch.Tensor._make_wrapper_subclass(
            cls, inner.shape, inner.stride(), inner.storage_offset(), dtype=inner.dtype, device=inner.device
        )

    def __init__(self, inner: torch.Tensor) -> None:
        self.inner = inner

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["inner"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict, meta: object, size: object, stride: object) -> Travels:
        return Travels(inner["inner"])

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        unwrapped = tree_map_only(Travels, lambda each: each.inner, (args, kwargs or {}))
        result = func(*unwrapped[0], **unwrapped[1])
        if func is torch.ops.aten.copy_.default:
            return args[0]
        return tree_map_only(torch.Tensor, Travels, result) if func in cls.KEPT else result

    def fsdp_pre_all_gather(self, mesh, outer_size, outer_stride, module, mp_policy):
        Travels.seen.append((mesh, outer_size, outer_stride, module, mp_policy))
        padded = self.inner.new_zeros(-(-outer_size[0] // mesh.size()), *self.inner.shape[1:])
        padded[: self.inner.shape[0]] = self.inner
        body = padded.to(torch.bfloat16)
        return (body, padded - body.float()), (outer_size, padded.dtype)

    def fsdp_post_all_gather(self, gathered, metadata, param_dtype, *, out=None):
        size, _ = metadata
        body, rest = gathered
        assert body.shape[0] >= size[0] and body.dtype == torch.bfloat16 and rest.dtype == torch.float32
        whole = (body.float() + rest)[: size[0]].to(param_dtype)
        if out is None:
            return whole, (whole,)
        assert out.shape == size and out.dtype == param_dtype
        out.copy_(whole)
        return None


def with_travelling_weights(model: nn.Module) -> nn.Module:
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.weight = nn.Parameter(Travels(module.weight.detach()))
    return model


POLICIES = [None, MixedPrecisionPolicy(param_dtype=torch.float64, reduce_dtype=torch.float32)]


@pytest.mark.parametrize("policy", POLICIES, ids=["plain", "mixed"])
@pytest.mark.parametrize("reshard", [True, False, None])
@world(1, 2, 3, 4)
def test_parity_of_a_tensor_subclass(reshard: bool | None, policy: MixedPrecisionPolicy | None) -> None:
    """Contract EXT-01, EXT-02, EXT-04 to EXT-09: several tensors per parameter, several dtypes, uneven shards."""
    model, reference = with_travelling_weights(Stack()), Stack()
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
    mesh, size, stride, module, seen_policy = Travels.seen[-1]
    assert size == module.weight.shape and stride == (size[1], 1) and isinstance(module, nn.Linear)
    assert seen_policy == (policy or MixedPrecisionPolicy()) and mesh.size() == dist.get_world_size()
    assert_at_rest(model)
    with torch.no_grad():
        torch.testing.assert_close(model(batch()).float(), reference(batch()), rtol=1e-4, atol=1e-4)


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
    model, reference = sharded(with_travelling_weights(Stack()), mesh=mesh), Stack()
    for each in (model, reference):
        loss_of(each).backward()
    assert_gradients(model, reference, rtol=1e-4, atol=1e-6)
    seen: DeviceMesh = Travels.seen[-1][0]
    assert seen.ndim == 1 and seen.mesh_dim_names == ("shard",)


@world(2)
def test_memory_comes_and_goes() -> None:
    """Contract EXT-06: what was gathered and what it became are emptied with the unit; the parameter object stays."""
    model = with_travelling_weights(nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6)))
    for layer in model:
        fully_shard(layer, reshard_after_forward=True)
    fully_shard(model)
    faces: list[nn.Parameter] = []
    model[0].register_forward_pre_hook(lambda module, args: faces.append(module.weight))
    for _ in range(2):
        loss = model(torch.ones(2, 6, requires_grad=True)).sum()
        extension = units(model)[1].parts[0]._whole._extensions._members[0]
        assert faces[-1].untyped_storage().nbytes() == 0
        assert not any(buffer.held for buffer in extension._buffers)
        loss.backward()
    assert faces[0] is faces[1]


@world(2)
def test_one_extra_collective_of_bytes() -> None:
    """Contract EXT-05, CM-01: a backend that cannot group gathers all such tensors of a unit at once, as bytes."""
    model = sharded(with_travelling_weights(Stack()), reshard_after_forward=True)
    with Collectives() as calls:
        loss_of(model)
    assert len(calls.of("gather")) == 8 + 7  # what ranks agree on at first, one for each such weight
    with Collectives() as calls:
        loss_of(model)
    assert len(calls.of("gather")) == 8
    assert max(call.bytes_in for call in calls.of("gather")) == 2 * 66 * 132 * 6


def test_one_group_where_the_backend_can() -> None:
    with loopback.job(world=2) as group:
        model = fully_shard(with_travelling_weights(nn.Sequential(nn.Linear(160, 160))))
        for _ in range(2):
            group.log.clear()
            with torch.no_grad():
                model(torch.ones(1, 160))
        gathers = [call for call in group.log if call.kind == "gather"]
        assert len(gathers) == 1 and len(gathers[0].inputs) == 3


@IGNORED
@world(2)
def test_copies_state_plugins_and_conversions() -> None:
    """Contract EXT-10."""
    model, reference = sharded(with_travelling_weights(Stack())), Stack()
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
        model = with_travelling_weights(nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 2)))
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
    patch(local, [])  # what was wrong is mended, and the model is as good as new
    reference = Stack()
    for each in (model, reference):
        loss_of(each).backward()
    assert_gradients(model, reference)


@world(4)
def test_no_slices_of_them() -> None:
    model = sharded(with_travelling_weights(Stack()), reshard_after_forward=2)
    with pytest.raises(NotImplementedError, match=r"own gather protocol \(head.weight"):
        loss_of(model)
