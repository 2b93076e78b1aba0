"""Every wait for a collective of NCCL is needed: without it, results are wrong."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from bed import models, world
from bed.cuda import waits_left_out
from bed.models import case
from bed.packing import path
from bed.parity import each_unit

from unshard import fully_shard

STEPS = 2  # the first one learns the order of units; in the second, units are prefetched


@pytest.mark.parametrize("way", ["rows", "packed"])
@world(2, 3, 4, backend="nccl")
def test_every_wait_counts(way: str) -> None:
    """With each wait of the last step in turn left out, some rank's loss or gradients are wrong.

    But for one: nothing reuses the input of the last reduce-scatter but one, and the wait for the last one, which
    follows it in the queue of NCCL, is enough for its output.
    """
    with path(way):
        expected, issued = steps_without(set())
        right, _ = steps_without(set())
        assert not differ_on_any_rank(right, expected)
        assert set(issued) == {"all-gather", "reduce-scatter"} and len(issued) % STEPS == 0
        harmless = []
        for number in range(len(issued) // STEPS * (STEPS - 1), len(issued)):
            wrong, again = steps_without({number})
            assert again == issued
            if not differ_on_any_rank(wrong, expected):
                harmless.append(number)
        assert issued[-2:] == ["reduce-scatter"] * 2
        assert set(harmless) <= {len(issued) - 2}, [(number, issued[number]) for number in harmless]


def steps_without(waits: set[int]) -> tuple[list[torch.Tensor], list[str]]:
    """Losses and gradients of all steps, and the collectives."""
    transformer, rank, size = case("transformer"), dist.get_rank(), dist.get_world_size()
    found = []
    with waits_left_out(waits) as issued:
        model = transformer.build().cuda()
        each_unit(transformer, fully_shard, reshard_after_forward=True)(model)
        for step in range(STEPS):
            inputs, targets = models.shard(transformer.batch(step), rank, size)
            loss = transformer.loss(model, (inputs.cuda(), targets.cuda()))
            loss.backward()
            found.append(loss.detach())
            found += [parameter.grad.to_local().clone() for parameter in model.parameters()]
            model.zero_grad()
        torch.cuda.synchronize()
    return found, issued


def differ_on_any_rank(mine: list[torch.Tensor], theirs: list[torch.Tensor]) -> bool:
    same = [torch.allclose(a, b, rtol=1e-3, atol=1e-6) for a, b in zip(mine, theirs, strict=True)]
    differs = torch.tensor(float(not all(same)), device="cuda")
    dist.all_reduce(differs)
    return bool(differs)
