"""`unshard.tools.timeline` with NCCL: exposed times, and the same numbers and streams as without it."""

from __future__ import annotations

import os
import time
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from bed import loopback, world
from bed.captured_steps import adamw, plain
from bed.stack import Stack, batch, sharded
from torch import nn

import unshard
from unshard.tools import timeline
from unshard.tools.step_times import Timeline

MS = 1e3


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(batch(dist.get_rank()).cuda()).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def trained(timed: bool, steps: int = 4) -> tuple[Stack, Timeline | None]:
    model = sharded(Stack().cuda())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    if not timed:
        for _ in range(steps):
            step(model, optimizer)
        return model, None
    with timeline(model) as times:
        for _ in range(steps):
            step(model, optimizer)
    return model, times


@world(2, 4, backend="nccl")
@pytest.mark.parametrize("queues", ["8", "2"])
def test_times_and_the_same_numbers(queues: str) -> None:
    """With and without a stream of its own that waits for all-gathers."""
    reference, _ = trained(timed=False)
    began = time.perf_counter()
    with mock.patch.dict(os.environ, {"CUDA_DEVICE_MAX_CONNECTIONS": queues}):
        timed, times = trained(timed=True)
    wall = (time.perf_counter() - began) * MS
    assert times is not None
    for (name, mine), (_, theirs) in zip(timed.named_parameters(), reference.named_parameters(), strict=True):
        assert torch.equal(mine.to_local(), theirs.to_local()), name
    assert (times.steps, times.warm_up_steps, times.device) == (2, 2, "cuda")
    assert [each.rank for each in times.ranks] == list(range(dist.get_world_size()))
    assert 0 < sum(each.step_ms for each in times.each_step) < wall
    assert 0 < times.exposed_ms < times.step_ms
    for each in times.units:
        assert min(each.forward_ms, each.backward_ms, each.all_gather_ms, each.reduce_ms) > 0, each
        # Ranks share a device: the event at the end of a wait is late if another rank's kernel runs.
        assert each.all_gather_exposed_ms < each.all_gather_ms + 0.5 and each.reduce_exposed_ms < each.reduce_ms + 0.5


@world(2, backend="nccl")
def test_the_slowest_rank() -> None:
    """A rank whose host is late: the other one waits on its device."""
    model = sharded(Stack().cuda())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    # Until ranks can predict their collectives, their hosts wait for each other, which counts as computation. Models
    # of earlier tests make that longer, because they have used the same process group.
    for _ in range(30):
        step(model, optimizer)
    with timeline(model) as times:
        for _ in range(3):
            if dist.get_rank() == 1:
                torch.cuda.synchronize()
                time.sleep(0.05)
            step(model, optimizer)
    assert times.slowest == 1 and "Rank 1 is the slowest" in str(times), str(times)
    assert times.ranks[0].exposed_ms > 40, str(times)


def test_planted_delays_of_the_device() -> None:
    """Every collective takes 5 ms on a stream of its own, and computation takes much less."""
    with loopback.job(2, device="cuda", delay=0.005):
        model = sharded(Stack().cuda())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        step(model, optimizer)
        step(model, optimizer)
        with timeline(model) as times:
            for _ in range(3):
                step(model, optimizer)
    assert 0.7 * 11 * 5 < times.exposed_ms < 1.3 * 11 * 5, times
    assert sum(each.forward_ms + each.backward_ms for each in times.units) < 0.3 * times.step_ms


@world(2, backend="nccl")
def test_captured_steps_are_left_out() -> None:
    """The timeline does not keep a step from being captured, and adds no events to its graph."""
    model = sharded(Stack().cuda())
    optimizer = adamw(model)
    captured = unshard.capture(plain(model, optimizer), model, optimizer, warmup=2)
    x = batch(dist.get_rank()).cuda()
    with timeline(model) as times:
        for _ in range(6):
            captured(x)
    assert captured.recordings == 1 and times.captured and times.steps >= 1
    with timeline(model) as times:
        captured(x)
    assert times.steps == 0 and "Captured steps are not measured" in str(times)
