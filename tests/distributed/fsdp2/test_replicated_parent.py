"""Sharded units inside a module that torch replicates: with its composable `replicate`, and with DDP."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from bed import world
from torch import nn
from torch.distributed._composable.replicate import replicate
from torch.nn.parallel import DistributedDataParallel

import unshard


class Parent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 6), nn.Linear(6, 4)
        self.units = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))
        self.by_hand = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        handles: list[Any] = [unit.unshard(async_op=True) for unit in self.units if self.by_hand]
        x = self.first(x).relu()
        for handle in handles:
            handle.wait()
        for unit in self.units:
            x = unit(x).relu()
        return self.last(x)


@pytest.mark.parametrize("kind", ["replicate", "ddp"])
@world(2)
def test_sharded_units_in_a_replicated_parent(kind: str) -> None:
    """Both parts train as the unsharded model does, also if the parent unshards the units by hand."""
    for by_hand in (False, True):
        torch.manual_seed(0)
        reference = Parent()
        model = copy.deepcopy(reference)
        model.by_hand = by_hand
        for unit in model.units:
            unshard.fully_shard(unit, reshard_after_forward=by_hand)
        replicated: nn.Module = model
        if kind == "replicate":
            replicate(model)
        else:
            ignored = [name for name, _ in model.named_parameters() if name.startswith("units")]
            DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ignored)
            replicated = DistributedDataParallel(model)
        optimizers = [torch.optim.SGD(each.parameters(), lr=0.1, momentum=0.9) for each in (model, reference)]
        for step in range(3):
            batches = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(step))
            replicated(batches[dist.get_rank()]).sum().backward()
            for batch in batches:
                (reference(batch).sum() / 2).backward()
            for mine, theirs in zip(model.parameters(), reference.parameters(), strict=True):
                gradient: Any = mine.grad
                full = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
                torch.testing.assert_close(full, theirs.grad)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    if kind == "replicate":
        with pytest.raises(RuntimeError, match="already managed by"):
            replicate(model.units[0])
