"""The parts of a user's program: defaults, files, examples of batches."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from unshard.errors import ArgumentError
from unshard.tools.program import Program, default_loss, example_batch, load_program, tokens

FILE = """
from beside import nn

batch = (1, 2)

def build():
    return nn.Linear(4, 3)

def loss(model, batch):
    return 7
"""


def test_a_file_replaces_the_defaults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file may import others beside it."""
    file = tmp_path / "train.py"
    file.write_text(FILE)
    (tmp_path / "beside.py").write_text("from torch import nn")
    monkeypatch.setattr(sys, "path", [*sys.path])
    program = load_program(f"{file}:build")
    with pytest.raises(ArgumentError, match=r"has no function 'absent'\. It defines: build, loss\."):
        load_program(f"{file}:absent")
    assert isinstance(program.model(), nn.Linear)
    assert program.loss(program.model(), None) == 7
    assert program.batch_of(0, 0) == (1, 2)
    assert program.name == "build"


def test_only_an_unchanged_program_can_be_loaded_again(tmp_path: Path) -> None:
    file = tmp_path / "train.py"
    file.write_text(FILE.replace("beside", "torch"))
    target = f"{file}:build"
    program = load_program(target, batch=None)
    assert program.target == target
    assert replace(program, loss=default_loss).target == ""
    assert load_program(target, batch=torch.ones(2)).target == ""


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)


def test_losses_of_pairs_are_those_of_the_task() -> None:
    model, x = Classifier(), torch.randn(5, 3)
    classes, targets = torch.randint(4, (5,)), torch.randn(5, 4)
    functional = nn.functional
    assert torch.equal(default_loss(model, (x, classes)), functional.cross_entropy(model(x), classes))
    assert torch.equal(default_loss(model, (x, targets)), functional.mse_loss(model(x), targets))
    wrapper = nn.DataParallel(model)  # its own forward takes any number of arguments
    assert torch.equal(default_loss(wrapper, (x, classes)), functional.cross_entropy(model(x), classes))
    long, of_each = torch.randn(5, 7, 3), torch.randint(4, (5, 7))
    expected = functional.cross_entropy(model(long).flatten(0, 1), of_each.flatten())
    assert torch.equal(default_loss(model, (long, of_each)), expected)


def test_losses_of_other_models() -> None:
    class Two(nn.Module):
        def forward(self, a: torch.Tensor, b: torch.Tensor) -> Any:
            return {"logits": a * b}

    class WithLoss(nn.Module):
        def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> Any:
            return SimpleNamespace(loss=input_ids.sum() + labels.sum())

    a, b = torch.full((2,), 2.0), torch.full((2,), 3.0)
    assert default_loss(Two(), (a, b)) == 36
    assert default_loss(Two(), [a, b]) == 36
    assert default_loss(WithLoss(), {"input_ids": a, "labels": b}) == 10
    assert default_loss(nn.Identity(), a) == 4
    assert default_loss(nn.Identity(), torch.tensor(3.0)) == 3  # forward has computed the loss


def test_examples_of_batches() -> None:
    language = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 5))
    drawn = example_batch(language)
    assert drawn.shape == (2, 16)
    assert drawn.max() < 5
    assert example_batch(language, "3x7").shape == (3, 7)
    assert example_batch(nn.Sequential(nn.Linear(6, 2))).shape == (4, 6)
    assert example_batch(nn.Conv2d(3, 4, 3)).shape == (2, 3, 32, 32)
    assert example_batch(nn.LSTM(6, 2)).shape == (4, 8, 6)
    assert example_batch(nn.Linear(6, 2), (5, 6)).is_floating_point()
    with pytest.raises(ArgumentError, match=r"from the first layer of LayerNorm\. Pass a shape"):
        example_batch(nn.LayerNorm(3))


def test_an_example_for_a_hugging_face_model_has_labels() -> None:
    class Model(nn.Module):
        config = SimpleNamespace(vocab_size=5)

        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(5, 2)

        def forward(self, input_ids: torch.Tensor, labels: Any = None) -> Any:
            return self.embedding(input_ids)

    batch = example_batch(Model())
    assert torch.equal(batch["input_ids"], batch["labels"])


@pytest.mark.parametrize("shape", ["4xq", "0x3", "", (2, -1)])
def test_bad_shapes(shape: Any) -> None:
    with pytest.raises(ArgumentError, match="Expected a batch such as 4x2048"):
        tokens(shape)


def test_bad_programs() -> None:
    with pytest.raises(ArgumentError, match=r"Expected FILE:FUNCTION, got 'train.py'"):
        load_program("train.py")
    with pytest.raises(ArgumentError, match=r"There is no file 'train.py'"):
        load_program("train.py:build")
    with pytest.raises(ArgumentError, match=r"has no function 'build'"):
        load_program("unshard.names:build")
    with pytest.raises(ArgumentError, match=r"build\(\) returned int\. Return the unsharded nn\.Module"):
        Program(lambda: 5, name="build").model()
