"""Safetensors files that the package safetensors wrote, or that somebody made to do harm, loaded into a model."""

from __future__ import annotations

import copy
import json
import os
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from unshard import CheckpointError, checkpoint

package = pytest.importorskip("safetensors.torch")


def build() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    model.register_buffer("scratch", torch.ones(2), persistent=False)
    return model


def same(model: nn.Module, expected: dict[str, torch.Tensor]) -> None:
    # A model from `to_empty` may hold NaNs.
    torch.testing.assert_close(dict(model.state_dict()), expected, rtol=0, atol=0, equal_nan=True)


def refused(path: Path, match: str, model: nn.Module | None = None, **options: Any) -> None:
    """Loading raises, and the model is as it was."""
    model = build() if model is None else model
    before = copy.deepcopy(dict(model.state_dict()))
    with pytest.raises(CheckpointError, match=match):
        checkpoint.load_safetensors(model, path, **options)
    same(model, before)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    package.save_file(build().state_dict(), tmp_path / "model.safetensors")
    return tmp_path / "model.safetensors"


def test_into_a_model_on_meta(file: Path) -> None:
    with torch.device("meta"):
        model = build()
    with pytest.raises(CheckpointError, match="to_empty"):
        checkpoint.load_safetensors(model, file)
    found = checkpoint.load_safetensors(model.to_empty(device="cpu"), file)
    assert found == ([], [], ["scratch"])
    same(model, package.load_file(file))
    other = build()
    checkpoint.load_safetensors(other, file.parent)
    same(other, package.load_file(file))


def test_dtypes_are_converted(tmp_path: Path) -> None:
    for written, wanted in ((torch.float32, torch.bfloat16), (torch.bfloat16, torch.float64)):
        state = {n: v.to(written) if v.is_floating_point() else v for n, v in build().state_dict().items()}
        package.save_file(state, tmp_path / "x.safetensors")
        model = build().to(wanted)
        checkpoint.load_safetensors(model, tmp_path / "x.safetensors")
        same(model, {n: v.to(wanted) if v.is_floating_point() else v for n, v in state.items()})
    state["1.num_batches_tracked"] = torch.tensor(3.0)
    package.save_file(state, tmp_path / "x.safetensors")
    match = r"1 cannot be loaded: 1\.num_batches_tracked has the dtype torch\.float32, expected torch\.int64"
    refused(tmp_path / "x.safetensors", match)


def test_names_and_shapes(file: Path, tmp_path: Path) -> None:
    state = package.load_file(file)
    state["more"] = torch.ones(7)
    del state["0.weight"], state["1.bias"]
    package.save_file(state, tmp_path / "x.safetensors")
    missing = r"2 entries \(60 bytes\) missing in the files: 0\.weight, 1\.bias\."
    refused(tmp_path / "x.safetensors", rf"{missing} 1 entry \(28 bytes\) of the files unexpected here: more\.")
    model = build()
    expected = {**model.state_dict(), **{name: value for name, value in state.items() if name != "more"}}
    expected = copy.deepcopy(expected)
    found = checkpoint.load_safetensors(model, tmp_path / "x.safetensors", strict=False)
    assert found == (["0.weight", "1.bias"], ["more"], ["scratch"])
    same(model, expected)
    state["0.bias"] = torch.ones(1, 3)
    package.save_file(state, tmp_path / "x.safetensors")
    refused(tmp_path / "x.safetensors", r"0\.bias has the shape \(1, 3\), expected \(3,\)", strict=False)


def test_prefix(file: Path, tmp_path: Path) -> None:
    state = {f"net.{name}": value for name, value in package.load_file(file).items()}
    package.save_file({**state, "head.weight": torch.ones(3)}, tmp_path / "x.safetensors")
    model = build()
    checkpoint.load_safetensors(model, tmp_path / "x.safetensors", prefix="net.")
    same(model, package.load_file(file))
    refused(tmp_path / "x.safetensors", "7 entries .* missing .* 8 entries .* unexpected")


def test_tied_names(tmp_path: Path) -> None:
    """Under any of its names, or under several with the same bytes."""

    def tied() -> nn.Module:
        model = nn.ModuleDict({"a": nn.Linear(3, 3, bias=False), "b": nn.Linear(3, 3, bias=False)})
        model["b"].weight = model["a"].weight
        return model

    value, path = torch.randn(3, 3), tmp_path / "x.safetensors"
    for names in (["a"], ["b"], ["a", "b"]):
        package.save_file({f"{name}.weight": value.clone() for name in names}, path)
        model = tied()
        checkpoint.load_safetensors(model, path)
        assert torch.equal(model["a"].weight, value) and model["a"].weight is model["b"].weight
    package.save_file({"a.weight": value, "b.weight": value + 1}, path)
    refused(path, r"a\.weight and b\.weight are tied here, and are two different tensors in the files", tied())
    package.save_file({"a.weight": value}, path, {"b.weight": "a.weight"})
    with torch.device("meta"):
        model = tied()
    refused(path, r"b\.weight is tied to a\.weight\. Tie them in the model first", model.to_empty(device="cpu"))
    model["b"].weight = model["a"].weight
    checkpoint.load_safetensors(model, path)
    assert torch.equal(model["b"].weight, value)


