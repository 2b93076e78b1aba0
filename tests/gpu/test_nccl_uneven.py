"""`unshard.step` on ranks of NCCL that share a CUDA device, beside one process with all samples."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from bed import world
from bed.recorders import Collectives
from bed.stack import Stack, assert_at_rest, batch, sharded
from bed.uneven import FEATURES, Setup, check_parity

import unshard

SETUPS = [
    *[Setup(units=units, known=known) for units in ("keep", "follow") for known in (False, True)],
    *[Setup(front, units) for front in ("wrapper", "originals", "legacy") for units in ("keep", "follow")],
    *FEATURES,
    Setup(offload=True, flat_optimizer=True, early=True),
    Setup(units="follow", offload=True, flat_optimizer=True, early=True),
    Setup("wrapper", "follow", offload=True),
    Setup(units=None),
]


@pytest.mark.parametrize("setup", SETUPS, ids=str)
@world(2, 3, 4, backend="nccl")
def test_parity(setup: Setup) -> None:
    check_parity(setup, torch.device("cuda", 0))


GRIDS = [Setup(units=units, **{grid: 2}) for units in ("keep", "follow") for grid in ("replicas", "parallel")]


@pytest.mark.parametrize("setup", GRIDS, ids=str)
@world(4, backend="nccl")
def test_parity_on_two_dimensions(setup: Setup) -> None:
    check_parity(setup, torch.device("cuda", 0))


@world(2, 4, backend="nccl")
def test_kept_units_issue_no_collective_inside_the_block() -> None:
    model = sharded(Stack().cuda())
    for _ in range(3):
        with unshard.step(model, units="keep") as step, Collectives() as inside:
            for seed in range(dist.get_rank()):
                step.backward(model(batch(seed).cuda()).square().mean())
        assert not inside.calls
    with unshard.inference(model), Collectives() as inside:
        for seed in range(dist.get_rank()):
            model(batch(seed).cuda())
        assert not inside.calls
    assert_at_rest(model)


@pytest.mark.parametrize("way", ["keep", "follow"])
@world(2, 4, backend="nccl")
def test_memory_of_each_way(way: str) -> None:
    """As docs/uneven_steps.md says."""
    torch.manual_seed(0)
    width, layers = 1024, 12
    model = torch.nn.Sequential(*[torch.nn.Linear(width, width, bias=False) for _ in range(layers)]).cuda()
    for layer in model:
        unshard.fully_shard(layer)
    unshard.fully_shard(model)
    one, ranks = 4 * width * width, dist.get_world_size()
    x = torch.randn(8, width, device="cuda")
    for number in range(3):
        if number == 2:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
        with unshard.step(model, units=way) as step:
            for _ in range(2):
                step.backward(model(x).square().mean())
    peak = (torch.cuda.max_memory_allocated() - before) / one
    print(f"{way} at {ranks} ranks: {peak:.2f} layers of {layers}")
    # keep: parameters and sums of all units, and the input of one reduction. follow: parameters of two units, the
    # gradient of one, the sharded sums, and the output of one reduction.
    expected = 2 * layers + 1 if way == "keep" else 3 + (layers + 1) / ranks
    assert 0.95 * expected <= peak <= 1.05 * expected
