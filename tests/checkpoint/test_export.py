"""The model of a checkpoint as safetensors files, read by the package safetensors."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from bed.damage import flip
from bed.programs import python
from torch import nn

from unshard import CheckpointError, checkpoint, cli
from unshard.checkpoint.safetensors import CODES
from unshard.errors import ArgumentError

safetensors = pytest.importorskip("safetensors")
package = pytest.importorskip("safetensors.torch")


class Tied(nn.Module):
    """`embedding.weight` is `head.weight` as well; the alphabet has it first."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.embedding, self.norm, self.head = nn.Embedding(9, 4), nn.BatchNorm1d(4), nn.Linear(4, 9, bias=False)
        self.head.weight = self.embedding.weight


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return checkpoint.save(tmp_path / "checkpoints", model=Tied(), step=1)


def read(files: list[Path]) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for file in files:
        values = package.load_file(file)
        assert not values.keys() & found.keys()
        found.update(values)
    return found


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert sorted(found) == sorted(expected)
    for name, value in expected.items():
        assert found[name].dtype == value.dtype and found[name].shape == value.shape, name
        assert torch.equal(found[name].reshape(-1).view(torch.uint8), value.reshape(-1).view(torch.uint8)), name


def once() -> dict[str, torch.Tensor]:
    """The state of the model without the second name of the tied tensor."""
    return {name: value for name, value in Tied().state_dict().items() if name != "head.weight"}


