"""`torch.compile` of optimizer steps, and of other functions over the parameters and gradients of a unit."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch._dynamo
from bed import world
from torch import nn
from torch.optim import AdamW, Optimizer

from unshard import fully_shard
from unshard.optim import flat

Make = Callable[[Iterable[nn.Parameter]], Optimizer]

# dynamo's own, about guards, profilers and modules that torch deprecates
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")


def sgd(parameters: Any) -> Optimizer:
    return torch.optim.SGD(parameters, 0.1, momentum=0.9, weight_decay=0.01)


def adamw(parameters: Any) -> Optimizer:
    return AdamW(parameters, 0.01)


def flat_adamw(parameters: Any) -> Optimizer:
    return flat(AdamW(parameters, 0.01))


def small() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3, bias=False))


def batch(seed: int = 0) -> torch.Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(seed))


def train(model: nn.Module, make: Make, backend: str | None) -> list[torch.Tensor]:
    """Losses of four steps; without a backend the step is not compiled."""
    torch._dynamo.reset()
    optimizer = make(model.parameters())
    step = optimizer.step if backend is None else torch.compile(optimizer.step, backend=backend)
    losses = []
    for number in range(4):
        losses.append(model(batch(number)).square().mean())
        losses[-1].backward()
        step()
        optimizer.zero_grad()
    return losses


@pytest.mark.parametrize(
    ("make", "backend"),
    [
        (sgd, "eager"),
        pytest.param(adamw, "aot_eager", marks=pytest.mark.slow),
        pytest.param(flat_adamw, "aot_eager", marks=pytest.mark.slow),
    ],
)
@world(2)
def test_compiled_steps(make: Make, backend: str) -> None:
    """The unit stays unsharded, so the next forward has to know of every step, also of a compiled one."""
    expected = train(small(), adamw if make is flat_adamw else make, None)
    model = fully_shard(small(), reshard_after_forward=False)
    model.set_reshard_after_backward(False)
    torch.testing.assert_close(train(model, make, backend), expected)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler on the CPU")
@world(2)
def test_a_step_compiled_with_inductor(tmp_path: Path) -> None:
    """The second run loads the graphs that the first one left on disk, where ranks with other shapes keep theirs."""
    expected = train(small(), adamw, None)
    with mock.patch.dict(os.environ, TORCHINDUCTOR_CACHE_DIR=str(tmp_path)):
        for _ in range(2):
            torch.testing.assert_close(train(fully_shard(small()), adamw, "inductor"), expected)


def scale_parameters(parameters: list[Any], others: list[Any]) -> Any:
    return [parameter * 2 for parameter in parameters]


def norms_of_gradients(parameters: list[Any], others: list[Any]) -> Any:
    return [torch.linalg.vector_norm(parameter.grad) for parameter in parameters]


def move_towards(parameters: list[Any], others: list[Any]) -> Any:
    torch._foreach_lerp_(others, parameters, 0.25)
    return others


def clip(parameters: list[Any], others: list[Any]) -> Any:
    norm = torch.nn.utils.clip_grad_norm_(parameters, 0.1)
    return [norm, *(parameter.grad for parameter in parameters)]


@pytest.mark.parametrize(
    "function", [scale_parameters, norms_of_gradients, move_towards, clip], ids=lambda each: each.__name__
)
@world(2)
def test_compiled_functions(function: Callable[..., Any]) -> None:
    """Of parameters that have gradients, all of one unit: those of a unit share memory."""
    results = []
    for call in (function, torch.compile(function, backend="eager")):
        torch._dynamo.reset()
        model = fully_shard(small())
        model(batch()).square().mean().backward()
        parameters = [*model.parameters()]
        others = [torch.zeros_like(each) for each in parameters]
        with torch.no_grad():
            results.append([each.full_tensor() for each in call(parameters, others)])
    torch.testing.assert_close(results[1], results[0])
