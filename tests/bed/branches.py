"""Blocks side by side, run in the order that each rank chooses."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from bed.stack import WIDTH, Block, batch
from torch import nn

from unshard import fully_shard
from unshard.comm.order import check as order

SLICE = 0.5


class Branches(nn.Module):
    """Blocks side by side, run in the order and number that the caller says."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.stem = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, which: list[int]) -> dict[int, torch.Tensor]:
        x = self.stem(x)
        return {number: self.blocks[number](x) for number in which}


def sharded(model: nn.Module | None = None, **options: Any) -> nn.Module:
    model = Branches() if model is None else model
    for block in model.blocks:
        fully_shard(block, **options)
    return fully_shard(model, **options)


def step(model: nn.Module, which: list[int], used: list[int] | None = None, seed: int = 0) -> None:
    outputs = model(batch(seed), which)
    sum(outputs[number].square().mean() for number in used or which).backward()


@contextmanager
def quick(**constants: Any) -> Iterator[None]:
    with mock.patch.multiple(order, POLL_SECONDS=SLICE, **constants):
        yield
