"""Models for the memory plan, and the peak of a real step of them, from the profiler's record of all allocations."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile, record_function

from benchmarks.measure import _MARK, _replayed
from benchmarks.traces import events_of
from unshard.tools.memory_job import simulated_job
from unshard.tools.program import Program

VOCABULARY = 1000


def tokens(rank: int, step: int) -> Tensor:
    return torch.randint(VOCABULARY, (8, 64))


def images(rank: int, step: int) -> Tensor:
    return torch.randn(8, 3, 48, 48)


class Lstm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.lstm = nn.Embedding(VOCABULARY, 96), nn.LSTM(96, 160, 2, batch_first=True)
        self.head = nn.Linear(160, VOCABULARY)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(self.table(x))[0])


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(32 if number else 3, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU())
            for number in range(4)
        )
        self.head = nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((2, 3)))


class Experts(nn.Module):
    """Each token goes to two of eight experts. The number of tokens of an expert depends on values."""

    def __init__(self, width: int = 96, count: int = 8) -> None:
        super().__init__()
        self.router = nn.Linear(width, count)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)) for _ in range(count)
        )

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, -2)
        weights, chosen = self.router(flat).softmax(-1).topk(2)
        out = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            token, place = torch.where(chosen == number)
            out.index_add_(0, token, expert(flat[token]) * weights[token, place, None])
        return x + out.view_as(x)


class MixtureOfExperts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(VOCABULARY, 96), nn.Linear(96, VOCABULARY)
        self.blocks = nn.ModuleList(Experts() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.table(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class TiedTransformer(nn.Module):
    """An encoder whose head is its embedding, with attention and dropout of torch."""

    def __init__(self, dropout: float = 0.1) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(VOCABULARY, 64), nn.Linear(64, VOCABULARY, bias=False)
        self.head.weight = self.table.weight
        layer = nn.TransformerEncoderLayer
        self.blocks = nn.ModuleList(layer(64, 4, 256, dropout, batch_first=True) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.table(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Stack(nn.Module):
    """`blocks` square layers between a table and a head of its own."""

    def __init__(self, blocks: int = 4, width: int = 256, vocabulary: int = VOCABULARY) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(vocabulary, width), nn.Linear(width, vocabulary, bias=False)
        self.blocks = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(blocks))

    def forward(self, x: Tensor) -> Tensor:
        x = self.table(x)
        for block in self.blocks:
            x = block(x).relu()
        return self.head(x)


def measured_peak(program: Program, world: int) -> int:
    """Return the largest number of bytes that are allocated in the second step on the CPU, with real kernels."""
    with (
        simulated_job(world, "cpu", {}),
        profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as record,
    ):
        model = program.sharded(program.model())
        optimizer: Any = program.optimizer(model)
        for step in range(2):
            with record_function(_MARK) if step == 1 else contextlib.nullcontext():
                program.loss(model, program.batch_of(0, step)).backward()
                optimizer.step()
                optimizer.zero_grad()
    return _replayed(events_of(record))["peak"]
