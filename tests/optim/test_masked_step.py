"""A step that is undone where a gradient was not finite, without a look at it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from unshard.optim.grad_scaler import step_unless

OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, 0.1, momentum=0.9),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, 0.1),
    "rmsprop": lambda parameters: torch.optim.RMSprop(parameters, 0.1),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_steps_and_skipped_steps(name: str) -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    other = nn.Linear(4, 3)
    other.load_state_dict(model.state_dict())
    optimizer, reference = OPTIMIZERS[name](model.parameters()), OPTIMIZERS[name](other.parameters())
    for number in range(8):
        skipped = number in (3, 4, 6)
        x = torch.randn(5, 4)
        for each in (model, other):
            each.zero_grad()
            (each(x).sum() * (float("inf") if skipped else 1.0)).backward()
        step_unless(optimizer, [torch.tensor(0.0), torch.tensor(float(skipped))])
        if not skipped:
            reference.step()
        for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
            assert torch.equal(mine, theirs)
            for key, value in reference.state[theirs].items():
                assert torch.equal(optimizer.state[mine][key], value), key


class Counting(torch.optim.SGD):
    """Counts its steps in a tensor of the param group."""

    def step(self, closure: None = None) -> None:
        super().step()
        for group in self.param_groups:
            group["count"].add_(1)


def test_tensors_in_param_groups() -> None:
    parameter = nn.Parameter(torch.ones(2))
    parameter.grad = torch.ones(2)
    optimizer = Counting([{"params": [parameter], "count": torch.zeros(())}], 0.5)
    optimizer.state["seen"] = 3
    for found in (1.0, 0.0, 1.0):
        step_unless(optimizer, [torch.tensor(found)])
    assert optimizer.param_groups[0]["count"] == 1


def test_one_flag() -> None:
    parameter = nn.Parameter(torch.ones(2))
    parameter.grad = torch.ones(2)
    optimizer = torch.optim.SGD([parameter], 0.5)
    step_unless(optimizer, [torch.tensor(1.0)])
    assert parameter.tolist() == [1.0, 1.0]
    step_unless(optimizer, [torch.tensor(0.0)])
    assert parameter.tolist() == [0.5, 0.5]
