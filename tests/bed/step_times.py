"""Models and clocks for tests of `unshard.tools.timeline`, which plant times that it must find."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from bed import loopback_stream
from bed.loopback_stream import CpuStream
from bed.stack import WIDTH, Stack, loss_of
from torch import nn

from unshard.tools import step_recorder
from unshard.tools.step_times import Timeline, UnitTimes

DELAY = 0.05
MS = 1e3
LONG = pytest.approx(DELAY * MS)
NOTHING = pytest.approx(0.0, abs=1e-3)
BLOCKS = ["blocks.0", "blocks.1", "blocks.2"]


class Clock:
    """Stands for the module `time`: only sleep takes time, and each reading of the clock takes `tick` seconds."""

    def __init__(self) -> None:
        self.now, self.tick = 1000.0, 0.0

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def monotonic(self) -> float:
        return self.now

    def perf_counter(self) -> float:
        self.now += self.tick
        return self.now


sleep = time.sleep


def virtual_clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Replace the clock of the timeline, of the loop-back job and of `SlowLinear`."""
    clock = Clock()
    monkeypatch.setattr(step_recorder, "time", clock)
    monkeypatch.setattr(loopback_stream, "time", clock)
    monkeypatch.setattr(sys.modules[__name__], "sleep", clock.sleep)
    return clock


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.01)


def step(model: nn.Module, optimizer: torch.optim.Optimizer | None, micro_batches: int = 1) -> None:
    for _ in range(micro_batches):
        loss_of(model).backward()
    if optimizer is not None:
        optimizer.step()
        optimizer.zero_grad()


def row(times: Timeline, name: str) -> UnitTimes:
    return next(each for each in times.units if each.name == name)


def figures(times: Timeline, what: str) -> dict[str, float]:
    return {each.name: getattr(each, what) for each in times.units}


def of_kind(op: str) -> str:
    return "all-gather" if "gather" in op else "reduce"


@contextmanager
def slow_collective(monkeypatch: pytest.MonkeyPatch, numbers: dict[str, list[int]]) -> Iterator[None]:
    """Let the collectives with these numbers among those of their kind take `DELAY`, and others no time."""
    counts = {"all-gather": 0, "reduce": 0}
    issue = CpuStream.issue

    def slowed(self: CpuStream, transfer: Any) -> None:
        kind = of_kind(transfer.op)
        self._delay = DELAY if counts[kind] in numbers.get(kind, ()) else 0.0
        counts[kind] += 1
        issue(self, transfer)

    with monkeypatch.context() as patch:
        patch.setattr(CpuStream, "issue", slowed)
        yield


class SlowLinear(nn.Linear):
    """Takes `DELAY` in forward and twice as long in backward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        sleep(DELAY)
        output = super().forward(x)
        if output.requires_grad:
            output.register_hook(lambda gradient: sleep(2 * DELAY))
        return output


def slowed_stack(slow: int) -> Stack:
    model = Stack()
    model.blocks[slow].first.__class__ = SlowLinear
    return model


class Towers(nn.Module):
    """The second tower's inputs need no gradient, so nothing tells when its backward ends."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = SlowLinear(WIDTH, WIDTH)
        self.first, self.second = nn.Linear(WIDTH, 2), nn.Linear(WIDTH, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.first(self.stem(x)) + self.second(x)
