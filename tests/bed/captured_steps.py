"""Training steps that tests run with and without capture, and compare bit by bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from bed.stack import batch
from torch import nn
from torch.distributed.tensor import DTensor

from unshard import capture
from unshard.optim import GradScaler, ShardedGradScaler, clip_grad_norm_

RATE = 2.0**-7  # the same in float32: captured steps have the learning rate in a tensor
Step = Callable[..., Any]


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), RATE, fused=True)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), RATE, momentum=0.9)


def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).float().square().mean()


def plain(model: nn.Module, optimizer: torch.optim.Optimizer, scaler: Any = None) -> Step:
    def step(x: torch.Tensor) -> Any:
        loss = loss_of(model, x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def cleared_first(model: nn.Module, optimizer: torch.optim.Optimizer, scaler: Any = None) -> Step:
    """The gradients stay between two calls."""

    def step(x: torch.Tensor) -> Any:
        optimizer.zero_grad()
        loss = loss_of(model, x)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def clipped(model: nn.Module, optimizer: torch.optim.Optimizer, scaler: Any) -> Step:
    def step(x: torch.Tensor) -> Any:
        loss = loss_of(model, x)
        loss.backward()
        norm = clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach(), norm

    return step


def scaled(model: nn.Module, optimizer: torch.optim.Optimizer, scaler: Any) -> Step:
    def step(x: torch.Tensor) -> Any:
        loss = loss_of(model, x)
        scaler.scale(loss).backward()
        if not isinstance(scaler, ShardedGradScaler):
            scaler.unscale_(optimizer)
            clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        return loss.detach(), scaler.scale(torch.ones((), device=x.device))

    return step


def accumulated(kind: str) -> Callable[..., Step]:
    """Three micro-batches, each a call of `step.captured`, of which the last steps. `kind`: what the others do not."""

    def make(model: Any, optimizer: torch.optim.Optimizer, scaler: Any) -> Step:
        def micro_batch(x: torch.Tensor, last: bool) -> torch.Tensor:
            loss = loss_of(model, x)
            loss.backward()
            if last:
                optimizer.step()
                optimizer.zero_grad()
            return loss.detach()

        def step(x: torch.Tensor) -> torch.Tensor:
            losses = []
            for number in range(3):
                if kind == "synchronise":
                    model.set_requires_gradient_sync(number == 2)
                elif kind == "all-reduce":
                    model.set_requires_all_reduce(number == 2)
                losses.append(step.captured(x + number, number == 2).clone())
            return torch.stack(losses)

        step.captured = micro_batch
        return step

    return make


def train(
    captured: bool,
    model: nn.Module,
    make_step: Callable[..., Step],
    make_optimizer: Callable[[nn.Module], torch.optim.Optimizer],
    make_scaler: Callable[..., Any] = GradScaler,
    *,
    steps: int,
    device: str,
) -> list[torch.Tensor]:
    """Results of the steps, and this rank's parameters at the end. Captured steps are recorded after three calls."""
    optimizer = make_optimizer(model)
    scaler = make_scaler(init_scale=2.0**20 if device == "cuda" else 2.0**10, growth_interval=4)
    step = make_step(model, optimizer, scaler)
    micro = getattr(step, "captured", None)
    if captured:
        made = capture(micro or step, model, optimizer, scaler=scaler)
        if micro is None:
            step = made
        else:
            step.captured = made
    rank = dist.get_rank()
    torch.manual_seed(1 + rank)
    results = []
    for number in range(steps):
        out = step(batch(10 * number + rank).to(device))
        results += [each.clone() for each in (out if isinstance(out, tuple) else (out,))]
    if captured:
        assert made.recordings == (1 if micro is None else 3)
    return results + locals_of(model)


def locals_of(model: nn.Module) -> list[torch.Tensor]:
    """This rank's parts of the parameters."""
    return [(each.to_local() if isinstance(each, DTensor) else each).detach().clone() for each in model.parameters()]


def assert_equal(expected: list[torch.Tensor], found: list[torch.Tensor]) -> None:
    for theirs, mine in zip(expected, found, strict=True):
        assert torch.equal(mine, theirs)
