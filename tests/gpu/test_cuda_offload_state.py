"""Optimizer state on the host, parameters on a CUDA device: the same bits, and less memory."""

from __future__ import annotations

import copy
import gc
from typing import Any
from unittest import mock

import pytest
import torch
from bed import world
from bed.flat_optimizers import by_decay, local, nan_buffer
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict
from torch.distributed.tensor import DTensor

from unshard import OffloadPolicy, OptimizerOffloadPolicy, fully_shard
from unshard.optim import GradScaler, clip_grad_norm_, flat
from unshard.optim import offload as stream

optim = torch.optim
WIDTH, DEPTH = 1024, 6
STATE = 2 * 4 * WIDTH * WIDTH * DEPTH
"""Bytes of both moments of all matrices."""


def build(policy: OffloadPolicy, kind: Any = optim.AdamW, **options: Any) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)) for _ in range(DEPTH))).cuda()
    for block in model:
        fully_shard(block, offload_policy=policy)
    fully_shard(model, offload_policy=policy)
    return model, flat(kind(by_decay(model), **{"lr": 1e-3, **options}))


def train(model: nn.Module, optimizer: Any, steps: range = range(6)) -> None:
    for step in steps:
        x = torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(step)).cuda()
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def assert_alike(mine: tuple[nn.Module, Any], theirs: tuple[nn.Module, Any]) -> None:
    for a, b in zip(mine[0].parameters(), theirs[0].parameters(), strict=True):
        assert torch.equal(local(a), local(b)) and local(a).is_cuda
        one, other = mine[1].state[a], theirs[1].state[b]
        assert one.keys() == other.keys() and one
        for key, value in one.items():
            assert torch.equal(local(value).cpu(), local(other[key]).cpu()), key


def assert_on_host(optimizer: Any) -> None:
    moments = [
        local(each) for entry in optimizer.state.values() for each in entry.values() if isinstance(each, DTensor)
    ]
    assert moments
    assert all(each.device.type == "cpu" and (each.is_pinned() or not each.numel()) for each in moments)


KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "momentum": (optim.SGD, {"momentum": 0.9, "nesterov": True}),
    "fused momentum": (optim.SGD, {"momentum": 0.9, "fused": True}),
    "adamw": (optim.AdamW, {"foreach": True}),
    "adamw, one by one": (optim.AdamW, {"foreach": False}),
    "fused adamw": (optim.AdamW, {"fused": True}),
    "capturable adamw": (optim.AdamW, {"capturable": True}),
    "adagrad": (optim.Adagrad, {"initial_accumulator_value": 0.1}),
    "asgd": (optim.ASGD, {}),
}


@pytest.mark.parametrize("batch", [0, stream.BATCH_BYTES])
@pytest.mark.parametrize("name", list(KINDS))
@world(1, 2, backend="nccl")
def test_bitwise_as_on_the_device(name: str, batch: int) -> None:
    kind, options = KINDS[name]
    here = build(OffloadPolicy(), kind, **options)
    train(*here)
    with mock.patch.object(stream, "BATCH_BYTES", batch), mock.patch.object(stream, "_device_memory", nan_buffer):
        there = build(OptimizerOffloadPolicy(), kind, **options)
        train(*there)
    assert_alike(there, here)
    assert_on_host(there[1])
    assert len(there[1].flat_groups().streamed) == 2 * DEPTH and not here[1].flat_groups().streamed


@pytest.mark.parametrize("pin", [True, False])
@world(1, backend="nccl")
def test_ordinary_memory_works_too(pin: bool) -> None:
    here, there = build(OffloadPolicy()), build(OptimizerOffloadPolicy(pin_memory=pin))
    for each in (here, there):
        train(*each)
    assert_alike(there, here)
    weight = there[1].state[there[0][0][0].weight]
    assert local(weight["exp_avg"]).is_pinned() == pin


