"""Blocks side by side, run in the order that each rank chooses."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from bed.stack import WIDTH, Block, batch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

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


def short_group(seconds: float = 5) -> dist.ProcessGroup:
    """All ranks, in a process group that waits for few seconds."""
    dist.barrier()  # the time that ranks take to start does not count
    return dist.new_group(backend="gloo", timeout=timedelta(seconds=seconds))


def after_three_steps() -> nn.Module:
    """A model whose collectives wait for few seconds from now on: on a busy machine a step has taken longer."""
    group = short_group(seconds=600)
    model = sharded(mesh=DeviceMesh.from_group(group, "cpu"))
    for _ in range(3):
        step(model, [0, 1, 2])
    dist.barrier()
    set_timeout = getattr(dist, "set_timeout", dist.distributed_c10d._set_pg_timeout)  # public since torch 2.15
    set_timeout(timedelta(seconds=5), group)
    return model
