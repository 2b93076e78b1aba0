"""Policies given to the wrapper itself, with PyTorch's own wrapper as the peer."""

from __future__ import annotations

import functools
import warnings
from typing import Any

import pytest
import torch
import torch.distributed.fsdp as theirs
import torch.distributed.fsdp.wrap as their_policies
from bed import world
from torch import nn

import unshard
from unshard.dropin.torch_fsdp import wrap as policies


class Block(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.norm = nn.BatchNorm1d(width)
        self.seen: list[torch.dtype] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.append(x.dtype)
        return torch.relu(self.norm(self.linear(x)))


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Sequential(Block(16), Block(16)), nn.Linear(16, 4))


def chosen(of: Any) -> dict[str, Any]:
    strategy = {id(policies): unshard, id(their_policies): theirs}[id(of)].ShardingStrategy
    return {
        "classes": of.ModuleWrapPolicy({Block}),
        "custom": of.CustomPolicy(
            lambda each: {"sharding_strategy": strategy.SHARD_GRAD_OP} if isinstance(each, Block) else False
        ),
        "size": functools.partial(of.size_based_auto_wrap_policy, min_num_params=200),
        "always": of.always_wrap_policy,
    }


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("name", ["classes", "custom", "size", "always"])
@world(2)
def test_the_same_units_as_the_peers(name: str, mixed: bool) -> None:
    """Contract F1-17, F1-106, F1-109 to F1-112: modules, arguments, precisions; and losses alike."""

    def wrapped(api: Any, policy: Any) -> tuple[dict[str, Any], list[float]]:
        precision = api.MixedPrecision(param_dtype=torch.bfloat16) if mixed else None
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            made = api.FullyShardedDataParallel(
                model(), auto_wrap_policy=policy, mixed_precision=precision, device_id=torch.device("cpu")
            )
        assert any("BatchNorm1d" in str(each.message) for each in told) == mixed
        optimizer = torch.optim.SGD(made.parameters(), lr=0.05)
        losses = []
        for step in range(3):
            x = torch.randn(4, 8, generator=torch.Generator().manual_seed(step))
            loss = made(x).float().square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        units = {
            name: (each.mixed_precision.param_dtype, each.sharding_strategy.name)
            for name, each in made.named_modules()
            if isinstance(each, api.FullyShardedDataParallel)
        }
        blocks = [each for each in made.modules() if isinstance(each, Block)]
        assert {dtype for block in blocks for dtype in block.seen} == {torch.bfloat16 if mixed else torch.float32}
        return units, losses

    units, losses = wrapped(unshard, chosen(policies)[name])
    expected, their_losses = wrapped(theirs, chosen(their_policies)[name])
    assert units == expected and len(units) > 2
    torch.testing.assert_close(losses, their_losses, rtol=2e-2 if mixed else 1e-5, atol=0)
