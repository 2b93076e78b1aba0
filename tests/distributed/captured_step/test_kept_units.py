"""Captured steps whose units stay unsharded after forward or backward; recordings are simulated on the CPU."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from bed import world
from bed.captured_steps import adamw, assert_equal, locals_of, plain
from bed.simulated_recorder import simulated_recorder
from bed.stack import WIDTH, Stack, assert_at_rest, batch, sharded
from bed.wrapped import wrap
from torch import nn

from unshard import ShardingStrategy, capture, fully_shard


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


@pytest.mark.parametrize("before", ["a forward with a graph", "a forward of one unit"])
@world(1, 2)
def test_a_forward_before(before: str) -> None:
    """Its backward never comes."""
    model: Any = sharded(reshard_after_forward=False)

    @torch.no_grad()
    def evaluate(x: torch.Tensor) -> torch.Tensor:
        return model(x).sum()

    model(batch())
    if before == "a forward of one unit":
        with torch.no_grad():
            model(batch())
            model.blocks[1](batch())
    with simulated_recorder() as happened:
        captured = capture(evaluate, model, warmup=1)
        found = [captured(batch()).clone() for _ in range(3)]
        assert happened == ["run", "record", "replay", "replay"]
    assert all(torch.equal(each, evaluate(batch())) for each in found)


class Result:
    """Not a container that torch knows."""

    def __init__(self, *parts: torch.Tensor):
        self.parts = parts

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.parts[index]


@pytest.mark.parametrize("in_object", [False, True])
@world(1, 2)
def test_a_step_that_returns_an_unsharded_parameter(in_object: bool) -> None:
    """It stays, and the step is not recorded."""
    model: Any = sharded(reshard_after_forward=False)

    @torch.no_grad()
    def evaluate(x: torch.Tensor) -> Any:
        result = model(x).sum(), model.head.weight[0]
        return Result(*result) if in_object else result

    with simulated_recorder() as happened:
        captured = capture(evaluate, model, warmup=1)
        with pytest.warns(UserWarning, match=r"leaves unit '.*' unsharded.*result.*\(return a clone"):
            row = captured(batch())[1]
        assert torch.equal(row, evaluate(batch())[1])
        captured(batch())
        assert happened == ["run", "run"]


@pytest.mark.parametrize("options", [{}, {"reshard_after_forward": False}], ids=["", "kept"])
@world(1, 2)
def test_an_evaluation_after_a_forward_with_a_graph(options: dict[str, Any]) -> None:
    """The evaluation leaves the model at rest, and the backward of the forward comes outside of the step."""
    results = []
    for captured in (False, True):
        model: Any = sharded(**options)

        def forward(x: torch.Tensor, model: nn.Module = model) -> torch.Tensor:
            loss = model(x).square().mean()
            with torch.no_grad():
                model(x)
            return loss

        gradients = []
        with simulated_recorder() as happened, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            step: Any = capture(forward, model, warmup=1) if captured else forward
            for number in range(3):
                step(batch(number)).backward()
                gradients += [each.grad.to_local().clone() for each in model.parameters()]
                model.zero_grad()
        assert happened == ["run"] * 3 * captured
        results.append(gradients)
    assert_equal(*results)


class Aside(nn.Module):
    """Its output comes to the program in a list, so that no hook is called before its backward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.outputs = nn.Linear(WIDTH, 1), []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.outputs.append(self.linear(x).mean() * self.linear.weight.sum())
        return x


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stack, self.aside = Stack(), Aside()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.aside.outputs.clear()
        self.aside(x)
        return self.stack(x).sum()


@world(1, 2)
def test_a_backward_outside_of_the_step() -> None:
    """Units that are kept for it stay."""
    results = []
    for captured in (False, True):
        model: Any = Net()
        for each in (model.stack, model.aside, model):
            fully_shard(each, reshard_after_forward=False)
        optimizer = torch.optim.SGD(model.parameters(), 0.05)
        with simulated_recorder() as happened, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            step: Any = capture(lambda x, model=model: model(x), model, warmup=1) if captured else model
            losses = []
            for number in range(3):
                loss = step(batch(number)) + model.aside.outputs[0]
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.detach())
        assert happened == ["run"] * 3 * captured
        results.append(losses + locals_of(model))
    assert_equal(*results)
