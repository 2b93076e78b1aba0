"""Captured steps, with recordings that the CPU simulates, train as the same steps without capture."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from bed import world
from bed.captured_steps import accumulated, adamw, assert_equal, clipped, plain, scaled, sgd, train
from bed.simulated_recorder import simulated_recorder
from bed.stack import Stack, assert_at_rest, mesh, sharded
from torch import nn

from unshard import MixedPrecisionPolicy
from unshard.optim import GradScaler, flat

STEPS, WARMUP = 9, 3


def flat_adamw(model: nn.Module) -> torch.optim.Optimizer:
    return flat(adamw(model))


CASES = {
    "adamw": (plain, adamw),
    "sgd": (plain, sgd),
    "flat": (plain, flat_adamw),
    "clip": (clipped, adamw),
    "scaler": (scaled, adamw),
    "accumulated": (accumulated("nothing"), adamw),
    "accumulated without synchronisation": (accumulated("synchronise"), adamw),
    "flat, accumulated": (accumulated("nothing"), flat_adamw),
}


def assert_bitwise(*args: Any, **options: Any) -> list[str]:
    """Returns what happened with capture."""
    expected = train(False, sharded(Stack(), **options), *args, steps=STEPS, device="cpu")
    with simulated_recorder() as happened:
        model = sharded(Stack(), **options)
        assert_equal(expected, train(True, model, *args, steps=STEPS, device="cpu"))
    assert_at_rest(model)
    return happened


@pytest.mark.parametrize("name", CASES)
@world(1, 2, 3, 4, slow=(1, 3))
def test_bitwise(name: str) -> None:
    happened = assert_bitwise(*CASES[name])
    recordings = 3 if "accumulated" in name else 1
    assert happened.count("record") == recordings
    assert happened.count("replay") == recordings * (STEPS - WARMUP)


@pytest.mark.parametrize("make_optimizer", [adamw, sgd, flat_adamw])
@world(1, 2, slow=(1,))
def test_first_steps_that_are_skipped(make_optimizer: Any) -> None:
    """They are not counted: a recording would make the optimizer's state in every replay."""

    def make_scaler(**_: Any) -> GradScaler:
        return GradScaler(init_scale=2.0**18)

    policy = MixedPrecisionPolicy(torch.float16, torch.float32)
    happened = assert_bitwise(scaled, make_optimizer, make_scaler, mp_policy=policy)
    assert happened.count("record") == 1
    assert happened.index("record") > WARMUP


@pytest.mark.parametrize("kind", ["synchronise", "all-reduce"])
@world(4)
def test_bitwise_over_replicas(kind: str) -> None:
    assert_bitwise(accumulated(kind), adamw, mesh=mesh(2))


@pytest.mark.parametrize("accumulate", [False, True])
@world(2)
def test_bitwise_in_mixed_precision(accumulate: bool) -> None:
    make_step = accumulated("synchronise") if accumulate else plain
    assert_bitwise(make_step, adamw, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
