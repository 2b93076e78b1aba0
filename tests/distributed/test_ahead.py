"""Optimizers that step units on the host while the backward of the others goes on."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from bed import world
from bed.late import late_host
from bed.models import CASES, Case, case, shard
from bed.parity import each_unit
from torch import nn
from torch.utils.checkpoint import checkpoint

from unshard import CPUOffloadPolicy, fully_shard
from unshard.errors import StateError
from unshard.optim import GradScaler, clip_grad_norm_, flat, host

HOST = CPUOffloadPolicy(pin_memory=False)
MAKERS: dict[str, Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, 0.1, momentum=0.9),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, 1e-2, fused=True),
    "adagrad": lambda parameters: torch.optim.Adagrad(parameters, 1e-2),
}


def offloaded(each: Case, build: Callable[[], nn.Module] | None = None) -> nn.Module:
    model = (build or each.build)()
    each_unit(each, fully_shard, offload_policy=HOST)(model)
    return model


def grouped(model: nn.Module, make: Callable[..., torch.optim.Optimizer]) -> torch.optim.Optimizer:
    """Biases and the like have a rate of their own."""
    optimizer = make([each for each in model.parameters() if each.ndim > 1])
    optimizer.add_param_group({"params": [each for each in model.parameters() if each.ndim == 1], "lr": 0.05})
    return optimizer


def loss_of(model: nn.Module, each: Case, step: int) -> torch.Tensor:
    return each.loss(model, shard(each.batch(step), dist.get_rank(), dist.get_world_size()))


def locals_of(model: nn.Module) -> list[torch.Tensor]:
    return [each.detach().to_local().clone() for each in model.parameters()]  # type: ignore[attr-defined]


def changed(before: list[torch.Tensor], after: list[torch.Tensor]) -> int:
    return sum(not torch.equal(a, b) for a, b in zip(before, after, strict=True))


def run(model: nn.Module, each: Case, optimizer: torch.optim.Optimizer, ahead: bool, steps: int = 4) -> list[Any]:
    """Losses, parameters and state. Looks whether backward has stepped."""
    losses = []
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    for step in range(steps):
        before = locals_of(model)
        loss = loss_of(model, each, step)
        loss.backward()
        losses.append(loss.item())
        for _, _, future in vars(optimizer)["unshard_ahead"]._steps if ahead else ():
            future.result()
        moved, all_of_them = changed(before, locals_of(model)), sum(each.numel() > 0 for each in before)
        assert moved == (all_of_them if ahead and step else 0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    states = [value for entry in optimizer.state_dict()["state"].values() for value in entry.values()]
    states = [each.to_local() if hasattr(each, "to_local") else torch.as_tensor(each) for each in states]
    return [*map(torch.tensor, losses), *locals_of(model), *states]


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("each", CASES, ids=str)
@world(1, 2, 3, 4)
def test_same_numbers(each: Case, name: str) -> None:
    make = MAKERS[name]
    with late_host():
        results = []
        for ahead in (False, True):
            model = offloaded(each)
            results.append(run(model, each, flat(grouped(model, make), ahead=ahead), ahead))
    assert len(results[0]) == len(results[1]) > 10
    assert changed(*results) == 0


@world(2)
def test_units_of_both_kinds() -> None:
    each = case("transformer")

    def built(ahead: bool) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = each.build()
        for number, unit in enumerate(each.units(model)):
            fully_shard(unit, **({"offload_policy": HOST} if number % 2 else {}))
        return model, flat(torch.optim.AdamW(model.parameters(), 1e-2, fused=True), ahead=ahead)

    with late_host():
        results = []
        for ahead in (False, True):
            model, optimizer = built(ahead)
            for step in range(3):
                loss_of(model, each, step).backward()
                optimizer.step()
                optimizer.zero_grad()
            results.append(locals_of(model))
    assert changed(*results) == 0


class Twice(nn.Module):
    """Runs a block twice, and another one in a checkpoint."""

    def __init__(self, checkpointed: bool) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(3))
        self._checkpointed = checkpointed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second, third = self.blocks
        x = first(second(first(x)))
        return checkpoint(third, x, use_reentrant=False) if self._checkpointed else third(x)


@pytest.mark.parametrize("checkpointed", [False, True])
@world(2)
def test_units_that_a_backward_comes_to_again(checkpointed: bool) -> None:
    results = []
    with late_host():
        for ahead in (False, True):
            model = Twice(checkpointed)
            for block in (*model.blocks, model):
                fully_shard(block, offload_policy=HOST)
            optimizer = flat(torch.optim.SGD(model.parameters(), 0.1, momentum=0.9), ahead=ahead)
            for step in range(3):
                model(torch.full((2, 6), 0.1 * (step + 1 + dist.get_rank()))).square().sum().backward()
                optimizer.step()
                optimizer.zero_grad()
            results.append(locals_of(model))
    assert changed(*results) == 0


@world(2)
def test_accumulation() -> None:
    each = case("transformer")
    results = []
    with late_host():
        for ahead in (False, True):
            model = offloaded(each)
            optimizer = flat(torch.optim.SGD(model.parameters(), 0.1), ahead=ahead)
            for step in range(6):
                model.set_requires_gradient_sync(step % 2 == 1)  # type: ignore[operator]
                loss_of(model, each, step).backward()
                if step % 2:
                    optimizer.step()
                    optimizer.zero_grad()
            results.append(locals_of(model))
    assert changed(*results) == 0


def stepped_once(each: Case) -> tuple[nn.Module, torch.optim.Optimizer]:
    """After that, backward steps."""
    model = offloaded(each)
    optimizer = flat(torch.optim.SGD(model.parameters(), 0.1), ahead=True)
    loss_of(model, each, 0).backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


@world(2)
def test_what_comes_too_late() -> None:
    each = case("transformer")
    with late_host():
        model, optimizer = stepped_once(each)
        loss_of(model, each, 1).backward()
        with pytest.raises(StateError, match=r"cannot be scaled any more.*ahead=True"):
            clip_grad_norm_(model.parameters(), 1.0)
        with pytest.raises(StateError, match=r"cannot be scaled any more"):
            scaler = GradScaler("cpu")
            scaler.scale(torch.ones(()))
            scaler.unscale_(optimizer)
        with pytest.raises(StateError, match=r"arrived a second time before step\(\).*set_requires_gradient_sync"):
            loss_of(model, each, 2).backward()
        optimizer.step()
        optimizer.zero_grad()
        loss_of(model, each, 3).backward()
        optimizer.step()
        optimizer.zero_grad()
        loss_of(model, each, 3).backward()
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
        with pytest.raises(StateError, match=r"between backward and step\(\)"):
            optimizer.step()


@world(2)
def test_a_forward_before_the_step_meets_whole_parameters() -> None:
    each = case("transformer")
    with late_host():
        model, optimizer = stepped_once(each)
        loss_of(model, each, 1).backward()
        with torch.no_grad():
            early = loss_of(model, each, 2)
        optimizer.step()
        with torch.no_grad():
            assert torch.equal(loss_of(model, each, 2), early)


@world(2)
def test_a_step_that_fails() -> None:
    each = case("transformer")
    with late_host():
        model, optimizer = stepped_once(each)
        real, calls = type(optimizer).plain_step, []  # type: ignore[attr-defined]

        def failing(*args: Any, **options: Any) -> Any:
            calls.append(args)
            if len(calls) == 2:
                raise KeyError("boom")
            return real(*args, **options)

        with mock.patch.object(type(optimizer), "plain_step", staticmethod(failing)):
            loss_of(model, each, 1).backward()
            with pytest.raises(KeyError, match="boom"):
                optimizer.step()
        optimizer.zero_grad()
        before = locals_of(model)
        loss_of(model, each, 2).backward()
        optimizer.step()
        assert changed(before, locals_of(model)) == len(before)


def test_the_share_of_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Incident 23: ranks that share a host do not starve each other of threads."""
    monkeypatch.setattr(host.os, "sched_getaffinity", lambda _: set(range(64)), raising=False)
    found = {}
    for ranks in (None, 1, 8, 64, 200):
        monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
        if ranks is not None:
            monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
        found[ranks] = host.cores_here()
    assert found == {None: 63, 1: 63, 8: 7, 64: 1, 200: 1}
