"""Which optimizers step flat shards, and what the error for others says."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from bed import loopback
from bed.tensor_subclass import SplitTensor
from torch import nn

from unshard import fully_shard
from unshard.errors import ArgumentError
from unshard.optim import flat
from unshard.torch_private import local_of

optim = torch.optim


@pytest.fixture
def model() -> Iterator[nn.Module]:
    with loopback.job(world=2):
        yield fully_shard(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))


class Signs(optim.Optimizer):
    """Not torch's. Counts its steps in the group and in numbers of the state that are no tensors."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"rate": 0.5, "steps": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> str:
        for group in self.param_groups:
            group["steps"] += 1
            for each in group["params"]:
                if each.grad is not None:
                    state = self.state[each]
                    state["count"] = state.get("count", 0) + 1
                    each.sub_(each.grad.sign(), alpha=group["rate"])
        return "done"


class Tamed(optim.AdamW):
    """Steps in its own way, by a method that torch's step calls."""

    def _init_group(self, *arguments: Any) -> bool:
        return super()._init_group(*arguments)


class Renamed(optim.AdamW):
    """Has defaults and a `zero_grad` of its own, and torch's steps."""

    zeroed = 0

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.5)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.zeroed += 1
        super().zero_grad(set_to_none)


class Mixed(Renamed):
    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


def test_classes_that_are_refused(model: nn.Module) -> None:
    weights = [each for each in model.parameters() if each.ndim == 2]
    for name, reason in (
        ("LBFGS", "inner products.* if every parameter is sharded evenly"),
        ("Adafactor", "rows and columns.* do not support it without flat either"),
        ("Muon", "each matrix.* Use it without flat"),
    ):
        optimizer = getattr(optim, name)(weights)
        for vouched in (False, True):
            with pytest.raises(ArgumentError, match=f"{name} cannot step flat shards: .*{reason}"):
                flat(optimizer, elementwise=vouched)
        assert type(optimizer) is getattr(optim, name)
    with pytest.raises(ArgumentError, match="SparseAdam cannot step flat shards: it takes sparse gradients"):
        flat(optim.SparseAdam(weights))
    for kind in (Signs, Tamed, Mixed):
        with pytest.raises(ArgumentError, match=f"{kind.__name__} is not known .*pass elementwise=True"):
            flat(kind(weights))
    with pytest.raises(ArgumentError, match="autograd does not see the step"):
        flat(optim.Adam(weights, differentiable=True))
    with pytest.raises(ArgumentError, match=r"takes a torch\.optim\.Optimizer, got a list"):
        flat(weights)  # type: ignore[type-var]


def test_too_early_and_too_late(model: nn.Module) -> None:
    with pytest.raises(ArgumentError, match=r"No parameter of this SGD is sharded\. Either fully_shard was not called"):
        flat(optim.SGD([nn.Parameter(torch.zeros(3))]))
    optimizer = optim.SGD(model.parameters())
    optimizer.step = lambda: None  # type: ignore[method-assign, assignment]
    with pytest.raises(ArgumentError, match="The step of this SGD object was replaced"):
        flat(optimizer)


def test_an_optimizer_that_was_built_before_fully_shard(model: nn.Module) -> None:
    late = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    early = optim.Adam(late.parameters())
    fully_shard(late[0])
    between = optim.Adam(late.parameters())
    fully_shard(late)
    with pytest.raises(ArgumentError, match=r"Adam was built before .* weight, bias, 1.weight, 1.bias\."):
        flat(early)
    with pytest.warns(UserWarning, match=r"which has replaced 1\.weight, 1\.bias\..*never update these") as seen:
        assert flat(between) is between
    assert [each.filename for each in seen] == [__file__]
    flat(optim.Adam([*late.parameters(), nn.Parameter(torch.zeros(3))]))  # one that is nobody's: not a word


