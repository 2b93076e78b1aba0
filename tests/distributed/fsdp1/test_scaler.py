"""`ShardedGradScaler` (contract E4), and hooks that reduce gradients (F1-85, F1-86)."""

from __future__ import annotations

import copy
import inspect
import itertools
import math
import warnings
from contextlib import nullcontext
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from bed import models, world
from bed.models import CASES
from bed.wrapped import full_gradients, wrap, wrap_case
from torch import nn
from torch.distributed.algorithms._comm_hooks import default_hooks
from torch.distributed.device_mesh import init_device_mesh

import unshard
from unshard import CPUOffload, MixedPrecision, ShardingStrategy
from unshard import FullyShardedDataParallel as FSDP
from unshard.optim import ShardedGradScaler

S = ShardingStrategy
half = torch.float16


class Pair(NamedTuple):
    a: torch.Tensor
    b: list[torch.Tensor]


def test_gs_50_arguments() -> None:
    parameters = list(inspect.signature(ShardedGradScaler).parameters.values())
    names = ["device", "init_scale", "backoff_factor", "growth_factor", "growth_interval", "enabled", "process_group"]
    assert [each.name for each in parameters] == names
    assert [each.default for each in parameters[:6]] == ["cuda", 2.0**16, 0.5, 2.0, 2000, True]
    assert issubclass(ShardedGradScaler, torch.amp.GradScaler), "GS-51"


def test_gs_51_gs_52_gs_62_what_is_scaled() -> None:
    scaler = ShardedGradScaler("cpu", init_scale=8.0)
    one = torch.ones((), dtype=half)
    assert scaler.scale(one).dtype == half and scaler.scale(one).item() == 8.0
    nested = scaler.scale([one, (one, [one])])
    assert type(nested) is list and type(nested[1]) is tuple and nested[1][1][0].item() == 8.0
    pair = scaler.scale(Pair(one, [one]))
    assert type(pair) is Pair and pair.b[0].item() == 8.0
    assert [each.item() for each in scaler.scale(each for each in (one, one))] == [8.0, 8.0]
    for wrong in (3.0, "loss"):
        with pytest.raises(ValueError, match="iterable"):
            scaler.scale(wrong)
    with pytest.raises(AssertionError, match="meta"):
        scaler.scale(torch.ones((), device="meta"))
    for off in (False, None):
        disabled = ShardedGradScaler("cpu", enabled=off)  # type: ignore[arg-type]
        assert disabled.scale(one) is one and disabled.get_scale() == 1.0


def test_gs_58_gs_59_growth_backoff_and_new_scales() -> None:
    parameter = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    scaler = ShardedGradScaler("cpu", init_scale=4.0, growth_interval=2)
    expected = [4.0, 8.0, 4.0, 4.0, 8.0]
    for number, scale in enumerate(expected):
        parameter.grad = torch.full((2,), math.inf if number == 2 else 1.0)
        scaler.scale(torch.ones(()))
        scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() == scale, number
    scaler.update(3.0)
    assert scaler.get_scale() == 3.0
    scaler.update(torch.tensor([5.0]))
    assert scaler.get_scale() == 5.0
    with pytest.raises(AssertionError):
        scaler.update(torch.ones(2))
    with pytest.raises(AssertionError):
        scaler.update(torch.ones(1, requires_grad=True))


@pytest.mark.parametrize("originals", [False, True], ids=["flat", "originals"])
@world(2, 4)
def test_gs_54_gs_60_all_ranks_skip_together(originals: bool) -> None:
    """Rank 0's first gradient is infinite every second time: nobody steps, the scale is halved; else all step."""
    for offload in (False, True):
        model = wrap_case(CASES[1], use_orig_params=originals, cpu_offload=CPUOffload(offload))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = ShardedGradScaler(init_scale=2.0)
        for step in range(4):
            scale = scaler.get_scale()
            before = [each.detach().clone() for each in model.parameters()]
            scaler.scale(CASES[1].loss(model, CASES[1].batch(step))).backward()
            if step % 2 == 0 and dist.get_rank() == 0:
                next(each for each in model.parameters() if each.grad is not None).grad.fill_(math.inf)
            scaler.unscale_(optimizer)
            found = scaler._found_inf_per_device(optimizer)[torch.device("cpu")].item()
            assert found == (1.0 if step % 2 == 0 else 0.0), "GS-54: a sum over the ranks"
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            stepped = any(not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True) if a.numel())
            assert scaler.get_scale() == (scale / 2 if step % 2 == 0 else scale)
            assert stepped == (step % 2 == 1) or not any(a.numel() for a in before)
    flags = torch.tensor([float("inf")])
    lone = nn.Parameter(torch.ones(1))
    lone.grad = flags
    scaler = ShardedGradScaler()
    scaler.scale(torch.ones(()))
    other = torch.optim.SGD([lone], lr=0.1)
    scaler.unscale_(other)
    size = dist.get_world_size()
    assert scaler._found_inf_per_device(other)[torch.device("cpu")].item() == size, "GS-54: above one means found"


