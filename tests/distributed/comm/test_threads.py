"""Ranks that are threads of one process: nothing of one rank reaches another but by collectives."""

from __future__ import annotations

import copy
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from bed import models, wrapped
from bed.threads import Group, run_threads
from torch import nn

from unshard import MixedPrecision, MixedPrecisionPolicy, fully_shard
from unshard.optim import GradScaler, ShardedGradScaler, clip_grad_norm_

# Torch 2.11 crashes when several threads make DTensor parameters: its fake tensor mode is shared by them.
pytestmark = pytest.mark.skipif(torch.__version__ < "2.12", reason="torch 2.11 cannot make DTensors in several threads")

RANKS, STEPS = 4, 4
CASE = models.case("uneven")
DOUBLE = {"param_dtype": torch.float64, "reduce_dtype": torch.float64}

Clip = Callable[[nn.Module], torch.Tensor]


def train(model: nn.Module, rank: int, size: int, scaler: Any, clip: Clip) -> list[float]:
    """Returns the norms of gradients, without that of the third step: there the last rank has infinite gradients."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    norms = []
    for step in range(STEPS):
        loss = CASE.loss(model, models.shard(CASE.batch(step), rank, size))
        scaler.scale(loss * torch.inf if step == 2 and rank == size - 1 else loss).backward()
        scaler.unscale_(optimizer)
        norm = clip(model)
        if step != 2:
            norms.append(norm.item())
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    assert scaler.get_scale() == 512.0
    return norms


@pytest.fixture(scope="module")
def reference() -> tuple[list[float], list[torch.Tensor]]:
    """Unsharded, in one process."""
    model = CASE.build()
    norms = train(
        model, 0, 1, torch.amp.GradScaler("cpu", 1024.0), lambda m: nn.utils.clip_grad_norm_(m.parameters(), 0.1)
    )
    return norms, [each.detach() for each in model.parameters()]


def check(
    results: list[tuple[list[float], list[torch.Tensor]]], reference: tuple[list[float], list[torch.Tensor]]
) -> None:
    for norms, parameters in results:
        torch.testing.assert_close(norms, reference[0], rtol=1e-4, atol=0)
        torch.testing.assert_close(parameters, reference[1], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("policy", [MixedPrecisionPolicy(), MixedPrecisionPolicy(**DOUBLE)], ids=["plain", "mixed"])
def test_fully_shard_equals_the_unsharded_model(policy: MixedPrecisionPolicy, reference: Any) -> None:
    whole = CASE.build()

    def body(rank: int) -> tuple[list[float], list[torch.Tensor]]:
        model = copy.deepcopy(whole)
        for unit in CASE.units(model):
            fully_shard(unit, mp_policy=policy)
        norms = train(model, rank, RANKS, GradScaler("cpu", 1024.0), lambda m: clip_grad_norm_(m.parameters(), 0.1))
        return norms, [each.full_tensor().detach() for each in model.parameters()]

    check(run_threads(RANKS, body), reference)


@pytest.mark.parametrize("originals", [False, True], ids=["flat", "originals"])
def test_the_wrapper_equals_the_unsharded_model(originals: bool, reference: Any) -> None:
    whole = CASE.build()

    def body(rank: int) -> tuple[list[float], list[torch.Tensor]]:
        model = copy.deepcopy(whole)
        precision = MixedPrecision(**DOUBLE) if originals else None
        model = wrapped.wrap(model, CASE.units(model), use_orig_params=originals, mixed_precision=precision)
        norms = train(model, rank, RANKS, ShardedGradScaler("cpu", 1024.0), lambda m: m.clip_grad_norm_(0.1))
        return norms, list(wrapped.full_parameters(model).values())

    check(run_threads(RANKS, body), reference)


def test_the_step_of_one_rank_makes_nothing_stale_on_another() -> None:
    """Rank 0 steps before the others evaluate: these must not all-gather, as rank 0 did not."""
    whole, stepped, calls, all_gather = CASE.build(), threading.Event(), Counter(), Group.allgather

    def counted(group: Group, *args: Any) -> Any:
        calls[group.rank()] += 1
        return all_gather(group, *args)

    def body(rank: int) -> list[int]:
        model = copy.deepcopy(whole)
        fully_shard(model).set_reshard_after_backward(False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        inputs, targets = models.shard(CASE.batch(0), rank, RANKS)
        gathers = []
        for _ in range(2):
            CASE.loss(model, (inputs, targets)).backward()
            if rank:
                assert stepped.wait(30)
            before = calls[rank]
            with torch.no_grad():
                model(inputs)
            gathers.append(calls[rank] - before)
            optimizer.step()
            stepped.set()
        return gathers

    with mock.patch.object(Group, "allgather", counted):
        assert run_threads(RANKS, body) == [[0, 0]] * RANKS
    assert calls[0] > 2
