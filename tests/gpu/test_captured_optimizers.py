"""Captured steps with every optimizer of torch that can be captured, bit by bit as without capture."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from bed import world
from bed.captured_steps import RATE, assert_equal, plain, train
from bed.stack import Stack, sharded
from torch import nn

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