@world(2)
def test_gs_53_gs_56_half_precision_and_ranks_without_gradients() -> None:
    model = FSDP(nn.Linear(1, 1, bias=False).half(), use_orig_params=True)  # all of it on rank 0
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    scaler = ShardedGradScaler(init_scale=4.0)
    for expected in (4.0, 2.0):
        loss = model(torch.ones(1, 1, dtype=half)).sum()
        scaler.scale(loss * (1.0 if expected == 4.0 else math.inf)).backward()
        assert (model.module.weight.grad is None) == (dist.get_rank() == 1)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        assert scaler.get_scale() == expected


@world(2)
def test_gs_57_sparse_gradients() -> None:
    """Entries that overflow where they are added up count."""
    table = nn.Embedding(3, 2, sparse=True)
    optimizer = torch.optim.SGD(table.parameters(), lr=0.1)
    scaler = ShardedGradScaler(init_scale=2.0)
    for overflow in (True, False):
        big = torch.finfo(torch.float32).max if overflow and dist.get_rank() == 0 else 1.0
        output = table(torch.tensor([1, 1]))
        scaler.scale(torch.ones(()))
        output.backward(torch.full_like(output, big))
        before = table.weight.detach().clone()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        assert torch.equal(before, table.weight) == overflow


@pytest.mark.parametrize("originals", [False, True], ids=["flat", "originals"])
@world(2)
@pytest.mark.filterwarnings("ignore")
def test_gs_61_parity_with_the_unsharded_model(originals: bool) -> None:
    """Losses of the unsharded model with torch's own scaler: offload x strategy x precision."""
    case = CASES[0]
    for offload, strategy, mixed in itertools.product((False, True), (None, S.SHARD_GRAD_OP), (False, True)):
        reference, rank = case.build(), dist.get_rank()
        config = MixedPrecision(torch.bfloat16, torch.float32) if mixed else None
        options = {"cpu_offload": CPUOffload(offload), "sharding_strategy": strategy, "mixed_precision": config}
        model = wrap_case(case, use_orig_params=originals, **options)
        ours, theirs = ShardedGradScaler(init_scale=2.0), torch.amp.GradScaler("cpu", init_scale=2.0)
        steps = [torch.optim.SGD(each.parameters(), lr=0.1, momentum=0.9) for each in (model, reference)]
        for step in range(3):
            batch = case.batch(step)
            expected = case.loss(reference, batch)
            theirs.scale(expected).backward()
            theirs.step(steps[1])
            theirs.update()
            loss = case.loss(model, models.shard(batch, rank, 2))
            ours.scale(loss).backward()
            ours.step(steps[0])
            ours.update()
            mean = loss.detach().float()
            dist.all_reduce(mean)
            tolerance = 2e-2 if mixed else 1e-5
            torch.testing.assert_close(mean / 2, expected.detach(), rtol=tolerance, atol=tolerance)
            for each in steps:
                each.zero_grad()


@world(2)
def test_helpers_that_cannot_see_flat_shards_say_so() -> None:
    """A norm of this rank's elements alone would be wrong without a word."""
    for originals in (False, True):
        model = FSDP(nn.Linear(4, 4), use_orig_params=originals)
        model(torch.ones(1, 4)).sum().backward()
        with pytest.raises(ValueError, match="outermost module"):
            unshard.optim.clip_grad_norm_(model.parameters(), 1.0)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = unshard.optim.GradScaler("cpu")
        scaler.scale(torch.ones(()))
        with pytest.raises(ValueError, match="ShardedGradScaler"):
            scaler.unscale_(optimizer)
        for torchs, warns in ((torch.amp.GradScaler("cpu"), True), (ShardedGradScaler("cpu"), False)):
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            torchs.scale(model(torch.ones(1, 4)).sum()).backward()
            with pytest.warns(UserWarning, match="ShardedGradScaler") if warns else nullcontext():
                torchs.step(optimizer)


