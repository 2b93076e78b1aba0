"""Dtypes inside units: what is stored, gathered, summed and reduced; several dtypes together; norms; numbers."""

from __future__ import annotations

import copy
import dataclasses
import types
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from bed import world
from bed.recorders import Collectives
from bed.stack import assert_at_rest, mesh, units
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from unshard import MixedPrecisionPolicy, fully_shard

F64, F32, F16, B16 = torch.float64, torch.float32, torch.float16, torch.bfloat16
F8 = torch.float8_e4m3fn


class Scale(nn.Module):
    """`x * weight`: the gradient of a weight is the input, exactly."""

    def __init__(self, *values: float, dtype: torch.dtype = F32) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(values or (1.0, 1.0, 1.0, 1.0), dtype=dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


def batch(seed: int = 0, size: int = 6) -> torch.Tensor:
    return torch.randn(4, size, generator=torch.Generator().manual_seed(seed))


# --- the policy ------------------------------------------------------------------------------------------------------


def test_a_policy_is_a_value() -> None:
    """Contract MP-01: frozen, hashable, comparable; what is not said is as it comes."""
    policy = MixedPrecisionPolicy()
    assert (policy.param_dtype, policy.reduce_dtype, policy.output_dtype) == (None, None, None)
    assert policy.cast_forward_inputs is True
    with pytest.raises(dataclasses.FrozenInstanceError):
        policy.param_dtype = B16  # type: ignore[misc]
    one, same, other = (
        MixedPrecisionPolicy(B16, F32),
        MixedPrecisionPolicy(B16, F32, None, True),
        MixedPrecisionPolicy(B16),
    )
    assert one == same and one != other and len({one, same, other}) == 2


@world(2)
def test_a_policy_belongs_to_its_call() -> None:
    """Contract MP-01, MP-03, MP-41: children keep theirs, nothing is inherited, and the policy is not changed."""

    class Parent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.before, self.child = nn.Linear(6, 6), nn.Linear(6, 6)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.child(self.before(x))

    model, reference = Parent(), Parent()
    reference.child.to(B16)
    policy = MixedPrecisionPolicy(param_dtype=B16)
    before = copy.deepcopy(policy)
    fully_shard(model.child, mp_policy=policy)
    fully_shard(model)
    for _ in range(2):
        with Collectives() as calls:
            out = model(batch())
            out.float().square().mean().backward()
        assert [call.dtypes for call in calls.of("gather")][:2] == [{F32}, {B16}]
        assert [call.dtypes for call in calls.of("reduce_scatter")] == [{B16}, {F32}]
        expected = reference.child(reference.before(batch()).to(B16))
        expected.float().square().mean().backward()
        assert out.dtype == B16 and torch.equal(out, expected)
    for mine, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        assert mine.grad.dtype == F32
        # The second backward is added in the dtype of the parameter: fp32 here, bf16 in the reference's child.
        torch.testing.assert_close(mine.grad.full_tensor(), theirs.grad.float(), rtol=1e-2, atol=1e-4)
    assert policy == before and units(model.child)[0].policy is policy and units(model)[0].policy != policy


@pytest.mark.parametrize("converted", [F64, B16, F16, F32])
@world(2)
def test_a_model_converted_after_sharding(converted: torch.dtype) -> None:
    """Contract MP-04, MP-05, MP-06, MP-07: effective dtypes are those of the first forward; none is widened."""
    for param, reduce, wire in (
        (None, None, converted),
        (B16, None, B16),
        (B16, B16, B16),
        (None, F32, F32),
        (F32, F32, F32),
        (B16, F32, F32),
    ):
        model = fully_shard(Scale(), mp_policy=MixedPrecisionPolicy(param_dtype=param, reduce_dtype=reduce))
        model.to(converted)
        with Collectives() as calls:
            out = model(torch.ones(4, dtype=converted))
            out.sum().backward()
        assert [call.dtypes for call in calls.calls] == [{param or converted}, {wire}], (param, reduce)
        assert out.dtype == (param or converted)
        assert model.weight.dtype == model.weight.grad.dtype == converted
        assert model.weight.grad.full_tensor().tolist() == [1.0] * 4


@world(2, 3)
def test_what_is_stored_keeps_the_original_dtype() -> None:
    """Contract MP-08: parameters, gradients and optimizer state, in forward, in backward and at rest."""
    for original in (F32, F64):
        for param, reduce in ((B16, None), (F16, None), (B16, F32), (None, B16), (F32, F16)):
            model = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 4)).to(original)
            fully_shard(model, mp_policy=MixedPrecisionPolicy(param, reduce, output_dtype=original))
            optimizer = torch.optim.Adam(model.parameters())
            for _ in range(2):
                model(batch().to(original)).sum().backward()
                optimizer.step()
            stored = [each for state in optimizer.state.values() for each in (state["exp_avg"], state["exp_avg_sq"])]
            stored += [tensor for each in model.parameters() for tensor in (each, each.grad)]
            assert len(stored) == 16 and {each.dtype for each in stored} == {original}
            assert {value.dtype for value in model.state_dict().values()} == {original}


