"""Captured steps with every optimizer of torch that can be captured, bit by bit as without capture."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from bed import world
from bed.captured_steps import RATE, assert_equal, locals_of, plain, train
from bed.stack import Stack, batch, sharded
from torch import nn

from unshard import capture
from unshard.optim import flat

STEPS = 8
CAPTURABLE = ["Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "Adadelta", "ASGD"]
ROWS = [
    *((name, "capturable", is_flat) for name in CAPTURABLE for is_flat in (False, True)),
    *(("Adam", "fused", is_flat) for is_flat in (False, True)),
    ("SGD", "fused", True),  # torch 2.11 has no fused SGD for DTensors, and no fused Adagrad for CUDA
]


def make(name: str, setting: str, is_flat: bool, captured: bool, model: nn.Module) -> torch.optim.Optimizer:
    """As a program makes it; without capture, with what `capture` sets: torch then computes in another order."""
    # Torch's Rprop copies lists of tensors, which it cannot do with DTensors.
    options: dict[str, Any] = {"foreach": False} if name == "Rprop" and not is_flat else {}
    rate: Any = RATE
    if setting == "fused":
        options["fused"] = True
    elif not captured:
        options["capturable"], rate = True, torch.tensor(RATE, device="cuda")
    made = getattr(torch.optim, name)(model.parameters(), rate, **options)
    return flat(made) if is_flat else made


@pytest.mark.parametrize(("name", "setting", "is_flat"), ROWS)
@world(2, backend="nccl")
def test_bitwise(name: str, setting: str, is_flat: bool) -> None:
    def run(captured: bool) -> list[torch.Tensor]:
        make_optimizer = partial(make, name, setting, is_flat, captured)
        return train(captured, sharded(Stack().cuda()), plain, make_optimizer, steps=STEPS, device="cuda")

    assert_equal(run(captured=False), run(captured=True))


@pytest.mark.parametrize("is_flat", [False, True])
@pytest.mark.parametrize("name", ["AdamW", "NAdam", "RAdam", "ASGD"])
@world(1, 2, backend="nccl")
def test_steps_before_the_first_captured_one(name: str, is_flat: bool) -> None:
    """They leave numbers of the state on the host."""

    def run(captured: bool) -> list[torch.Tensor]:
        model = sharded(Stack().cuda())
        optimizer: Any = getattr(torch.optim, name)(model.parameters(), RATE)
        optimizer = flat(optimizer) if is_flat else optimizer
        step = plain(model, optimizer)
        losses = [step(batch(number).cuda()) for number in range(2)]
        if captured:
            step = capture(step, model, optimizer)
        else:
            as_captured(optimizer)
        losses += [step(batch(number).cuda()).clone() for number in range(2, 2 + STEPS)]
        if captured:
            assert step.recordings == 1
        return losses + locals_of(model)

    assert_equal(run(captured=False), run(captured=True))


def as_captured(optimizer: torch.optim.Optimizer) -> None:
    """Numbers on the device, as `capture` sets them."""
    for group in optimizer.param_groups:
        group["capturable"], group["lr"] = True, torch.tensor(RATE, device="cuda")
    for entry in optimizer.state.values():
        for key, value in entry.items():
            if isinstance(value, torch.Tensor) and value.dim() == 0:
                entry[key] = value.cuda()
