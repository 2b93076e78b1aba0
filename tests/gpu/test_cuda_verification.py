"""`verify` with NCCL on one device, and on the CPU of a machine that has CUDA."""

from __future__ import annotations

from pathlib import Path

import pytest

from unshard.tools import verify

PROGRAM = """
import torch
from torch import nn

def build():
    return nn.Sequential(nn.Embedding(32, 16), nn.Linear(16, 16), nn.Dropout(0.1), nn.Linear(16, 32))

def batch(rank, step):
    return torch.randint(32, (4, 8))

def summed(model, tokens):
    return model(tokens).square().sum()
"""


@pytest.mark.parametrize(("device", "ranks"), [("cuda", 1), ("cpu", 2)])
def test_a_right_model_agrees(tmp_path: Path, device: str, ranks: int) -> None:
    file = tmp_path / "train.py"
    file.write_text(PROGRAM)
    found = verify(f"{file}:build", ranks=ranks, steps=2, device=device)
    assert found.agree, str(found)
    assert found.runs[0].notes == []


def test_a_sum_is_found_on_the_cpu(tmp_path: Path) -> None:
    file = tmp_path / "train.py"
    file.write_text(PROGRAM.replace("summed", "loss"))
    found = verify(f"{file}:build", ranks=2, steps=1)
    assert "sum over samples" in " ".join(found.runs[0].causes)
