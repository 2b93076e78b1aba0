"""`sync_module_states`: ranks that were initialised differently start from the weights of the first one."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from bed import world
from torch import nn

from unshard import fully_shard, sync_module_states
from unshard.errors import ArgumentError, StateError


def model_of(seed: int, width: int = 5) -> nn.Sequential:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, width), nn.BatchNorm1d(width), nn.Linear(width, 3, dtype=torch.float64))
    model[1].running_mean.fill_(seed)
    return model


@world(1, 2, 3)
def test_all_ranks_have_the_values_of_the_first() -> None:
    model, first = model_of(dist.get_rank()), model_of(0)
    kept = list(model.parameters())
    sync_module_states(model)
    assert all(mine is before for mine, before in zip(model.parameters(), kept, strict=True))
    for name, value in first.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], value, rtol=0, atol=0)
    fully_shard(model)
    for (_, mine), (name, value) in zip(model.named_parameters(), first.named_parameters(), strict=True):
        torch.testing.assert_close(mine.full_tensor(), value, rtol=0, atol=0, msg=name)


@world(4)
def test_a_group_of_some_ranks_has_the_values_of_its_own_first() -> None:
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    mine = dist.get_rank() // 2
    model = model_of(dist.get_rank())
    sync_module_states(model, pairs[mine])
    torch.testing.assert_close(model[0].weight, model_of(2 * mine)[0].weight, rtol=0, atol=0)


@world(2)
def test_what_cannot_be_broadcast_is_refused_on_all_ranks() -> None:
    with pytest.raises(ArgumentError, match=r"disagree .* 0.weight with shape"):
        sync_module_states(model_of(0, 5 + dist.get_rank()))
    with pytest.raises(StateError, match=r"before fully_shard"):
        sync_module_states(fully_shard(model_of(0)))
    with pytest.raises(StateError, match=r"meta device"):
        sync_module_states(nn.Linear(2, 2, device="meta"))
