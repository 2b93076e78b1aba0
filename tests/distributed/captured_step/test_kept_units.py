"""Captured steps whose units stay unsharded after forward or backward; recordings are simulated on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from bed import world
from bed.captured_steps import adamw, assert_equal, locals_of, plain
from bed.simulated_recorder import simulated_recorder
from bed.stack import Stack, assert_at_rest, batch, sharded
from bed.wrapped import wrap
from torch import nn

from unshard import ShardingStrategy, capture


def wrapped(use_orig_params: bool, strategy: ShardingStrategy) -> nn.Module:
    stack = Stack()
    return wrap(stack, list(stack.blocks), use_orig_params=use_orig_params, sharding_strategy=strategy)


BUILDS = {
    "fully_shard": partial(sharded, reshard_after_forward=False),
    "flat": partial(wrapped, False, ShardingStrategy.SHARD_GRAD_OP),
    "originals": partial(wrapped, True, ShardingStrategy.SHARD_GRAD_OP),
    "not sharded": partial(wrapped, True, ShardingStrategy.NO_SHARD),
}


@pytest.mark.parametrize("build", BUILDS.values(), ids=BUILDS)
@world(1, 2, 3, slow=(3,))
def test_evaluation(build: Callable[[], Any]) -> None:
    """Replays and other forwards do not see what the other ones have kept; weights that change reach both."""
    results = []
    for captured in (False, True):
        model, losses = build(), []

        @torch.no_grad()
        def evaluate(x: torch.Tensor, model: nn.Module = model) -> torch.Tensor:
            return model(x).sum()

        with simulated_recorder() as happened:
            step = capture(evaluate, model, warmup=2) if captured else evaluate
            for number in range(8):
                losses.append(step(batch(number)).clone())
                if number % 3 == 2:
                    losses.append(evaluate(batch(number)))
                    model.load_state_dict({name: value / 2 for name, value in model.state_dict().items()})
        if captured:
            assert happened == ["run", "run", "record", *["replay"] * 6]
        results.append(losses)
    assert_equal(*results)


@world(1, 2, 3, slow=(3,))
def test_training_that_keeps_units_after_backward() -> None:
    results = []
    for captured in (False, True):
        model: Any = sharded()
        model.set_reshard_after_backward(False)
        optimizer = adamw(model)
        step: Any = plain(model, optimizer)
        with simulated_recorder() as happened:
            if captured:
                step = capture(step, model, optimizer, warmup=2)
            losses = [step(batch(number)).clone() for number in range(6)]
        if captured:
            assert happened == ["run", "run", "record", *["replay"] * 4]
            assert_at_rest(model)
        model.reshard()
        for block in model.blocks:
            block.reshard()
        results.append(losses + locals_of(model))
    assert_equal(*results)
