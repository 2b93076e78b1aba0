"""Programs that write parameters of a wrapper whose units stay unsharded after forward: one rank, NO_SHARD."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from bed import world
from bed.wrapped import full_parameters, wrap
from torch import Tensor, nn

from unshard import FullyShardedDataParallel as FSDP
from unshard import MixedPrecision, ShardingStrategy

RATE = 0.125


def build() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 3))


def wrapped(originals: bool, **options: Any) -> FSDP:
    model = build()
    options = {"sharding_strategy": ShardingStrategy.NO_SHARD, **options}
    return wrap(model, list(model), use_orig_params=originals, **options)


def batch() -> Tensor:
    return torch.randn(4, 7, generator=torch.Generator().manual_seed(1))


def other_memory(parameter: Tensor) -> None:
    parameter.data = parameter.data / 2


@torch.no_grad()
def in_place(parameter: Tensor) -> None:
    parameter.div_(2)


def nothing(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    pass


def save(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model.state_dict()


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """All ranks have the same batch."""
    model(batch()).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("between", [nothing, save, train], ids=lambda each: each.__name__)
@pytest.mark.parametrize("write", [other_memory, in_place], ids=lambda each: each.__name__)
@pytest.mark.parametrize("originals", [False, True])
@world(1, 2)
def test_writes_after_an_evaluation(
    originals: bool, write: Callable[[Tensor], None], between: Callable[..., None]
) -> None:
    """The unsharded parameters are the shards: nothing is lost, and nobody is warned."""
    model, reference = wrapped(originals), build()
    results = []
    for each in (model, reference):
        optimizer = torch.optim.SGD(each.parameters(), RATE)
        with torch.no_grad():
            each(batch())
        for parameter in each.parameters():
            write(parameter)
        between(each, optimizer)
        with torch.no_grad():
            results.append(each(batch()))
    torch.testing.assert_close(results[0], results[1])
    for name, value in full_parameters(model).items():
        torch.testing.assert_close(value, reference.get_parameter(name).detach())


@pytest.mark.parametrize("originals", [False, True])
@world(1)
def test_writes_of_forward(originals: bool) -> None:
    """`max_norm` divides the rows of an embedding in forward."""
    torch.manual_seed(3)
    plain = nn.Embedding(8, 4, max_norm=0.5)
    expected = plain.weight.detach().renorm(2, 0, 0.5)
    model = wrap(plain, [], use_orig_params=originals)
    model(torch.arange(8)).sum().backward()
    torch.testing.assert_close(full_parameters(model)["weight"], expected)


@pytest.mark.parametrize("write", [other_memory, in_place], ids=lambda each: each.__name__)
@pytest.mark.parametrize("originals", [False, True])
@world(1, 2)
def test_writes_that_are_lost(originals: bool, write: Callable[[Tensor], None]) -> None:
    """What computes in another dtype is not the shard."""
    model = wrapped(originals, mixed_precision=MixedPrecision(param_dtype=torch.bfloat16))
    before = full_parameters(model)
    with torch.no_grad():
        model(batch())
    with pytest.warns(UserWarning, match=r"were written .* are lost"):
        for parameter in model.parameters():
            write(parameter)
        model.state_dict()
    for name, value in full_parameters(model).items():
        assert torch.equal(value, before[name])


@world(1)
def test_another_shape() -> None:
    """It has no place in the shard."""
    model = wrapped(originals=True)
    before = full_parameters(model)
    with torch.no_grad():
        model(batch())
    weight = next(model.parameters())
    weight.data = torch.zeros(2, 2)
    with pytest.warns(UserWarning, match=r"were written \(0\.weight\).* are lost"):
        model.state_dict()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(batch()).sum().backward()
    for name, value in full_parameters(model).items():
        assert torch.equal(value, before[name])