def peak(policy: OffloadPolicy) -> tuple[int, int]:
    """Bytes that are there between steps and at most during one, beyond what was there before."""
    gc.collect()
    torch.cuda.synchronize()
    base = torch.cuda.memory_allocated()
    model, optimizer = build(policy, fused=True)
    train(model, optimizer, range(2))
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    rest = torch.cuda.memory_allocated() - base
    train(model, optimizer, range(2, 4))
    torch.cuda.synchronize()
    return rest, torch.cuda.max_memory_allocated() - base


@world(1, backend="nccl")
def test_memory() -> None:
    """Nothing of the state between steps; in a step that of three of the six layers, and the small ranges."""
    train(*build(OffloadPolicy()), range(1))  # what libraries allocate once
    with mock.patch.object(stream, "BATCH_BYTES", 0):
        here, there = peak(OffloadPolicy()), peak(OptimizerOffloadPolicy())
    slack = 2**20
    assert here[0] - there[0] >= STATE
    assert there[1] <= here[1] - STATE + 3 * STATE // DEPTH + slack
    assert there[1] < here[1] - STATE // 3


@world(1, backend="nccl")
def test_state_is_loaded_without_passing_through_the_device() -> None:
    """From an optimizer whose state is on the device, and from one whose state is on the host; and back."""
    first, second = build(OffloadPolicy()), build(OptimizerOffloadPolicy())
    train(*first, range(2))
    saved = copy.deepcopy(first[1].state_dict())
    second[0].load_state_dict(first[0].state_dict())
    second[1].load_state_dict(saved)
    moments = [each for entry in second[1].state.values() for each in entry.values() if isinstance(each, DTensor)]
    assert moments and not any(local(each).is_cuda for each in moments)
    for each in (first, second):
        train(*each, range(2, 4))
    assert_alike(second, first)
    assert_on_host(second[1])
    del saved, moments
    saved, third = copy.deepcopy(second[1].state_dict()), build(OptimizerOffloadPolicy())
    third[0].load_state_dict(second[0].state_dict())
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    third[1].load_state_dict(saved)
    assert torch.cuda.max_memory_allocated() - before < 2**20
    fourth = build(OffloadPolicy())
    fourth[0].load_state_dict(second[0].state_dict())
    fourth[1].load_state_dict(saved)
    del saved
    copied = copy.deepcopy(third)
    for each in (first, second, third, fourth, copied):
        train(*each, range(4, 6))
    for each in (second, third, fourth, copied):
        assert_alike(each, first)
    for each in (second, third, copied):
        assert_on_host(each[1])
    whole = StateDictOptions(full_state_dict=True)
    full = [get_optimizer_state_dict(*each, options=whole)["state"] for each in (second, first)]
    for name, entry in full[1].items():
        assert all(torch.equal(value.cpu(), full[0][name][key].cpu()) for key, value in entry.items())


@world(1, backend="nccl")
def test_adagrad_has_state_before_its_first_step() -> None:
    _, optimizer = build(OptimizerOffloadPolicy(), optim.Adagrad)
    assert not any(local(entry["sum"]).is_cuda for entry in optimizer.state.values())


@pytest.mark.parametrize("fused", [False, True])
@world(1, backend="nccl")
def test_scaling_and_clipping(fused: bool) -> None:
    results = []
    for policy in (OffloadPolicy(), OptimizerOffloadPolicy()):
        model, optimizer = build(policy, fused=fused)
        scaler = GradScaler("cuda", init_scale=4.0)
        for step in range(5):
            x = torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(step)).cuda()
            scaler.scale(model(x).square().mean()).backward()
            if step == 2:
                local(model[0][0].weight.grad).fill_(torch.inf)
            if not fused:
                scaler.unscale_(optimizer)
                clip_grad_norm_(model.parameters(), 0.1)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad(set_to_none=False)
        results.append((model, optimizer))
    assert_alike(results[1], results[0])
    assert results[1][1].state[model[0][0].weight]["step"] == 4
