"""Captured steps, with recordings that the CPU simulates, train as the same steps without capture."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from bed import world
from bed.simulated_recorder import simulated_recorder
from bed.stack import Stack, assert_at_rest, batch, mesh, sharded
from torch import nn

from unshard import MixedPrecisionPolicy
from unshard.captured_step import capture
from unshard.optim import GradScaler, clip_grad_norm_, flat

STEPS = 9
Step = Callable[..., Any]


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), 0.0078125, fused=True)  # the same in float32


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), 0.0078125, momentum=0.9)


def whole(model: nn.Module, optimizer: torch.optim.Optimizer, scaler: GradScaler) -> Step:
    def step(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def clipped(model: nn.Module, optimizer: torch.optim.Optimizer, scaler: GradScaler) -> Step:
    def step(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        loss = model(x).float().square().mean()
        loss.backward()
        norm = clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach(), norm

    return step


def scaled(model: nn.Module, optimizer: torch.optim.Optimizer, scaler: GradScaler) -> Step:
    def step(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).float().square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        return loss.detach()

    return step


def accumulated(kind: str) -> Callable[..., Step]:
    """Three calls, of which the last steps. `kind`: what the first two do not do."""

    def make(model: Any, optimizer: torch.optim.Optimizer, scaler: GradScaler) -> Step:
        calls = [0]

        def micro_batch(x: torch.Tensor, last: bool) -> torch.Tensor:
            loss = model(x).float().square().mean()
            loss.backward()
            if last:
                optimizer.step()
                optimizer.zero_grad()
            return loss.detach()

        def step(x: torch.Tensor) -> torch.Tensor:
            calls[0] += 1
            last = calls[0] % 3 == 0
            if kind == "synchronise":
                model.set_requires_gradient_sync(last)
            elif kind == "all-reduce":
                model.set_requires_all_reduce(last)
            return step.captured(x, last)

        step.captured = micro_batch
        return step

    return make


def train(captured: bool, make_step: Callable[..., Step], make_optimizer: Callable[..., Any], **options: Any) -> list:
    model = sharded(Stack(), **options)
    optimizer = make_optimizer(model)
    scaler = GradScaler(init_scale=2.0**10, growth_interval=3)
    step = make_step(model, optimizer, scaler)
    micro = getattr(step, "captured", None)
    if captured:
        made = capture(micro or step, model, optimizer, scaler=scaler, warmup=2)
        if micro is None:
            step = made
        else:
            step.captured = made
    results = []
    for number in range(STEPS if micro is None else 3 * STEPS):
        out = step(batch(10 * number + dist.get_rank()))
        results += [each.clone() for each in (out if isinstance(out, tuple) else (out,))]
    if captured:
        assert made.recordings == (1 if micro is None else 3)
    assert_at_rest(model)
    return results + [each.to_local().detach().clone() for each in model.parameters()]


CASES = {
    "adamw": (whole, adamw),
    "sgd": (whole, sgd),
    "flat": (whole, lambda model: flat(adamw(model))),
    "clip": (clipped, adamw),
    "scaler": (scaled, adamw),
    "accumulated": (accumulated("nothing"), adamw),
    "accumulated without synchronisation": (accumulated("synchronise"), adamw),
    "flat, accumulated": (accumulated("nothing"), lambda model: flat(adamw(model))),
}


def assert_equal(one: list[torch.Tensor], other: list[torch.Tensor]) -> None:
    for mine, theirs in zip(one, other, strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("name", CASES)
@world(1, 2, 3, 4)
def test_bitwise(name: str) -> None:
    expected = train(False, *CASES[name])
    with simulated_recorder() as happened:
        assert_equal(train(True, *CASES[name]), expected)
    recordings = 3 if "accumulated" in name else 1
    calls = STEPS * recordings
    assert happened.count("record") == recordings
    assert happened.count("replay") == calls - 2 * recordings


@world(4)
def test_bitwise_over_replicas() -> None:
    options = {"mesh": mesh(2)}
    for kind in ("synchronise", "all-reduce"):
        expected = train(False, accumulated(kind), adamw, **options)
        with simulated_recorder():
            assert_equal(train(True, accumulated(kind), adamw, **options), expected)


@world(2)
def test_bitwise_in_mixed_precision() -> None:
    options = {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)}
    for make_step in (whole, accumulated("synchronise")):
        expected = train(False, make_step, adamw, **options)
        with simulated_recorder():
            assert_equal(train(True, make_step, adamw, **options), expected)
