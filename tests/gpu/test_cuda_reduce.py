"""Reductions in a lane of their own: what has to wait for what, and whose memory the reduce buffer is."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import pytest
import torch
from bed import loopback
from torch import nn

from unshard import MixedPrecisionPolicy, fully_shard
from unshard.engine import lane, reduce
from unshard.engine.lane import Mark
from unshard.engine.reduce import Reduction

SLEEP = 20_000_000  # cycles, about 10 ms


class Forgotten(Mark):
    """As if nobody had put it anywhere, nor waited for it."""

    def put(self) -> Mark:
        return self

    def wait(self) -> None:
        pass


@contextmanager
def forgetting(name: str) -> Iterator[None]:
    start = Reduction._start_aside

    def forgetful(self: Reduction, *arguments: object) -> None:
        setattr(self, name, Forgotten(torch.device("cuda", 0)))
        start(self, *arguments)  # type: ignore[arg-type]

    with mock.patch.object(Reduction, "_start_aside", forgetful):
        yield


def gradients() -> list[torch.Tensor]:
    """Of equal layers, so that the next one's gradient is written where the last one's was."""
    torch.manual_seed(0)
    with loopback.job(2, device="cuda", delay=2e-3):
        model = nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(6))).cuda()
        for layer in (*model, model):
            # Divided when they are reduced, so that something is done to them before the end of backward.
            fully_shard(layer).set_force_sum_reduction_for_comms(True)
        for _ in range(2):
            model.zero_grad()
            output = model(torch.randn(64, 256, device="cuda"))
            output.register_hook(lambda gradient: torch.cuda._sleep(SLEEP))  # the device is far behind the host
            output.square().mean().backward()
        return [parameter.grad.to_local().clone().cpu() for parameter in model.parameters()]


@pytest.mark.parametrize("name", ["_computed", "_packed", "_scattered"])
def test_what_waits(name: str) -> None:
    """Gradients are packed when they are there, freed when they are packed, and used when they are reduced."""
    with mock.patch.object(reduce, "reduce_lane", lambda device: None):
        expected = gradients()
    assert all(map(torch.equal, gradients(), expected))
    with forgetting(name):
        assert not all(map(torch.equal, gradients(), expected))


def test_another_device_is_current() -> None:
    """Streams that are asked for by device do as well; tests/engine/test_lane.py knows which ones those are."""
    expected = gradients()
    with mock.patch.object(lane, "current_device_index", lambda: 7):
        assert all(map(torch.equal, gradients(), expected))
        with forgetting("_packed"):
            assert not all(map(torch.equal, gradients(), expected))


def peak(layers: int, width: int) -> int:
    """Bytes in use at most during a backward, beside what was in use before it."""
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers))).cuda()
    for layer in model:
        fully_shard(layer, mp_policy=policy)
    fully_shard(model)
    for _ in range(2):
        loss = model(torch.ones(1, width, device="cuda")).square().mean()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        loss.backward()
        model.zero_grad()
    return torch.cuda.max_memory_allocated() - before


def test_memory_of_a_reduction() -> None:
    """The next unit's backward does not come on top of the reduce buffer."""
    layers, width = 6, 2048
    whole = width * width  # elements
    with loopback.job(8, device="cuda"):
        aside = peak(layers, width)
        gc.collect()
        with mock.patch.object(reduce, "reduce_lane", lambda device: None):
            beside = peak(layers, width)
    shards, slack = layers * whole * 4 // 8, 2**20
    # Gradients of one layer in bf16 and in fp32, and the next layer.
    assert aside <= (2 + 4 + 2) * whole + shards + slack
    assert beside >= aside + whole - slack
