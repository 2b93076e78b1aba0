"""Changes between two calls of a step that is not sharded: which of them drop its recording."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import pytest
import torch
from bed.simulated_recorder import simulated_recorder
from torch import nn
from torch.nn.modules.module import register_module_forward_hook
from torch.optim.optimizer import register_optimizer_step_post_hook

from unshard import capture
from unshard.captured_step.obstacles import HostEffects
from unshard.captured_step.signature import Arguments

X = torch.ones(3, 4)


class Training:
    """A model, a parameter that no module has, an optimizer of both, and what a program keeps there of its own."""

    def __init__(self, **options: Any):
        self.model = nn.Sequential(OrderedDict(a=nn.Linear(4, 4), b=nn.Tanh()))
        self.model.register_buffer("count", torch.zeros(1))
        self.model.a.named = nn.ParameterDict({"one": torch.ones(1), "two": torch.ones(1)})
        self.loose = nn.Parameter(torch.ones(4))
        self.optimizer = torch.optim.AdamW([*self.model.parameters(), self.loose], **{"fused": True} | options)
        self.optimizer.state["own"] = OrderedDict(tensor=torch.ones(2), odd=Odd())  # type: ignore[index]
        self.step = capture(self.once, self.model, self.optimizer, warmup=2)

    def once(self, x: torch.Tensor) -> torch.Tensor:
        loss = (self.model(x) * self.loose).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()


class Odd:
    """As an array of numpy: it cannot be compared by `==`."""

    def __eq__(self, other: object) -> bool:
        raise ValueError


def after(change: Callable[[Training], Any], **options: Any) -> list[str]:
    """Run a step after a change; return what happened in that call."""
    with simulated_recorder() as happened:
        training = Training(**options)
        for _ in range(4):
            training.step(X)
        assert happened[-1] == "replay"
        happened.clear()
        change(training)
        training.step(X)
        return list(happened)


def reorder_modules(training: Training) -> None:
    moved = training.model.a
    del training.model.a
    training.model.add_module("a", moved)


def reorder_parameters(training: Training) -> None:
    training.model.a.named["one"] = training.model.a.named.pop("one")


def replace_buffer(training: Training) -> None:
    training.model.count = training.model.count.clone()


def replace_state(training: Training) -> None:
    entry = training.optimizer.state[training.loose]
    entry["exp_avg"] = entry["exp_avg"].clone()


def replace_own_state(training: Training) -> None:
    own: Any = training.optimizer.state
    own["own"]["tensor"] = own["own"]["tensor"].clone()


def replace_odd_state(training: Training) -> None:
    own: Any = training.optimizer.state
    own["own"]["odd"] = Odd()


def move_loose(training: Training) -> None:
    training.loose.data = training.loose.data.clone()


def hook_loose(training: Training) -> None:
    training.loose.register_hook(lambda gradient: 2 * gradient)


@pytest.mark.parametrize(
    "change",
    [
        *(reorder_modules, reorder_parameters, replace_buffer, replace_state, replace_own_state, replace_odd_state),
        *(move_loose, hook_loose),
    ],
    ids=lambda each: each.__name__,
)
def test_dropped(change: Callable[[Training], Any]) -> None:
    assert after(change) == ["drop", "run"]


@pytest.mark.parametrize("register", [register_module_forward_hook, register_optimizer_step_post_hook])
def test_hooks_of_all_modules_and_optimizers(register: Callable[[Any], Any]) -> None:
    handles = []
    try:
        assert after(lambda training: handles.append(register(lambda *unused: None))) == ["drop", "run"]
    finally:
        for each in handles:
            each.remove()


def freeze_loose(training: Training) -> None:
    training.loose.requires_grad_(False)


def test_other_signatures() -> None:
    assert after(freeze_loose) == ["run"]


def read_state(training: Training) -> None:
    """Torch makes an entry for what is asked for."""
    assert training.optimizer.state[nn.Parameter(torch.ones(1))] == {}


def replace_entry(training: Training) -> None:
    state = training.optimizer.state
    state[training.loose] = dict(state[training.loose])


def set_rate(training: Training) -> None:
    training.optimizer.param_groups[0]["lr"] = Fraction(1, 2)  # a number and no float, as numpy.float32


@pytest.mark.parametrize("change", [read_state, replace_entry, set_rate], ids=lambda each: each.__name__)
def test_replayed(change: Callable[[Training], Any]) -> None:
    assert after(change) == ["replay"]


def test_entries_that_were_replaced_are_followed() -> None:
    def change(training: Training) -> None:
        replace_entry(training)
        training.step(X)
        replace_state(training)

    assert after(change) == ["replay", "drop", "run"]


def test_parameters_that_come_to_the_device_later() -> None:
    """An obstacle does not outlive its reason."""
    with simulated_recorder() as happened:
        training = Training(fused=False)
        elsewhere = nn.Parameter(torch.ones(4, device="meta"))
        torch.utils.swap_tensors(training.loose, elsewhere)
        trained = training.step._trained
        trained.look()
        assert "not on" in trained.obstacle()
        torch.utils.swap_tensors(training.loose, elsewhere)
        trained.look()
        assert trained.obstacle() == ""
        assert not happened


def test_steps_that_run_in_other_threads_change_nothing() -> None:
    with simulated_recorder():
        trained = Training().step._trained
        other = Training()
        trained.look()
        HostEffects(other.step._trained, Arguments((X,), {})).stop()
        before = trained.identity()
        effects = HostEffects(other.step._trained, Arguments((X,), {}))
        assert trained.identity() == before
        effects.stop()


def test_a_step_that_differentiates_its_input() -> None:
    model = nn.Linear(4, 4)

    def step(x: torch.Tensor) -> torch.Tensor:
        x.requires_grad_()
        (gradient,) = torch.autograd.grad(model(x).sum(), x)
        return gradient.sum()

    with simulated_recorder() as happened:
        captured = capture(step, model, warmup=2)
        results = [captured(torch.ones(3, 4)).clone() for _ in range(5)]
        assert happened.count("replay") == 3
    assert len(set(map(float, results))) == 1
