"""What differs between two checkpoints, beside differences that the test has made itself."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import pytest
import torch
from bed.damage import flip
from torch import nn

from unshard import CheckpointError, checkpoint, cli


def build() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(7, 5), nn.BatchNorm1d(5))
    model.tied = model[0].weight
    return model


def saved(path: Path, model: nn.Module, step: int = 1, **others: object) -> Path:
    torch.manual_seed(0)  # the random number generators are part of a checkpoint
    return checkpoint.save(path, model=model, step=step, **others)  # type: ignore[arg-type]


def command(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    monkeypatch.setattr(sys, "argv", ["unshard", "checkpoint", "diff", *map(str, arguments)])
    return cli.main()


def test_equal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = saved(tmp_path / "a", build()), saved(tmp_path / "b", build())
    found = checkpoint.diff(a, b)
    assert found.equal and found.same == 7
    assert command(monkeypatch, tmp_path / "a", b) == 0
    assert capsys.readouterr().out.splitlines()[-2:] == [
        "7 tensors are bitwise equal.",
        "The checkpoints are equal.",
    ]
    assert command(monkeypatch, a) == 2
    assert command(monkeypatch, a, tmp_path / "nothing") == 2
    assert "There is no checkpoint in" in capsys.readouterr().err


@pytest.mark.parametrize("size", [3, 2**20])
def test_elements(
    size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Counts and largest differences, also of tensors that are read in several pieces."""
    monkeypatch.setattr("unshard.checkpoint.files.PIECE_ELEMENTS", size)
    model, other = build(), build()
    with torch.no_grad():
        model[0].weight[0, 0], other[0].weight[0, 0] = 100.0, 101.0
        model[0].weight[4, 6], other[0].weight[4, 6] = 0.5, -0.5
        other[0].bias[2] = math.nan
        model[1].weight.zero_()
        other[1].weight.fill_(-0.0)
        model[1].bias[0] = other[1].bias[0] = math.nan
    other[1].num_batches_tracked += 3
    found = checkpoint.diff(saved(tmp_path / "a", model), saved(tmp_path / "b", other, step=2))
    by_name = {each.name: each for each in found.tensors}
    weight = by_name.pop("model/0.weight")
    assert (weight.elements, weight.differing, weight.absolute, weight.relative) == (35, 2, 1.0, 2.0)
    bias = by_name.pop("model/0.bias")
    assert (bias.differing, bias.absolute, bias.relative) == (1, math.inf, math.inf)
    zero = by_name.pop("model/1.weight")
    assert (zero.differing, zero.absolute, zero.relative) == (5, 0.0, 0.0)
    count = by_name.pop("model/1.num_batches_tracked")
    assert (count.elements, count.differing, count.absolute, count.relative) == (1, 1, 3.0, 1.0)
    assert not by_name and found.same == 3 and found.values == ["step: 1 in a, 2 in b"]
    assert not (found.only_a or found.only_b or found.other)
    assert command(monkeypatch, tmp_path / "a", tmp_path / "b") == 1
    row = [line.split() for line in capsys.readouterr().out.splitlines() if "0.weight" in line]
    assert row == [["model/0.weight", "35", "2", "1", "2"]]


@pytest.mark.parametrize("name", ["bool", "uint8", "int16", "bfloat16", "float8_e4m3fn", "float64", "complex128"])
def test_dtypes(name: str, tmp_path: Path) -> None:
    folders = []
    for number in range(2):
        model = nn.Module()
        model.register_buffer("values", torch.tensor([0, 1, 1, number]).to(getattr(torch, name)))
        folders.append(saved(tmp_path / str(number), model))
    assert checkpoint.diff(folders[0], folders[0]).equal
    [found] = checkpoint.diff(*folders).tensors
    assert (found.elements, found.differing, found.absolute, found.relative) == (4, 1, 1.0, 1.0)


def test_names_shapes_and_values(tmp_path: Path) -> None:
    model, other = build(), build()
    model.more = nn.Parameter(torch.ones(2))
    del other.tied
    other.tied = nn.Parameter(other[0].weight.detach().clone())
    other[0].bias = nn.Parameter(torch.zeros(6))
    other[1].bfloat16()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    a = saved(tmp_path / "a", model, optimizer=optimizer, scheduler=scheduler)
    found = checkpoint.diff(a, saved(tmp_path / "b", other))
    assert found.only_a == ["model/more"] and not found.only_b and not found.tensors
    text = "\n".join(found.other)
    assert "model/0.bias: float32 of shape (5,) in a, float32 of shape (6,) in b" in text
    assert "model/1.weight: float32 of shape (5,) in a, bfloat16 of shape (5,) in b" in text
    assert "model/tied: tied to model/0.weight in a, not tied in b" in text
    assert "scheduler: only in a" in found.values and any(each.startswith("optimizer:") for each in found.values)
    assert checkpoint.diff(tmp_path / "b", tmp_path / "a").only_b == ["model/more"]
    for group in optimizer.param_groups:
        group["lr"] = 0.2
    c = saved(tmp_path / "c", model, optimizer=optimizer, scheduler=scheduler)
    [value] = checkpoint.diff(a, c).values
    assert value.startswith("optimizer.") and value.endswith(".lr: 0.1 in a, 0.2 in b")
    assert str(checkpoint.diff(a, c)).endswith(value)


def test_damaged(tmp_path: Path) -> None:
    """A damaged checkpoint is an error, not a difference."""
    a, b = saved(tmp_path / "a", build()), saved(tmp_path / "b", build())
    flip(b / "rank_00000.bin", 3)
    with pytest.raises(CheckpointError, match=r"rank_00000\.bin is damaged"):
        checkpoint.diff(a, b)
