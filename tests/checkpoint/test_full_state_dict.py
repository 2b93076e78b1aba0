"""Full state dicts without a process group."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from bed.models import CASES
from bed.runs import assert_same
from torch import nn

from unshard import CheckpointError, checkpoint


def trained(model: nn.Module, lr: float = 0.1) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(model.parameters(), lr)
    CASES[2].loss(model, CASES[2].batch(0)).backward()
    optimizer.step()
    optimizer.zero_grad()
    return optimizer


def test_one_process() -> None:
    """What is returned are copies, and what is loaded is copied."""
    model = CASES[2].build()
    optimizer = trained(model)
    state, of_optimizer = checkpoint.full_state_dict(model), checkpoint.full_optimizer_state_dict(model, optimizer)
    expected, before = copy.deepcopy(state), copy.deepcopy(of_optimizer)
    assert list(state) == list(model.state_dict())
    assert_same(state, dict(model.state_dict()))
    assert sorted(of_optimizer["state"]) == sorted(name for name, _ in model.named_parameters())
    trained(model)
    assert_same(state, expected)
    other = CASES[2].build()
    fresh = trained(other, 0.7)
    checkpoint.load_full_state_dict(other, state)
    checkpoint.load_full_optimizer_state_dict(other, fresh, of_optimizer)
    assert_same(checkpoint.full_state_dict(other), expected)
    assert_same(checkpoint.full_optimizer_state_dict(other, fresh), before)
    CASES[2].loss(other, CASES[2].batch(1)).backward()
    fresh.step()
    assert_same(of_optimizer, before)
    assert_same(state, expected)


class FromFile(Mapping[str, torch.Tensor]):
    """Reads a tensor when it is asked for; there is never more than one."""

    def __init__(self, folder: Path, state: dict[str, torch.Tensor]):
        self.folder, self.names, self.reads = folder, list(state), 0
        for name, value in state.items():
            torch.save(value, folder / name)

    def __getitem__(self, name: str) -> torch.Tensor:
        self.reads += 1
        return torch.load(self.folder / name)

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)


def test_a_mapping_that_reads_tensors_when_they_are_needed(tmp_path: Path) -> None:
    expected = dict(CASES[1].build().state_dict())
    model = CASES[1].build()
    for parameter in model.parameters():
        nn.init.zeros_(parameter)
    source = FromFile(tmp_path, expected)
    checkpoint.load_full_state_dict(model, source)
    assert_same(dict(model.state_dict()), expected)
    assert source.reads == 2 * len(expected)  # for its shape, and for its values


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (torch.ones(3, 1).to_sparse(), r"'weight' is a Tensor of layout torch.sparse_coo"),
        (torch.ones(3, 1, device="meta"), r"'weight' is a Tensor of layout torch.strided on meta"),
        ([1.0], r"'weight' is a list\. A full state dict must hold dense"),
    ],
)
def test_refused_values(value: Any, text: str) -> None:
    model = nn.Linear(1, 3, bias=False)
    before = model.weight.detach().clone()
    with pytest.raises(CheckpointError, match=text):
        checkpoint.load_full_state_dict(model, {"weight": value})
    with pytest.raises(CheckpointError, match="Two entries of the state dict have the name 'weight'"):
        checkpoint.load_full_state_dict(model, {"weight": before, "_orig_mod.weight": before})
    assert torch.equal(model.weight, before)


def test_options_of_schedulers_and_of_other_versions() -> None:
    """Neither makes it the state of another optimizer."""
    model = CASES[2].build()
    optimizer = trained(model)
    state = checkpoint.full_optimizer_state_dict(model, optimizer)
    for group in state["param_groups"]:
        del group["decoupled_weight_decay"]
    checkpoint.load_full_optimizer_state_dict(model, optimizer, state)
    assert optimizer.param_groups[0]["decoupled_weight_decay"] is True
    torch.optim.lr_scheduler.StepLR(optimizer, 2)
    state = checkpoint.full_optimizer_state_dict(model, optimizer)
    fresh = torch.optim.AdamW(model.parameters())
    checkpoint.load_full_optimizer_state_dict(model, fresh, state)
    assert fresh.param_groups[0]["initial_lr"] == 0.1