# --- gathers ---------------------------------------------------------------------------------------------------------


@world(2, 3)
def test_the_cast_comes_before_the_gather() -> None:
    """Contract MP-09: half the bytes, and what is computed with is the master in the compute dtype."""
    model = Scale(1.0, 1 + 2**-12, -(1 + 2**-7), 3.14159265, 2.7)
    fully_shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=B16))
    with Collectives() as calls, torch.no_grad():
        out = model(torch.ones(5))
    pieces = -(-5 // dist.get_world_size())
    assert [(call.dtypes, call.bytes_in) for call in calls.calls] == [({B16}, 2 * pieces)]
    assert torch.equal(out, torch.tensor([1.0, 1 + 2**-12, -(1 + 2**-7), 3.14159265, 2.7]).to(B16))


class Several(nn.Module):
    """Parameters of four dtypes, one of them integer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(6)
        self.high, self.low = nn.Linear(6, 6), nn.Linear(6, 6).to(B16)
        self.factor = nn.Parameter(torch.randn(6).to(F16))
        self.table = nn.Parameter(torch.arange(5) + 2**60, requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = {name: each.dtype for name, each in self.named_parameters()}
        hidden = self.low(self.high(x.to(self.high.weight.dtype)).to(self.low.weight.dtype))
        return hidden.float() * self.factor.float() * (self.table[2] - 2**60)


def pieces(model: nn.Module, dtype_of: Callable[[nn.Parameter], torch.dtype]) -> int:
    """Bytes of this rank's padded shards, in whole elements of the widest dtype so that every piece is aligned."""
    world_size = dist.get_world_size()
    rows = [(-(-each.shape[0] // world_size), each) for each in model.parameters()]
    total = sum(row * each[0].numel() * dtype_of(each).itemsize for row, each in rows)
    widest = max(dtype_of(each).itemsize for _, each in rows)
    return -(-total // widest) * widest


@world(2, 3, 4)
def test_several_dtypes_travel_as_bytes() -> None:
    """Contract MP-32, MP-33; MP-30, MP-31 and MP-34 improved: trainable parameters of several dtypes are accepted.

    Each is gathered and reduced in its own dtypes.
    """
    model, reference = Several(), Several()
    expected = pieces(reference, lambda each: each.dtype)
    fully_shard(model, reshard_after_forward=False)
    with Collectives() as calls:
        out = model(batch(dist.get_rank()))
        out.square().mean().backward()
    (gather,) = calls.of("gather")
    assert (gather.dtypes, gather.bytes_in) == ({torch.uint8}, expected)
    assert gather.bytes_out == expected * dist.get_world_size()
    assert set().union(*(call.dtypes for call in calls.of("reduce_scatter"))) == {F32, B16, F16}
    assert model.seen == {name: each.dtype for name, each in reference.named_parameters()}
    sums: dict[str, torch.Tensor] = {}
    for rank in range(dist.get_world_size()):
        reference.zero_grad()
        theirs = reference(batch(rank))
        theirs.square().mean().backward()
        if rank == dist.get_rank():
            assert torch.equal(out, theirs)
        for name, each in reference.named_parameters():
            if each.requires_grad:
                sums[name] = sums.get(name, 0) + each.grad.double() / dist.get_world_size()
    assert len(sums) == 5
    for name, mine in model.named_parameters():
        if mine.requires_grad:
            kind = mine.dtype
            assert mine.grad.dtype == kind
            near = {F32: 1e-5, B16: 2e-2, F16: 2e-3}[kind]
            torch.testing.assert_close(mine.grad.full_tensor().double(), sums[name], rtol=near, atol=near / 10)
        else:
            assert mine.grad is None and mine.full_tensor().tolist() == (torch.arange(5) + 2**60).tolist()


@world(2, 3)
def test_integers_in_a_low_precision_unit() -> None:
    """Contract MP-33: not cast; they ride along as bytes with the parameters that are."""
    model, reference = Several(), Several()
    table = pieces(reference, lambda each: torch.int64 if each is reference.table else B16)
    fully_shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=B16, reduce_dtype=F32))
    with Collectives() as calls:
        model(batch()).sum().backward()
    assert {name: each for name, each in model.seen.items() if each != B16} == {"table": torch.int64}
    assert calls.of("gather")[0].dtypes == {torch.uint8} and calls.of("gather")[0].bytes_in == table
    assert [call.dtypes for call in calls.of("reduce_scatter")] == [{F32}] * 3  # one for each dtype that is stored
    assert model.table.dtype == torch.int64 and model.table.full_tensor()[2] == 2**60 + 2
    assert model.factor.grad.dtype == F16 and model.low.weight.grad.dtype == B16


@world(2)
def test_frozen_parameters_of_another_dtype() -> None:
    """Contract MP-30: as the reference accepts it."""
    model = nn.Sequential(nn.Linear(6, 6).requires_grad_(False).to(B16), nn.Linear(6, 6))
    model[0].register_forward_pre_hook(lambda module, args: args[0].to(B16))
    model[1].register_forward_pre_hook(lambda module, args: args[0].float())
    fully_shard(model)
    with Collectives() as calls:
        model(batch()).sum().backward()
    assert [call.dtypes for call in calls.calls] == [{torch.uint8}, {F32}]
    assert model[0].weight.grad is None and model[0].weight.dtype == B16 and model[1].weight.grad.dtype == F32


class Upcast(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-2, 2, 12).reshape(4, 3))

    def forward(self) -> torch.Tensor:
        self.seen = self.weight.dtype
        return self.weight.to(F32) * 1.0


@world(2, 3)
def test_eight_bit_parameters() -> None:
    """Contract MP-35: one byte each on the wire; a layer gets as far, or fails with the same words, as without."""
    policy = MixedPrecisionPolicy(param_dtype=F8, reduce_dtype=F32, cast_forward_inputs=False)
    model = fully_shard(Upcast(), mp_policy=policy)
    with torch.no_grad(), Collectives() as calls:
        out = model()
    assert calls.calls[0].bytes_in == -(-4 // dist.get_world_size()) * 3
    assert model.seen == F8 and torch.equal(out, torch.linspace(-2, 2, 12).reshape(4, 3).to(F8).to(F32))
    model().sum().backward()
    assert model.weight.grad.dtype == F32 and torch.equal(model.weight.grad.full_tensor(), torch.ones(4, 3))
    torch.manual_seed(0)
    layer = nn.Linear(16, 16)
    plain = copy.deepcopy(layer).to(F8)
    fully_shard(layer, mp_policy=MixedPrecisionPolicy(param_dtype=F8, reduce_dtype=F32), reshard_after_forward=True)
    for _ in range(2):
        theirs, mine = (_attempt(each, torch.ones(2, 16).to(F8)) for each in (plain, layer))
        assert isinstance(mine, Exception) == isinstance(theirs, Exception), (mine, theirs)
        if isinstance(theirs, Exception):
            assert str(mine) == str(theirs)
        else:
            assert torch.equal(mine, theirs)
        layer.reset_iter_state()
        assert_at_rest(layer)
    assert layer.weight.dtype == F32


def _attempt(layer: nn.Module, x: torch.Tensor) -> torch.Tensor | Exception:
    try:
        out = layer(x)
        out.float().sum().backward()
    except (RuntimeError, NotImplementedError) as error:
        return error
    return out.float()


def _send_eight_bits(local: torch.Tensor, seen: list, whole_dtype: torch.dtype) -> None:
    """A gather protocol of fp8: the shard is sent in one byte per element and computed with in another dtype."""

    def pre(self, mesh, outer_size, outer_stride, module, mp_policy):
        seen.append((self.dtype, mp_policy.param_dtype))
        return (self.to(F8),), None

    def post(self, gathered, metadata, param_dtype, *, out=None):
        seen.append((gathered[0].dtype, param_dtype))
        if out is None:
            whole = gathered[0].to(whole_dtype)
            return whole, (whole,)
        out.copy_(gathered[0])
        return None

    local.fsdp_pre_all_gather = types.MethodType(pre, local)
    local.fsdp_post_all_gather = types.MethodType(post, local)


class Precise(nn.Linear):
    """Computes with its weight in the dtype it has, and with all else in that of the input."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x.to(self.weight.dtype) @ self.weight.t()).to(x.dtype) + self.bias


@pytest.mark.parametrize("whole_dtype", [B16, F32])
@world(2)
def test_eight_bits_by_a_gather_protocol(whole_dtype: torch.dtype) -> None:
    """Contract MP-35, MP-36: the library hands the shard over uncast, and the dtype; gradients may be precise.

    MP-34 improved: those of the other parameters may have another dtype.
    """
    torch.manual_seed(0)
    layer, seen = Precise(6, 8), []
    weight = layer.weight.detach().to(F8).to(whole_dtype).requires_grad_()
    bias = layer.bias.detach().to(B16).requires_grad_()
    fully_shard(layer, mp_policy=MixedPrecisionPolicy(param_dtype=B16, reduce_dtype=F32), reshard_after_forward=True)
    _send_eight_bits(layer.weight._local_tensor, seen, whole_dtype)
    for _ in range(2):
        with Collectives() as calls:
            out = layer(batch())
            out.float().square().sum().backward()
        x = batch().to(B16)
        expected = (x.to(whole_dtype) @ weight.t()).to(B16) + bias
        expected.float().square().sum().backward()
        assert torch.equal(out, expected)
        for mine, theirs in ((layer.weight, weight), (layer.bias, bias)):
            assert mine.dtype == mine.grad.dtype == F32
            assert torch.equal(mine.grad.full_tensor(), theirs.grad.float()) and theirs.grad.any()
            mine.grad = theirs.grad = None
    sent = sorted(call.bytes_in for call in calls.of("gather"))
    assert sent == [4 * 2] * 2 + [4 * 6] * 2  # half of the bias in bf16, half of the weight in fp8
    assert seen[:2] == [(F32, B16), (F8, B16)] and len(seen) == 8
    assert_at_rest(layer)


@world(4)
def test_tensor_parallel_parameters_are_unsharded_in_the_compute_dtype() -> None:
    """Contract MP-37: what a DTensor says of itself is what it holds."""
    whole = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 6))
    parallelize_module(model, whole["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    seen: list[tuple] = []
    for layer in model:
        layer.register_forward_pre_hook(
            lambda module, args: seen.append((module.weight.dtype, module.weight.to_local().dtype))
        )
    fully_shard(model, mesh=whole["dp"], mp_policy=MixedPrecisionPolicy(param_dtype=B16, reduce_dtype=F32))
    model(batch()).sum().backward()
    assert seen == [(B16, B16)] * 2
    for parameter in model.parameters():
        assert isinstance(parameter, DTensor)
        assert parameter.dtype == parameter.to_local().dtype == F32
        assert parameter.grad.dtype == parameter.grad.to_local().dtype == F32


# --- shards and replicas ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reduce", [B16, F32, F16])
@world(4)
def test_replicas_are_reduced_in_the_reduce_dtype(reduce: torch.dtype) -> None:
    """Contract MP-13: both collectives, and the sums between them; 256 and 1 show the dtype of a sum."""
    model = fully_shard(Scale(), mesh=mesh(2), mp_policy=MixedPrecisionPolicy(param_dtype=F32, reduce_dtype=reduce))
    (unit,) = units(model)
    rank = dist.get_rank()
    for first, second in ((256.0, 1.0), (1.0 + rank, 4.0 - rank)):
        for value, last in ((first, False), (second, True)):
            model.set_requires_all_reduce(last)
            with Collectives() as calls:
                model(torch.full((4,), value)).sum().backward()
            kinds = ["reduce_scatter", "all_reduce"] if last else ["reduce_scatter"]
            assert [(call.kind, call.dtypes) for call in calls.calls if call.kind != "gather"] == [
                (kind, {reduce}) for kind in kinds
            ]
            (reduction,) = unit.param_groups[0].gradients.reductions.values()
            assert reduction.has_partial is not last
            assert {each.dtype for each in reduction.partial.flats} == {reduce}
        exact = {B16: 256.0, F32: 257.0, F16: 257.0}[reduce] if first == 256.0 else 5.0
        assert model.weight.grad.full_tensor().tolist() == [exact] * 4
        assert model.weight.grad.dtype == F32
        model.zero_grad()


# --- modules with buffers, eval --------------------------------------------------------------------------------------


def _by_hand(model: nn.Module, low: torch.dtype) -> None:
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            if buffer.is_floating_point():
                setattr(module, name, buffer.to(low))


@pytest.mark.parametrize("low", [B16, F16])
@world(2)
def test_norms(low: torch.dtype) -> None:
    """Contract MP-38, MP-39: buffers keep their dtype; outputs have the compute dtype; backward runs.

    On the CPU torch has no batch norm of low-precision weights and fp32 statistics, so these are cast by hand, or the
    norm has a policy of outputs only.
    """
    whole = MixedPrecisionPolicy(param_dtype=low, reduce_dtype=F32)
    outputs = MixedPrecisionPolicy(output_dtype=low)
    for make, shape, policy in (
        (lambda: nn.LayerNorm(6), (4, 6), whole),
        (lambda: nn.BatchNorm1d(6), (4, 6), whole),
        (lambda: nn.BatchNorm2d(6), (4, 6, 3, 3), whole),
        (lambda: nn.BatchNorm1d(6), (4, 6), outputs),
        (lambda: nn.BatchNorm2d(6), (4, 6, 3, 3), outputs),
    ):
        torch.manual_seed(0)
        model = nn.Sequential(make(), make())
        reference = copy.deepcopy(model)
        if policy is whole:
            _by_hand(model, low)
        kinds = {name: buffer.dtype for name, buffer in model.named_buffers()}
        for each in model:
            fully_shard(each, mp_policy=policy)
        fully_shard(model, mp_policy=whole)
        x = torch.randn(shape, generator=torch.Generator().manual_seed(3)).requires_grad_()
        out = model(x)
        out.float().square().mean().backward()
        assert out.dtype == low and x.grad.dtype == F32
        assert {name: buffer.dtype for name, buffer in model.named_buffers()} == kinds
        other = reference(x.detach())
        other.square().mean().backward()
        torch.testing.assert_close(out.float(), other, rtol=0.05, atol=0.05)
        for mine, theirs in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(mine.grad.full_tensor(), theirs.grad, rtol=0.05, atol=0.02)
        for mine, theirs in zip(model.buffers(), reference.buffers(), strict=True):
            torch.testing.assert_close(mine, theirs.to(mine.dtype), rtol=0.05, atol=0.05)
        assert_at_rest(model)


@world(2)
def test_evaluation_changes_no_dtype() -> None:
    """Contract MP-40."""
    model = nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5))
    inputs: list[torch.dtype] = []
    model[0].register_forward_pre_hook(lambda module, args: inputs.append(args[0].dtype))
    fully_shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=B16, reduce_dtype=F32))
    for training in (True, False):
        model.train(training)
        for context in (torch.enable_grad, torch.no_grad):
            with context(), Collectives() as calls:
                out = model(batch())
            assert out.dtype == B16 and [call.dtypes for call in calls.of("gather")] == [{B16}]
            if out.requires_grad:
                out.sum().backward()
                assert model[0].weight.grad.dtype == F32
    assert inputs == [B16] * 4


# --- numbers ---------------------------------------------------------------------------------------------------------


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(9)
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 7)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.first(x)))


def loss_of(model: nn.Module, rank: int, seed: int, dtype: torch.dtype) -> torch.Tensor:
    return model(batch(100 * seed + rank).to(dtype)).float().square().mean()


def check_gradient(mine: torch.Tensor, theirs: list[torch.Tensor], reduce: torch.dtype) -> None:
    """The mean over the ranks in the reduce dtype: exact for two, otherwise as exact as any order of additions is."""
    ranks = len(theirs)
    theirs = [each.to(reduce) for each in theirs]
    assert mine.dtype == F32 and torch.equal(mine, mine.to(reduce).float())  # it came in the reduce dtype
    if ranks == 2:
        before, after = (2, 1) if reduce == F16 else (1, 2)
        assert torch.equal(mine, ((theirs[0] / before + theirs[1] / before) / after).float())
        return
    exact = torch.stack([each.double() for each in theirs])
    # Every addition and every division rounds once, by half a unit in the last place at most.
    roundings = ranks - 1 + 3
    bound = roundings * torch.finfo(reduce).eps / 2 * exact.abs().sum(0) / ranks + torch.finfo(reduce).smallest_normal
    assert ((mine.double() - exact.mean(0)).abs() <= bound).all()


def check_numbers(param: torch.dtype, reduce: torch.dtype | None, **options: object) -> None:
    """Three steps of SGD; the reference starts each from the same fp32 weights, so that roundings do not add up."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    model, reference = Net(), Net()
    policy = MixedPrecisionPolicy(param_dtype=param, reduce_dtype=reduce)
    fully_shard(model.first, mp_policy=policy, **options)
    fully_shard(model, mp_policy=policy, **options)
    crossed = any(each.placements == (Shard(1),) for each in model.parameters())
    assert crossed == ("shard_placement_fn" in options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for seed in range(3):
        loss = loss_of(model, rank, seed, F32)
        loss.backward()
        copies = [copy.deepcopy(reference).to(param) for _ in range(ranks)]
        losses = [loss_of(each, number, seed, param) for number, each in enumerate(copies)]
        assert torch.equal(loss, losses[rank]) and loss.isfinite()
        for each in losses:
            each.backward()
        optimizer.step()
        pairs = zip(model.parameters(), reference.parameters(), *(each.parameters() for each in copies), strict=True)
        for mine, shard, *theirs in pairs:
            gradient = mine.grad.full_tensor()
            assert gradient.any()
            check_gradient(gradient, [each.grad for each in theirs], reduce or param)
            with torch.no_grad():
                shard -= 0.5 * gradient
            torch.testing.assert_close(mine.detach().full_tensor(), shard.detach(), rtol=0, atol=0)
        optimizer.zero_grad()


def columns(parameter: nn.Parameter) -> Shard | None:
    """Six and eight columns: one of them at least divides; only then may another dimension be cut."""
    return Shard(1) if parameter.ndim == 2 and parameter.shape[1] % dist.get_world_size() == 0 else None


POLICIES = [(B16, None), (B16, F32), (F32, B16), (F16, None)]


@pytest.mark.parametrize(("param", "reduce"), POLICIES)
@world(2, 3, 4)
def test_numbers_of_every_policy(param: torch.dtype, reduce: torch.dtype | None) -> None:
    """Contract MP-42, MP-43, MP-44, MP-45: for every way to reshard, also in slices, and for another dimension."""
    ranks = dist.get_world_size()
    for reshard in (True, False, 2) if ranks != 3 else (True, False):
        check_numbers(param, reduce, reshard_after_forward=reshard)
    check_numbers(param, reduce, shard_placement_fn=columns)


@world(2, 3, 4)
def test_half_precision_is_divided_before_and_after() -> None:
    """Contract MP-45: three times the smallest number, halved, rounds to two of them; every step is seen."""
    tiny = 2.0**-24
    model = fully_shard(Scale(dtype=F16))
    model(torch.full((4,), 3 * tiny, dtype=F16)).sum().backward()
    assert model.weight.grad.full_tensor().tolist() == [4 * tiny] * 4  # not 3: two of each rank, over half the ranks