@pytest.mark.parametrize("originals", [False, True], ids=["flat", "originals"])
@world(1, 2, 3)
def test_f1_85_f1_86_hooks(originals: bool) -> None:
    """Hooks of a user and PyTorch's own, for sharded units and NO_SHARD; refusals."""
    case = CASES[1]
    group, rank, size = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
    reference = case.build()
    case.loss(reference, case.batch(0)).backward()

    def check(model: FSDP, scale: float, tolerance: float) -> None:
        case.loss(model, models.shard(case.batch(0), rank, size)).backward()
        for name, gradient in full_gradients(model).items():
            expected = scale * reference.get_parameter(name).grad
            torch.testing.assert_close(gradient, expected, rtol=tolerance, atol=tolerance)

    calls = []

    def summing(state: Any, gradient: torch.Tensor, output: torch.Tensor | None = None) -> None:
        calls.append(state)
        if output is None:
            dist.all_reduce(gradient)
        else:
            # 2.13 renames the function and warns about the old name.
            reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
            reduce_scatter(output, gradient, group=dist.group.WORLD)

    for strategy in (S.FULL_SHARD, S.NO_SHARD):
        cut = strategy is S.FULL_SHARD and size > 1
        model = wrap_case(case, use_orig_params=originals, sharding_strategy=strategy)
        model.register_comm_hook("state", summing)
        check(model, float(size), 1e-4)
        assert set(calls) == {"state"}
        plain = default_hooks.reduce_scatter_hook if cut else default_hooks.allreduce_hook
        for hook, tolerance in (
            (plain, 1e-4),
            (default_hooks.fp16_compress_hook, 1e-2),
            (default_hooks.bf16_compress_hook, 5e-2),
        ):
            model = wrap_case(case, use_orig_params=originals, sharding_strategy=strategy)
            model.register_comm_hook(default_hooks.LowPrecisionState(group), hook)
            check(model, 1.0, tolerance)
        with pytest.raises(AssertionError, match="already"):
            model.register_comm_hook(None, summing)
        with pytest.raises(ValueError, match="function"):
            model.register_comm_hook(None, 3)
        with pytest.raises(AssertionError, match="outermost"):
            model.module.layers[0].register_comm_hook(None, summing)


@pytest.mark.parametrize("originals", [False, True], ids=["flat", "originals"])
@world(1, 2, 3)
def test_f1_86_compressing_hooks_reduce_as_reduce_dtype_does(originals: bool) -> None:
    """Bit for bit, and as PyTorch's up to the rounding of a sum; changed factors leave the reduction to the hook."""
    case = CASES[1]
    group, rank, size = dist.group.WORLD, dist.get_rank(), dist.get_world_size()

    def gradients(model: nn.Module, prepare: Any = None) -> list[torch.Tensor]:
        if prepare is not None:
            model.register_comm_hook(*prepare)
        case.loss(model, models.shard(case.batch(0), rank, size)).backward()
        return [each.grad for each in model.parameters() if each.grad is not None and each.grad.numel()]

    hooks = {torch.float16: default_hooks.fp16_compress_hook, torch.bfloat16: default_hooks.bf16_compress_hook}
    for strategy, (dtype, hook) in itertools.product((S.FULL_SHARD, S.NO_SHARD), hooks.items()):
        options = {"use_orig_params": originals, "sharding_strategy": strategy}
        state = default_hooks.LowPrecisionState(group)
        mine = gradients(wrap_case(case, **options), (state, hook))
        reduced = gradients(wrap_case(case, **options, mixed_precision=MixedPrecision(reduce_dtype=dtype)))
        assert mine and all(map(torch.equal, mine, reduced)) and {each.dtype for each in mine} == {torch.float32}
        assert all(torch.equal(each, each.to(dtype).float()) for each in mine), "rounded to the dtype"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # one rank, or NO_SHARD
            peer = torch_fsdp.FullyShardedDataParallel(
                case.build(),
                use_orig_params=originals,
                sharding_strategy=torch_fsdp.ShardingStrategy[strategy.name],
                mixed_precision=torch_fsdp.MixedPrecision(reduce_dtype=dtype),
                device_id=torch.device("cpu"),
            )
        alone = wrap(case.build(), [], **options)
        rounding = 2 * torch.finfo(dtype).eps
        for one, theirs in zip(gradients(alone, (state, hook)), gradients(peer), strict=True):
            torch.testing.assert_close(one, theirs, rtol=rounding, atol=rounding * theirs.abs().max().item())
        state.gradient_postdivide_factor *= 8.0
        with mock.patch.object(torch.Tensor, "record_stream"):  # which fails on the CPU
            smaller = gradients(wrap_case(case, **options), (state, hook))
        torch.testing.assert_close([8 * each for each in smaller], mine, rtol=8 * rounding, atol=1e-3)


@world(4)
def test_f1_85_no_hooks_for_hybrid() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("r", "s"))
    model = wrap(nn.Linear(4, 4), [], device_mesh=mesh, sharding_strategy=S.HYBRID_SHARD)
    with pytest.raises(AssertionError, match="HYBRID_SHARD"):
        model.register_comm_hook(None, print)


@world(2)
def test_f1_87_unshard() -> None:
    model = FSDP(nn.Linear(4, 4), use_orig_params=True)
    expected = copy.deepcopy(model.state_dict())
    assert model._unshard() is None
    assert model.module.weight.shape == (4, 4) and torch.equal(model.module.weight, expected["weight"])
    model = FSDP(nn.Linear(4, 4), use_orig_params=True)
    handle = model._unshard(async_op=True)
    assert handle is not None
    handle.wait()
    assert model.module.weight.shape == (4, 4)
    model(torch.ones(1, 4)).sum().backward()
    assert model.module.weight.ndim == 1
