"""`FullyShardedDataParallel` on a CUDA device that ranks of NCCL share."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from bed import models, world
from bed.models import CASES, Case
from bed.parity import adamw
from bed.wrapped import full_parameters, wrap
from torch import nn

from unshard import CPUOffload, MixedPrecision, ShardingStrategy
from unshard import FullyShardedDataParallel as FSDP
from unshard.composable import fully_shard
from unshard.fsdp1.state import _get_fsdp_handles
from unshard.optim import ShardedGradScaler

pytestmark = pytest.mark.gpu
S = ShardingStrategy
half, single = torch.float16, torch.float32


def check(case: Case, tolerance: float = 1e-4, **options: object) -> FSDP:
    """Losses and parameters of four steps are those of the unsharded model on the same device."""
    rank, size = dist.get_rank(), dist.get_world_size()
    reference, built = case.build().cuda(), case.build()
    model = wrap(built, case.units(built), device_id=torch.cuda.current_device(), **options)
    stepper, other = adamw(model.parameters()), adamw(reference.parameters())
    for step in range(4):
        batch = [each.cuda() for each in case.batch(step)]
        expected = case.loss(reference, batch)
        expected.backward()
        loss = case.loss(model, models.shard(batch, rank, size))
        loss.backward()
        mean = loss.detach().float()
        dist.all_reduce(mean)
        torch.testing.assert_close(mean / size, expected.detach(), rtol=tolerance, atol=tolerance)
        for each in (stepper, other):
            each.step()
            each.zero_grad()
    for name, parameter in full_parameters(model).items():
        torch.testing.assert_close(
            parameter, reference.get_parameter(name).detach(), rtol=100 * tolerance, atol=10 * tolerance
        )
    return model


@pytest.mark.parametrize("originals", [False, True], ids=["flat", "originals"])
@pytest.mark.parametrize("strategy", [S.FULL_SHARD, S.SHARD_GRAD_OP, S.NO_SHARD], ids=lambda each: each.name)
@world(1, 2, 3, 4, backend="nccl")
def test_parity(strategy: ShardingStrategy, originals: bool) -> None:
    for case in (CASES[0], CASES[1], CASES[3]):
        check(case, sharding_strategy=strategy, use_orig_params=originals)


@pytest.mark.parametrize("originals", [False, True], ids=["flat", "originals"])
@world(1, backend="nccl")
def test_recurrent_weights_that_are_written(originals: bool) -> None:
    """On one rank the unsharded parameters are the shard, but cuDNN has them in a chunk of its own."""
    torch.manual_seed(0)
    reference = nn.LSTM(6, 6, 2).cuda()
    model = wrap(copy.deepcopy(reference), [], use_orig_params=originals)
    optimizers = [torch.optim.SGD(each.parameters(), 0.1) for each in (model, reference)]
    x = torch.randn(5, 3, 6, device="cuda")
    for number in range(4):
        results = []
        for each, optimizer in zip((model, reference), optimizers, strict=True):
            loss = each(x)[0].square().mean()
            if number % 2:
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            with torch.no_grad():
                evaluated = each(x)[0]
                for parameter in each.parameters():
                    parameter.mul_(0.9)
                results.append([loss.detach(), evaluated, each(x)[0]])
        for mine, theirs in zip(*results, strict=True):
            torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize("originals", [False, True], ids=["flat", "originals"])
@world(1, 2, 4, backend="nccl")
def test_averaged_weights_that_are_swapped_in(originals: bool) -> None:
    """The program keeps the memory of the others meanwhile. All ranks have the same batch."""
    torch.manual_seed(0)
    reference = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4)).cuda()
    model = copy.deepcopy(reference)
    model = wrap(model, list(model), use_orig_params=originals)
    x, losses = torch.randn(3, 8, device="cuda"), []
    dist.broadcast(x, 0)
    for each in (model, reference):
        optimizer = torch.optim.SGD(each.parameters(), 0.1)
        for _ in range(3):
            each(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            trained = {}
            for name, parameter in each.named_parameters():
                trained[name], parameter.data = parameter.data, parameter.data / 2
            with torch.no_grad():
                losses.append(each(x).square().mean())
            for name, parameter in each.named_parameters():
                parameter.data = trained[name]
            with torch.no_grad():
                losses.append(each(x).square().mean())
    half_way = len(losses) // 2
    torch.testing.assert_close(losses[:half_way], losses[half_way:])


@pytest.mark.parametrize("originals", [False, True], ids=["flat", "originals"])
@world(2, 3, 4, backend="nccl")
def test_offloaded(originals: bool) -> None:
    model = check(CASES[0], use_orig_params=originals, cpu_offload=CPUOffload(offload_params=True))
    assert all(each.device.type == "cpu" for each in model.parameters())
    assert model.compute_device.type == "cuda"


@world(2, backend="nccl")
def test_seed_000_dtypes_and_pure_half_precision() -> None:
    """D-40..D-43: made half before or after it was wrapped, with and without a policy."""
    for before, originals in ((True, False), (True, True), (False, False), (False, True)):
        for config in (MixedPrecision(), MixedPrecision(half, single), MixedPrecision(param_dtype=single)):
            module = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)).cuda()
            module = module.half() if before else module
            model = FSDP(module, use_orig_params=originals, mixed_precision=config)
            model = model if before else model.half()
            model(torch.randn(2, 8, device="cuda", dtype=half)).sum().backward()
            (handle,) = _get_fsdp_handles(model)
            assert handle.flat_param.dtype == handle.flat_param.grad.dtype == handle._orig_param_dtype == half
            assert handle._fwd_bwd_param_dtype == (config.param_dtype or half)
            assert handle._reduce_dtype == (config.reduce_dtype or config.param_dtype or half)


@pytest.mark.parametrize("offload", [False, True])
@world(2, 3, 4, backend="nccl")
def test_scaled_half_precision(offload: bool) -> None:
    """GS-55, GS-60: gradients on the host or the device; all ranks skip together."""
    torch.manual_seed(0)
    model = FSDP(
        nn.Linear(8, 8),
        device_id=torch.cuda.current_device(),
        cpu_offload=CPUOffload(offload),
        mixed_precision=MixedPrecision(half, half),
    )
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), ShardedGradScaler(init_scale=4.0)
    for step in range(4):
        scale = scaler.get_scale()
        scaler.scale(model(torch.randn(2, 8)).sum()).backward()
        if step % 2 and dist.get_rank() == 0:
            model.params[0].grad.fill_(float("inf"))
        before = copy.deepcopy(model.params[0].detach())
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        assert torch.equal(before, model.params[0].detach()) == bool(step % 2)
        assert scaler.get_scale() == (scale / 2 if step % 2 else scale)


@world(2, backend="nccl")
def test_seed_004_legacy_call() -> None:
    config = MixedPrecision(param_dtype=half)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).cuda()
    fully_shard(model[1], mixed_precision=config)
    fully_shard(model)
    output = model(torch.randn(2, 8, device="cuda"))
    assert output.dtype == half
    output.sum().backward()
    assert all(each.grad is None or each.grad.dtype == single for each in model.parameters())


@world(2, backend="nccl")
def test_f1_33_f1_34_devices_that_disagree() -> None:
    def split() -> nn.Sequential:
        return nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).cuda())

    with pytest.raises(RuntimeError, match=r"several devices .cpu, cuda:0."):
        FSDP(split())
    model = FSDP(split(), device_id=0)
    assert {parameter.device.type for parameter in model.parameters()} == {"cuda"}
    model(torch.ones(1, 2, device="cuda")).sum().backward()
    with pytest.raises(ValueError, match="device_id is cuda:1, but the module is on cuda:0"):
        FSDP(nn.Linear(2, 2).cuda(), device_id=torch.device("cuda", 1))
