"""The engine on a CUDA device: ranks of NCCL and of Gloo that share it, one rank of a loop-back job."""

from __future__ import annotations

import copy
import gc

import pytest
import torch
import torch.distributed as dist
from bed import simulated, world
from bed.cuda import check
from bed.models import CASES, Case, case
from bed.packing import path
from bed.parity import assert_close, each_unit
from torch import nn

from unshard import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard


@pytest.mark.parametrize("way", ["rows", "packed"])
@pytest.mark.parametrize("each", CASES, ids=str)
@world(1, 2, 3, 4, backend="nccl")
def test_parity_on_nccl(each: Case, way: str) -> None:
    with path(way):
        check(each)


@pytest.mark.parametrize("each", CASES, ids=str)
@world(2, 3)
def test_parity_of_ranks_that_share_the_device(each: Case) -> None:
    """Gloo with CUDA tensors cannot gather groups: every unit is packed."""
    check(each)


@pytest.mark.parametrize("reshard", [None, True, False])
@pytest.mark.parametrize("way", ["rows", "packed"])
@pytest.mark.parametrize("each", CASES, ids=str)
def test_parity_of_the_grouped_path(each: Case, way: str, reshard: bool | None) -> None:
    with path(way):
        shard = each_unit(each, fully_shard, reshard_after_forward=reshard)
        record, _ = simulated.run(each, shard, world=2, device="cuda", delay=1e-4)
        assert_close(record, simulated.reference(each, 2, "cuda"))


@pytest.mark.parametrize("failures", [False, True], ids=["parity", "exceptions"])
@pytest.mark.parametrize("way", ["rows", "packed"])
def test_ordering_on_a_stream_of_its_own(way: str, failures: bool) -> None:
    """With each wait in turn left out, the loop-back job on its own stream goes wrong."""
    transformer = case("transformer")
    fail = simulated.failing_steps(transformer, lambda model: model.blocks[1].mlp, "cuda") if failures else None
    shard = each_unit(transformer, fully_shard)
    with path(way):
        expected = simulated.reference(transformer, 2, "cuda", steps=2)
        options = {"world": 2, "device": "cuda", "steps": 2, "fail": fail, "delay": 1e-4}
        record, collectives = simulated.run(transformer, shard, **options)
        assert_close(record, expected)
        for number in range(collectives):
            with pytest.raises((AssertionError, RuntimeError, ValueError)):
                wrong, _ = simulated.run(transformer, shard, **options, skip_wait={number})
                assert_close(wrong, expected)


@pytest.mark.parametrize("pin", [True, False])
@world(1, 2, 3, 4, backend="nccl")
def test_offload(pin: bool) -> None:
    """Contract OFF-02, OFF-03, OFF-07: shards and gradients rest on the host; the device computes."""
    model = check(case("transformer"), steps=4, offload_policy=CPUOffloadPolicy(pin_memory=pin))
    for parameter in model.parameters():
        assert parameter.to_local().device.type == "cpu" and parameter.device_mesh.device_type == "cuda"
        assert parameter.to_local().is_pinned() == pin or not parameter.to_local().numel()


def build_wide() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(512, 512), nn.LayerNorm(512)) for _ in range(6)))


@pytest.mark.parametrize("param", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("reduce", [torch.float32, None, torch.bfloat16])
@world(1, backend="nccl")
def test_mixed_precision(param: torch.dtype, reduce: torch.dtype | None) -> None:
    """Equal to a model that performs the same casts without sharding, bit by bit."""
    model = build_wide().cuda()
    reference = copy.deepcopy(model).to(param)
    for block in model:
        fully_shard(block, mp_policy=MixedPrecisionPolicy(param_dtype=param, reduce_dtype=reduce))
    fully_shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=param, reduce_dtype=reduce))
    x = torch.randn(64, 512, device="cuda")
    out, expected = model(x), reference(x.to(param))
    assert out.dtype == param and torch.equal(out, expected)
    out.float().square().mean().backward()
    expected.float().square().mean().backward()
    for mine, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        assert mine.grad.dtype == torch.float32
        assert torch.equal(mine.grad.full_tensor(), theirs.grad.to(reduce or param).float())


@pytest.mark.parametrize(("way", "gathered"), [("rows", 2), ("packed", 3)])
@world(1, backend="nccl")
def test_memory_of_one_rank_of_eight(way: str, gathered: int) -> None:
    """At rest only shards; after `zero_grad` no gradients; nothing when the model is gone.

    `gathered`: how many units of the six have memory in forward besides the activations. That are the current one and
    the next one, and where units are packed, the current one twice while it is copied out.
    """
    dist.destroy_process_group()
    from bed import loopback

    build_wide().cuda()(torch.randn(8, 512, device="cuda")).sum().backward()  # the workspace of matrix products
    torch.cuda.synchronize()
    gc.collect()
    base = torch.cuda.memory_allocated()
    with loopback.job(8, device="cuda"), path(way):
        model = build_wide().cuda()
        full = sum(parameter.numel() * 4 for parameter in model.parameters())
        for block in model:
            fully_shard(block)
        fully_shard(model)
        shard = full // 8
        slack = 64 * 1024
        torch.cuda.reset_peak_memory_stats()
        assert torch.cuda.memory_allocated() - base <= shard + slack
        x = torch.randn(8, 512, device="cuda")
        for _ in range(3):
            torch.cuda.reset_peak_memory_stats()
            loss = model(x).square().mean()
            assert torch.cuda.max_memory_allocated() - base <= shard + gathered * full // 6 + 40 * x.nbytes + slack
            loss.backward()
            del loss
            assert torch.cuda.memory_allocated() - base <= 2 * shard + slack + x.nbytes
            model.zero_grad()
            model(x.clone())
            assert torch.cuda.memory_allocated() - base <= shard + slack + 4 * x.nbytes
        del model, block, x
        gc.collect()
        assert torch.cuda.memory_allocated() - base <= 1024
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