@pytest.mark.parametrize("size", [3, 2**20])
def test_bitwise_and_tied_once(size: int, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("unshard.checkpoint.files.PIECE_ELEMENTS", size)
    files = checkpoint.export(folder, tmp_path / "out")
    assert [file.name for file in files] == os.listdir(tmp_path / "out") == ["model.safetensors"]
    assert_equal(read(files), once())
    with safetensors.safe_open(files[0], "pt") as file:
        assert file.metadata() == {"format": "pt", "head.weight": "embedding.weight"}
    model = Tied()
    with torch.no_grad():
        model.embedding.weight.zero_()
    package.load_model(model, files[0])
    assert torch.equal(model.head.weight, Tied().head.weight)


def test_name_of_tied_tensors(folder: Path, tmp_path: Path) -> None:
    files = checkpoint.export(folder, tmp_path / "out", tied_names=["head.weight"], prefix="net.")
    expected = {f"net.{name}": value for name, value in Tied().state_dict().items() if name != "embedding.weight"}
    assert_equal(read(files), expected)
    with safetensors.safe_open(files[0], "pt") as file:
        assert file.metadata() == {"format": "pt", "net.embedding.weight": "net.head.weight"}
    for wrong in (["norm.weight"], ["head.weight", "embedding.weight"]):
        with pytest.raises(ArgumentError, match="not a tied tensor"):
            checkpoint.export(folder, tmp_path / "other", tied_names=wrong)
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize("dtype", [torch.bfloat16, "float16", torch.float64])
def test_dtype(dtype: Any, folder: Path, tmp_path: Path) -> None:
    to = dtype if isinstance(dtype, torch.dtype) else getattr(torch, dtype)
    expected = {name: value.to(to) if value.is_floating_point() else value for name, value in once().items()}
    assert_equal(read(checkpoint.export(folder, tmp_path / "out", dtype=dtype)), expected)


def test_all_dtypes(tmp_path: Path) -> None:
    model = nn.Module()
    for code, name in CODES.items():
        model.register_buffer(code, torch.tensor([[0, 1, 0], [1, 1, 1]]).to(getattr(torch, name)))
    model.register_buffer("scalar", torch.tensor(3.5))
    model.register_buffer("empty", torch.empty(0, 3))
    folder = checkpoint.save(tmp_path / "checkpoints", model=model, step=1)
    assert_equal(read(checkpoint.export(folder, tmp_path / "out")), dict(model.state_dict()))
    model.register_buffer("wide", torch.ones(2, dtype=torch.complex128))
    folder = checkpoint.save(tmp_path / "others", model=model, step=1)
    with pytest.raises(CheckpointError, match="'wide' has the dtype complex128, which safetensors files cannot hold"):
        checkpoint.export(folder, tmp_path / "other")


def test_files_of_limited_size(folder: Path, tmp_path: Path) -> None:
    """Also if one tensor is larger than the limit."""
    files = checkpoint.export(folder, tmp_path / "out", max_file_size=32)
    expected = once()
    names = [file.name for file in files]
    assert names == [f"model-{number:05d}-of-00004.safetensors" for number in range(1, 5)]
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(value.nbytes for value in expected.values())
    assert sorted(os.listdir(tmp_path / "out")) == [*names, "model.safetensors.index.json"]
    assert_equal(read(files), expected)
    for file in files:
        values = package.load_file(file)
        assert {index["weight_map"][name] for name in values} == {file.name}
        assert len(values) == 1 or sum(value.nbytes for value in values.values()) <= 32
    assert len(checkpoint.export(folder, tmp_path / "one", max_file_size="0.5 KB")) == 1
    for wrong in ("5 parsecs", "0", -3, "1XB", ""):
        with pytest.raises(ArgumentError, match="largest file size is wrong: expected"):
            checkpoint.export(folder, tmp_path / "none", max_file_size=wrong)
    with pytest.raises(ArgumentError, match="dtype must be one of"):
        checkpoint.export(folder, tmp_path / "none", dtype="int8")


def test_existing_folders(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    checkpoint.export(folder, out, max_file_size=32)
    (out / "config.json").write_text("{}")
    (out / ".exporting_0123").write_text("of an export that was killed")
    before = sorted(os.listdir(out))
    with pytest.raises(CheckpointError, match=r"is not empty: .* overwrite"):
        checkpoint.export(folder, out)
    assert sorted(os.listdir(out)) == before
    checkpoint.export(folder, out, overwrite=True)
    assert sorted(os.listdir(out)) == ["config.json", "model.safetensors"]
    with pytest.raises(CheckpointError, match="is not a folder"):
        checkpoint.export(folder, out / "config.json")


def test_failing(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A damaged checkpoint and a full disk leave what was there, and nothing new."""
    out = tmp_path / "out"
    [file] = checkpoint.export(folder, out)
    before = file.read_bytes()
    flip(folder / "rank_00000.bin", 3)
    with pytest.raises(CheckpointError, match=r"rank_00000\.bin is damaged"):
        checkpoint.export(folder, out, overwrite=True)
    with pytest.raises(CheckpointError, match=r"rank_00000\.bin is damaged"):
        checkpoint.export(folder, tmp_path / "new")
    flip(folder / "rank_00000.bin", 3)

    def full(descriptor: int, data: Any) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(CheckpointError, match="could not be written: No space left on device"):
        checkpoint.export(folder, out, overwrite=True)
    assert os.listdir(out) == ["model.safetensors"] and file.read_bytes() == before
    assert not (tmp_path / "new").exists()


def test_the_command(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def command(*arguments: Any) -> int:
        monkeypatch.setattr(sys, "argv", ["unshard", "export", *map(str, arguments)])
        return cli.main()

    out = tmp_path / "out"
    options = ("--dtype", "bfloat16", "--max-file-size", "40", "--prefix", "net.", "--tied-name", "head.weight")
    assert command(folder.parent, out, *options) == 0
    files = [Path(line) for line in capsys.readouterr().out.splitlines()]
    assert len(files) > 1 and read(files)["net.head.weight"].dtype is torch.bfloat16
    assert command(folder, out) == 2
    assert "unshard export: " in (text := capsys.readouterr().err) and "--overwrite" in text
    assert command(folder, out, "--overwrite") == 0
    assert command(folder, tmp_path / "x", "--dtype", "int3") == 2


MEMORY = """
import re, sys
import torch
from unshard import checkpoint

def peak():  # of this process; that of getrusage may be its parent's
    return int(re.search(r"VmHWM:\\s*(\\d+) kB", open("/proc/self/status").read())[1]) * 1024

before = peak()
if sys.argv[1] == "export":
    checkpoint.export(sys.argv[2], sys.argv[3], dtype=torch.bfloat16)
else:
    assert checkpoint.diff(sys.argv[2], sys.argv[2]).same == 6
print(peak() - before)
"""


@pytest.mark.slow
@pytest.mark.parametrize("what", ["export", "diff"])
def test_memory(what: str, tmp_path: Path) -> None:
    """A model of 240 MiB in tensors of 40 MiB, in a process of its own: it takes the memory of a few pieces."""
    model = nn.Sequential(*(nn.Linear(2048, 5120, bias=False) for _ in range(6)))
    folder = checkpoint.save(tmp_path / "checkpoints", model=model, step=1)
    grown = int(python("-c", MEMORY, what, folder, tmp_path / "out").stdout)
    assert grown < 80 * 2**20, grown
