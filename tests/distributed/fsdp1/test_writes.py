"""Programs that write parameters of a wrapper, or give them other memory, between forwards and in them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
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


@pytest.mark.parametrize("originals", [False, True])
@world(1, 2)
def test_writes_between_forward_and_backward(originals: bool) -> None:
    """They are kept, and nobody is warned."""
    model = wrapped(originals)
    before = full_parameters(model)
    loss = model(batch()).sum()
    for parameter in model.parameters():
        in_place(parameter)
    model.zero_grad()
    del loss
    model.state_dict()
    for name, value in full_parameters(model).items():
        assert torch.equal(value, before[name] / 2)


@pytest.mark.parametrize("originals", [False, True])
@world(1, 2)
def test_writes_in_another_dtype_between_forward_and_backward(originals: bool) -> None:
    model = wrapped(originals, mixed_precision=MixedPrecision(param_dtype=torch.bfloat16))
    with torch.no_grad():
        model(batch())
    for parameter in model.parameters():
        in_place(parameter)  # the sharded ones: no graph needs the others
    before = full_parameters(model)
    assert torch.equal(before["0.weight"], build()[0].weight / 2)
    model(batch())
    for parameter in model.parameters():
        in_place(parameter)
    with pytest.raises(RuntimeError, match=r"the program wrote .* summon_full_params"):
        model.state_dict()
    for name, value in full_parameters(model).items():
        assert torch.equal(value, before[name])


class Normalized(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        self.weight.data = nn.functional.normalize(self.weight.data)
        return super().forward(x)


@pytest.mark.parametrize("strategy", [ShardingStrategy.FULL_SHARD, ShardingStrategy.NO_SHARD])
@pytest.mark.parametrize("originals", [False, True])
@world(1, 2)
def test_other_memory_in_forward(originals: bool, strategy: ShardingStrategy) -> None:
    """Its module computes with that from then on, and no optimizer's step reaches it."""
    model = wrap(Normalized(4, 4), [], use_orig_params=originals, sharding_strategy=strategy)
    with pytest.warns(UserWarning, match=r"were written \(weight\).* are lost.*forward itself writes"):
        model(torch.ones(2, 4)).sum().backward()


@world(1)
def test_an_optimizer_that_is_made_after_an_evaluation() -> None:
    model, reference = wrapped(originals=True), build()
    for each in (model, reference):
        with torch.no_grad():
            each(batch())
        train(each, torch.optim.SGD(each.parameters(), RATE))
    for name, value in full_parameters(model).items():
        torch.testing.assert_close(value, reference.get_parameter(name).detach())


# -- memory that a program keeps -----------------------------------------------------------------------------


def averaged(model: nn.Module) -> list[float]:
    """Losses of training, and of evaluations with averaged weights, which are swapped in and out."""
    optimizer = torch.optim.AdamW(model.parameters(), RATE)
    averages = {name: parameter.data.clone() for name, parameter in model.named_parameters()}
    losses = []
    for _ in range(3):
        train(model, optimizer)
        for name, parameter in model.named_parameters():
            averages[name].mul_(0.5).add_(parameter.data, alpha=0.5)
        trained = {}
        for name, parameter in model.named_parameters():
            trained[name], parameter.data = parameter.data, averages[name]
        for _ in range(2):
            with torch.no_grad():
                losses.append(model(batch()).square().mean().item())
        for name, parameter in model.named_parameters():
            parameter.data = trained[name]
        losses.append(model(batch()).square().mean().item())
        optimizer.zero_grad()
    return losses


@pytest.mark.parametrize("strategy", [ShardingStrategy.FULL_SHARD, ShardingStrategy.NO_SHARD])
@pytest.mark.parametrize("originals", [False, True])
@world(1, 2, 3, slow=(3,))
def test_averaged_weights_that_are_swapped_in(originals: bool, strategy: ShardingStrategy) -> None:
    """The program keeps the memory of the others meanwhile, and no unit writes there."""
    assert averaged(wrapped(originals, sharding_strategy=strategy)) == pytest.approx(averaged(build()), rel=1e-5)


@pytest.mark.parametrize("strategy", [ShardingStrategy.FULL_SHARD, ShardingStrategy.NO_SHARD])
@world(1, 2)
def test_parameters_that_are_exchanged(strategy: ShardingStrategy) -> None:
    """Of one unit."""
    torch.manual_seed(3)
    pair = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    first, second = (each.weight.detach().clone() for each in pair)
    model = wrap(pair, [], use_orig_params=True, sharding_strategy=strategy)
    one, two = model.parameters()
    if one.numel() == two.numel():  # on each of two ranks there is one of them
        one.data, two.data = two.data, one.data
        first, second = second, first
    found = full_parameters(model)
    assert torch.equal(found["0.weight"], first) and torch.equal(found["1.weight"], second)


def swapped(model: nn.Module) -> None:
    """An evaluation with other weights, which are swapped in and out."""
    before = {}
    for name, parameter in model.named_parameters():
        before[name], parameter.data = parameter.data, parameter.data * 0.5
    with torch.no_grad():
        model(batch())
    for name, parameter in model.named_parameters():
        parameter.data = before[name]
    with torch.no_grad():
        model(batch())


def accumulated(model: Any) -> None:
    with nullcontext() if isinstance(model, nn.Sequential) else model.no_sync():
        model(batch()).square().mean().backward()
    with torch.no_grad():
        model(batch())
    swapped(model)
    model(batch() + 1).square().mean().backward()


def two_graphs(model: nn.Module) -> None:
    first, second = model(batch()).square().mean(), model(batch() + 1).square().mean()
    first.backward()
    swapped(model)
    second.backward()


@pytest.mark.parametrize("program", [accumulated, two_graphs], ids=lambda each: each.__name__)
@pytest.mark.parametrize("strategy", [ShardingStrategy.FULL_SHARD, ShardingStrategy.NO_SHARD])
@pytest.mark.parametrize("originals", [False, True])
@world(1, 2)
def test_gradients_around_a_swap(originals: bool, strategy: ShardingStrategy, program: Callable[[Any], None]) -> None:
    """Sums that wait for their reduction, and graphs that wait for their backward, stay."""
    model, reference = wrapped(originals, sharding_strategy=strategy), build()
    for each in (model, reference):
        optimizer = torch.optim.SGD(each.parameters(), RATE)
        program(each)
        optimizer.step()
    for name, value in full_parameters(model).items():
        torch.testing.assert_close(value, reference.get_parameter(name).detach())