def write(path: Path, header: Any, data: bytes = b"", length: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
    return path


def entry(dtype: Any = "F32", shape: Any = (2,), offsets: Any = (0, 8)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


HOSTILE: list[tuple[Any, str]] = [
    (b"[]", "not a JSON object"),
    (b"{" * 100_000, "malformed"),
    (b"\xff\xfe", "malformed"),
    (b'{"a": 1, "a": 2}', "the same key twice"),
    ({"a": 3}, "does not have exactly dtype, shape and data_offsets"),
    ({"a": {**entry(), "more": 1}}, "does not have exactly dtype"),
    ({"a": entry(dtype="F31")}, "has the dtype 'F31'"),
    ({"a": entry(dtype=["F32"])}, "has the dtype"),
    ({"a": entry(shape=[-2])}, "invalid shape or invalid offsets"),
    ({"a": entry(shape=[2.0])}, "invalid shape or invalid offsets"),
    ({"a": entry(shape=[True, 2])}, "invalid shape or invalid offsets"),
    ({"a": entry(shape=[2**61])}, "invalid shape or invalid offsets"),
    ({"a": entry(offsets=[0])}, "invalid shape or invalid offsets"),
    ({"a": entry(offsets=[8, 0])}, "has the offsets"),
    ({"a": entry(shape=[2**40, 2**20])}, "has the offsets"),
    ({"a": entry(), "b": entry()}, "overlap, or have gaps"),
    ({"a": entry(offsets=[4, 12])}, "overlap, or have gaps"),
    ({"a": entry(shape=[4], offsets=[0, 16])}, r"the tensors have 16 bytes, and the file has 8 bytes"),
    ({"a": entry(shape=[1], offsets=[0, 4])}, r"the tensors have 4 bytes, and the file has 8 bytes"),
    ({"a\n": entry()}, "is not the name of a tensor"),
    ({"__metadata__": {"a": 1}, "a": entry()}, "is not an object of strings"),
    (b'{"a": {"dtype": "F32", "shape": [' + b"9" * 5000 + b'], "data_offsets": [0, 8]}}', "malformed"),
]


@pytest.mark.parametrize(("header", "match"), HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_headers(header: Any, match: str, tmp_path: Path) -> None:
    model = nn.Module()
    model.a = nn.Parameter(torch.zeros(2))
    path = write(tmp_path / "x.safetensors", header, bytes(8))
    refused(path, rf"x\.safetensors.*{match}", model)
    checkpoint.load_safetensors(model, write(path, {"a": entry()}, struct.pack("<ff", 1, 2)))
    assert model.a.tolist() == [1, 2]


def test_files_that_are_not_whole(file: Path, tmp_path: Path) -> None:
    data = file.read_bytes()
    for length in (0, 5, 8, 100, len(data) - 1):
        file.write_bytes(data[:length])
        refused(file, r"model\.safetensors.*(not a complete safetensors file|and the file has)")
    file.write_bytes(data + b"x")
    refused(file, "and the file has")
    write(file, b"{}", length=2**63)
    refused(file, "at most 100000000 bytes")
    file.unlink()
    refused(file, r"model\.safetensors cannot be opened \(No such file")
    refused(tmp_path, "holds neither")
    os.mkfifo(file)
    refused(file, "is not a file")


def sharded_into(folder: Path, state: dict[str, torch.Tensor]) -> Path:
    folder.mkdir()
    files = {name: f"model-{number:05d}.safetensors" for number, name in enumerate(state)}
    for name, file in files.items():
        package.save_file({name: state[name]}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))
    return folder


def test_an_index(file: Path, tmp_path: Path) -> None:
    folder = sharded_into(tmp_path / "sharded", package.load_file(file))
    for path in (folder, folder / "model.safetensors.index.json"):
        model = build()
        checkpoint.load_safetensors(model, path)
        same(model, package.load_file(file))
    # Downloads are often links into a cache.
    (folder / "model-00000.safetensors").rename(tmp_path / "cached")
    (folder / "model-00000.safetensors").symlink_to(tmp_path / "cached")
    checkpoint.load_safetensors(build(), folder)
    package.save_file({"0.weight": torch.ones(3, 4)}, folder / "model-00001.safetensors")
    refused(folder, r"model-00001\.safetensors does not hold 0\.bias, which the index says")
    package.save_file({"0.bias": torch.ones(3), "0.weight": torch.ones(3, 4)}, folder / "model-00001.safetensors")
    refused(folder, r"both hold '0\.weight'")


@pytest.mark.parametrize(
    ("edit", "match"),
    [
        (lambda files: {**files, "0.bias": "../model.safetensors"}, "is not the name of a safetensors file"),
        (lambda files: {**files, "0.bias": "/etc/passwd"}, "is not the name of a safetensors file"),
        (lambda files: {**files, "0.bias": "..\\x.safetensors"}, "is not the name of a safetensors file"),
        (lambda files: {**files, "0.bias": "x\0.safetensors"}, "is not the name of a safetensors file"),
        (lambda files: {**files, "0.bias": ["x.safetensors"]}, "is not the name of a safetensors file"),
        (lambda files: {**files, "0.bias": "none.safetensors"}, r"none\.safetensors cannot be opened"),
        (lambda files: [], "has no object weight_map"),
    ],
)
def test_hostile_indices(edit: Callable[[Any], Any], match: str, file: Path, tmp_path: Path) -> None:
    folder = sharded_into(tmp_path / "sharded", package.load_file(file))
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": edit(json.loads(index.read_text())["weight_map"])}))
    refused(folder, match)


def test_without_the_package(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "safetensors", None)
    refused(file, "pip install safetensors")