@pytest.mark.parametrize("above", [False, True])
def test_subclasses_that_step_like_their_base(model: nn.Module, above: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch wraps the step of a class, or that of the class above, when it makes the first object of either."""
    step = optim.Adam.step
    monkeypatch.setattr(optim.Adam, "step", step.__wrapped__ if hasattr(step, "hooked") else step)
    if "step" in vars(optim.AdamW):
        monkeypatch.delattr(optim.AdamW, "step")
    fresh = type("Fresh", (Renamed,), {})
    (optim.AdamW if above else fresh)(model.parameters())
    assert ("step" in vars(fresh), "step" in vars(optim.AdamW)) == (not above, above)
    results = []
    for kind, wrap in ((fresh, flat), (optim.AdamW, lambda each: each)):
        torch.manual_seed(0)
        each = fully_shard(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
        optimizer = wrap(kind(each.parameters()))
        optimizer.param_groups[0]["lr"] = 0.5
        for _ in range(2):
            each(torch.ones(2, 4)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        results.append((optimizer, [local_of(parameter) for parameter in each.parameters()]))
    assert results[0][0].zeroed == 2 and len(results[0][0].flat_groups().spans) == 1
    assert all(map(torch.equal, results[0][1], results[1][1]))


def test_a_class_that_a_user_vouches_for(model: nn.Module) -> None:
    """Its own groups, its numbers that are no tensors, its arguments and what it returns."""
    before = [each.to_local().clone() for each in model.parameters()]
    optimizer = flat(Signs(model.parameters()), elementwise=True)
    for _ in range(2):
        model(torch.ones(1, 4)).sum().backward()
        signs = [each.grad.to_local().sign() for each in model.parameters()]
        assert optimizer.step() == "done"
        optimizer.zero_grad()
        before = [each - 0.5 * sign for each, sign in zip(before, signs, strict=True)]
    assert all(torch.equal(a.to_local(), b) for a, b in zip(model.parameters(), before, strict=True))
    assert optimizer.param_groups[0]["steps"] == 2
    assert {id(each) for each in optimizer.state} == {id(each) for each in model.parameters()}
    assert list(optimizer.state.values()) == [{"count": 2}] * 4
    assert optimizer.step(lambda: "loss") == "loss"
    assert flat(Tamed(model.parameters()), elementwise=True).__class__.__name__ == "Tamed"


@pytest.mark.parametrize("foreach", [False, True])
def test_shards_that_bring_their_own_gather_protocol(model: nn.Module, foreach: bool) -> None:
    """They lie outside the master shard, and are stepped by themselves, as they are."""
    models = []
    for wrap in (flat, lambda optimizer: optimizer):
        torch.manual_seed(0)
        each = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        each[0].weight = nn.Parameter(SplitTensor(each[0].weight.detach().clone()))
        fully_shard(each)
        optimizer = wrap(optim.AdamW(each.parameters(), lr=0.1, foreach=foreach))
        before = local_of(each[0].weight).inner.clone()
        for _ in range(2):
            each(torch.ones(2, 4)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert type(local_of(each[0].weight)) is SplitTensor and not torch.equal(local_of(each[0].weight).inner, before)
        models.append(each)
    assert torch.equal(local_of(models[0][0].weight).inner, local_of(models[1][0].weight).inner)
    for mine, theirs in zip(models[0][1].parameters(), models[1][1].parameters(), strict=True):
        assert torch.equal(mine.to_local(), theirs.to_local())


def test_a_step_that_raises_leaves_the_groups(model: nn.Module) -> None:
    optimizer = flat(optim.AdamW(model.parameters(), lr=torch.tensor(0.1), foreach=False))
    model(torch.ones(1, 4)).sum().backward()
    groups, state = optimizer.param_groups, optimizer.state
    groups[0]["betas"] = None
    with pytest.raises(TypeError):
        optimizer.step()
    assert optimizer.param_groups is groups and optimizer.state is state
    assert list(map(id, groups[0]["params"])) == list(map(id, model.parameters()))
    groups[0]["betas"] = (0.9, 0.99)
    old = model[0].weight.to_local().clone()
    optimizer.step()
    assert not torch.equal(model[0].weight.to_local(), old)


def test_the_old_name_of_step_in_backward_is_deprecated(model: nn.Module) -> None:
    def made(**options: bool) -> optim.Optimizer:
        return flat(optim.SGD(model.parameters(), 0.1), **options)

    for ahead in (False, True):
        with pytest.warns(Warning) as caught:
            optimizer = made(ahead=ahead)
        assert [each.category for each in caught] == [FutureWarning] + [UserWarning] * ahead  # no unit is offloaded
        assert "ahead of flat is deprecated. Use step_in_backward" in str(caught[0].message)
        assert caught[0].filename == __file__
        assert ("unshard_step_in_backward" in vars(optimizer)) is ahead
        with pytest.raises(ArgumentError, match="both step_in_backward and ahead"):
            made(step_in_backward=True, ahead=ahead)


def test_flat_is_a_function_and_no_module() -> None:
    assert callable(flat) and "unshard.optim.flat" not in sys.modules
    assert importlib.util.find_spec("unshard.optim.flat") is None
