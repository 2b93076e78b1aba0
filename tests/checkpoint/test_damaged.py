"""Damaged and hostile checkpoints: an error that names file and tensor, and a model that is unchanged."""

from __future__ import annotations

import copy
import json
import os
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from bed.damage import edit_manifest, flip, write_manifest
from torch import nn

from unshard import CheckpointError, checkpoint
from unshard.checkpoint.manifest import MANIFEST, read_manifest


def build(width: int = 4) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(nn.Linear(width, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.randn(6, model[0].in_features)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    model, optimizer = build()
    step(model, optimizer)
    return checkpoint.save(tmp_path, model=model, optimizer=optimizer, step=7)


def refused(folder: Path, match: str, strict: bool = True) -> None:
    """Loading raises, and neither model, optimizer nor random numbers change."""
    model, optimizer = build()
    step(model, optimizer)
    before = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    drawn = torch.get_rng_state()
    with pytest.raises(CheckpointError, match=match):
        checkpoint.load(folder, model=model, optimizer=optimizer, strict=strict)
    after = (model.state_dict(), optimizer.state_dict())
    torch.testing.assert_close(after, before, rtol=0, atol=0)
    assert torch.equal(torch.get_rng_state(), drawn)


def test_every_flipped_byte_is_found(folder: Path) -> None:
    path = folder / "rank_00000.bin"
    manifest, size = read_manifest(folder), path.stat().st_size
    for at in range(0, size, 37):
        flip(path, at)
        text = r"rank_00000\.bin is damaged: block 0 .* It holds model/0\.bias.*\. Restore the file, or load an older"
        with pytest.raises(CheckpointError, match=text):
            checkpoint.verify(folder)
        flip(path, at)
    flip(path, manifest.tensors["optimizer/exp_avg/2.weight"].boxes[0].offset)
    refused(folder, r"rank_00000\.bin is damaged")
    flip(path, manifest.tensors["optimizer/exp_avg/2.weight"].boxes[0].offset)
    assert checkpoint.verify(folder) == folder


def test_blocks_that_several_threads_verify(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("unshard.checkpoint.files.STRIP_BLOCKS", 2)
    model = nn.Linear(1024, 9 * 1024, bias=False)
    folder = checkpoint.save(tmp_path, model=model, step=1)
    path, size = folder / "rank_00000.bin", read_manifest(folder).block_bytes
    count = -(-path.stat().st_size // size)
    assert count >= 9 and checkpoint.verify(folder) == folder
    for block in (0, 5, count - 1):
        for damaged in {count - 1, block}:
            flip(path, damaged * size)
        for check in (lambda: checkpoint.verify(folder), lambda: checkpoint.load(folder, model=model)):
            with pytest.raises(CheckpointError, match=rf"is damaged: block {block} .* It holds "):
                check()
        for damaged in {count - 1, block}:
            flip(path, damaged * size)
    checkpoint.load(folder, model=model)


def test_every_flipped_byte_of_the_manifest_is_found(folder: Path) -> None:
    path = folder / MANIFEST
    for at in range(0, path.stat().st_size, 211):
        flip(path, at)
        with pytest.raises(CheckpointError, match=r"manifest\.json"):
            read_manifest(folder)
        flip(path, at)
    assert read_manifest(folder).step == 7


def test_only_the_blocks_that_are_read_are_verified(tmp_path: Path) -> None:
    """A model without its optimizer loads although a block of the optimizer's state is damaged."""
    model = nn.Linear(2048, 1024)
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    model(torch.randn(2, 2048)).sum().backward()
    optimizer.step()
    folder = checkpoint.save(tmp_path, model=model, optimizer=optimizer, step=1)
    flip(folder / "rank_00000.bin", 14_000_000)
    assert checkpoint.load(folder, model=nn.Linear(2048, 1024)) == 1
    with pytest.raises(CheckpointError, match=r"block 3 .* optimizer/momentum_buffer/weight"):
        checkpoint.load(folder, model=model, optimizer=optimizer)


def test_missing_and_truncated_files(folder: Path) -> None:
    path = folder / "rank_00000.bin"
    data = path.read_bytes()
    path.write_bytes(data[:-100])
    text = r"rank_00000\.bin has \d+ bytes, expected \d+\. Bytes of optimizer/.* are missing\. Restore the file"
    refused(folder, text)
    path.write_bytes(data + b"x")
    refused(folder, r"rank_00000\.bin has \d+ bytes, expected")
    path.unlink()
    refused(folder, r"rank_00000\.bin cannot be opened \(No such file.*It holds model/0\.bias.*\. Restore the file")
    path.mkdir()
    refused(folder, r"rank_00000\.bin")
    (folder / MANIFEST).unlink()
    refused(folder, "is not a checkpoint")
    assert checkpoint.latest(folder.parent) is None
    refused(folder.parent, "There is no checkpoint in")


def test_links_and_pipes_are_not_followed(folder: Path, tmp_path: Path) -> None:
    path = folder / "rank_00000.bin"
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    refused(folder, r"rank_00000\.bin cannot be opened")
    path.unlink()
    os.mkfifo(path)
    refused(folder, r"rank_00000\.bin has 0 bytes")
    manifest = folder / MANIFEST
    manifest.rename(tmp_path / "manifest")
    manifest.symlink_to(tmp_path / "manifest")
    refused(folder, "cannot be opened")


def test_checkpoints_of_other_models(folder: Path, tmp_path: Path) -> None:
    def load(model: nn.Module, strict: bool = True, optimizer: Any = None) -> int:
        return checkpoint.load(folder, model=model, strict=strict, optimizer=optimizer)

    wider = build(5)[0]
    before = copy.deepcopy(wider.state_dict())
    for strict in (True, False):
        with pytest.raises(
            CheckpointError, match=r"1 cannot be loaded: model/0\.weight has the shape \(3, 4\), expected \(3, 5\)"
        ):
            load(wider, strict)
    torch.testing.assert_close(wider.state_dict(), before, rtol=0, atol=0)
    with pytest.raises(CheckpointError, match=r"dtype torch\.float32, expected torch\.bfloat16"):
        load(build()[0].bfloat16())
    more = nn.Sequential(*build()[0], nn.Linear(2, 2))
    with pytest.raises(
        CheckpointError, match=r"2 entries \(24 bytes\) missing in the checkpoint: model/3\.\w+, model/3\.\w+\."
    ):
        load(more)
    assert load(more, strict=False) == 7
    with pytest.raises(CheckpointError, match=r"2 entries \(32 bytes\) of the checkpoint unexpected here: model/2"):
        load(nn.Sequential(*build()[0][:2]))
    model = build()[0]
    with pytest.raises(CheckpointError, match="another optimizer, with options that this SGD lacks"):
        load(model, optimizer=torch.optim.SGD(model.parameters()))
    with pytest.raises(
        CheckpointError, match=r"4 entries \(\d+ bytes\) of the checkpoint unexpected here: optimizer state of"
    ):
        load(model, optimizer=torch.optim.AdamW(model[0].parameters()))
    bare = checkpoint.save(tmp_path / "bare", model=model, step=1)
    with pytest.raises(CheckpointError, match=r"missing in the checkpoint: the optimizer"):
        checkpoint.load(bare, model=model, optimizer=torch.optim.AdamW(model.parameters()))


def tensor(manifest: dict[str, Any], name: str = "model/0.weight") -> Any:
    return manifest["tensors"][name]


def set_box(place: int, value: Any) -> Callable[[dict[str, Any]], None]:
    return lambda manifest: tensor(manifest)["boxes"][0].__setitem__(place, value)


def set_in(*path: Any) -> Callable[[dict[str, Any]], None]:
    """Set the value at the end of the path."""

    def edit(manifest: dict[str, Any]) -> None:
        *keys, last, value = path
        target: Any = manifest
        for key in keys:
            target = target[key]
        target[last] = value

    return edit


def share_bytes(manifest: dict[str, Any]) -> None:
    tensor(manifest)["boxes"][0][1] = tensor(manifest, "model/2.weight")["boxes"][0][1]


HOSTILE = {
    "a file outside": set_in("files", 0, "name", "../rank_00000.bin"),
    "an absolute file": set_in("files", 0, "name", "/etc/passwd"),
    "another file": set_in("files", 0, "name", "manifest.json"),
    "a negative size": set_in("files", 0, "bytes", -1),
    "a huge size": set_in("files", 0, "bytes", 2**70),
    "a size that is true": set_in("files", 0, "bytes", True),
    "too few checksums": set_in("files", 0, "blocks", ""),
    "checksums that are none": set_in("files", 0, "blocks", "zzzzzzzz"),
    "the same file twice": lambda m: m["files"].append(m["files"][0]),
    "no files": set_in("files", {}),
    "tiny blocks": set_in("block_bytes", 1),
    "no blocks": set_in("block_bytes", 0),
    "huge blocks": set_in("block_bytes", 2**40),
    "another algorithm": set_in("algorithm", "xxh3_64"),
    "another version": set_in("version", 3),
    "another format": set_in("format", "pickle"),
    "no step": lambda m: {key: value for key, value in m.items() if key != "step"},
    "a fractional step": set_in("step", 1.5),
    "values of other ranks": set_in("ranks", 3),
    "no ranks": lambda m: m.update(ranks=0, values={"ranks": []}),
    "a file that is not there": set_box(0, 1),
    "a negative offset": set_box(1, -64),
    "an offset that is not aligned": set_box(1, 3),
    "an offset behind the end": set_box(1, 2**40),
    "a box outside": set_box(2, [1, 0]),
    "a box of other dimensions": set_box(2, [0]),
    "a larger box": set_box(3, [30, 4]),
    "a smaller box": set_box(3, [2, 4]),
    "an empty box": set_box(3, [0, 4]),
    "a box that is text": set_box(3, "34"),
    "a box that is a number": set_in("tensors", "model/0.weight", "boxes", [3]),
    "a box without a size": lambda m: tensor(m)["boxes"][0].pop(),
    "shared bytes": share_bytes,
    "no boxes": set_in("tensors", "model/0.weight", "boxes", []),
    "a dtype that runs code": set_in("tensors", "model/0.weight", "dtype", "os.system"),
    "a huge shape": set_in("tensors", "model/0.weight", "shape", [2**40, 2**40]),
    "a shape that is a number": set_in("tensors", "model/0.weight", "shape", 3),
    "a shape of text": set_in("tensors", "model/0.weight", "shape", "34"),
    "many dimensions": set_in("tensors", "model/0.weight", "shape", [1] * 1000),
    "a name that does not print": set_in("tensors", "model/\x1b[2J", {"dtype": "float32", "shape": [0], "boxes": []}),
    "an alias of nothing": set_in("aliases", "model/x", "model/y"),
    "an alias of a tensor": set_in("aliases", "model/0.weight", "model/0.bias"),
    "no values": set_in("values", []),
    "values of a rank that are none": set_in("values", "ranks", 0, []),
    "extra state that is a list": set_in("values", "extra", []),
    "a list": lambda m: [m],
}


@pytest.mark.parametrize("what", HOSTILE)
def test_hostile_manifests(what: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    edit_to_crc32(folder)
    read_manifest(folder)
    edit_manifest(folder, HOSTILE[what])
    refused(folder, r"manifest\.json is malformed|checksums of the unknown")
    assert checkpoint.latest(folder.parent) is None


def edit_to_crc32(folder: Path) -> None:
    """As a machine without xxhash writes it: then the tests can make checksums right."""
    data = (folder / "rank_00000.bin").read_bytes()

    def edit(manifest: dict[str, Any]) -> None:
        manifest["algorithm"] = "crc32"
        manifest["files"][0]["blocks"] = f"{zlib.crc32(data):08x}"

    edit_manifest(folder, edit)
    assert checkpoint.verify(folder) == folder


VALUES = {
    "the optimizer is a list": set_in("values", "optimizer", []),
    "the optimizer's groups are numbers": set_in("values", "optimizer", "groups", [1]),
    "the optimizer's state is code": set_in("values", "optimizer", "state", "0.weight", "step", {"$": "eval"}),
    "a counter is a missing tensor": set_in(
        "values", "optimizer", "state", "0.weight", "step", {"$": "tensor", "name": "model/nothing"}
    ),
    "a state that is not there": set_in("values", "optimizer", "state", "0.weight", "other", {"$": "sharded"}),
    "random numbers are short": set_in("values", "ranks", 0, "rng", "torch", "data", ""),
    "random numbers are none": set_in("values", "ranks", 0, "rng", 3),
    "random numbers are missing": set_in("values", "ranks", 0, {}),
    "random numbers are text": set_in("values", "ranks", 0, "rng", "python", "x"),
    "random numbers of NumPy are text": set_in("values", "ranks", 0, "rng", "numpy", "x"),
}


@pytest.mark.parametrize("what", VALUES)
def test_hostile_values(what: str, folder: Path) -> None:
    edit_to_crc32(folder)
    edit_manifest(folder, VALUES[what])
    refused(folder, r"malformed|has no tensor|missing in the checkpoint")


@pytest.mark.parametrize(
    "text",
    ["", "[", "[" * 100_000, '{"a": 1, "a": 2}', "1" * 5000, '{"format": "unshard checkpoint", "version": 1}', "null"],
    ids=lambda text: text[:8] or "empty",
)
def test_json_that_is_none(text: str, folder: Path) -> None:
    write_manifest(folder, text)
    refused(folder, r"manifest\.json is malformed")


def test_overlapping_boxes(folder: Path) -> None:
    """As many elements as the tensor has, on bytes of their own, and one row twice."""
    path = folder / "rank_00000.bin"
    size = path.stat().st_size
    path.write_bytes(path.read_bytes() + bytes(64))

    def edit(manifest: dict[str, Any], first: int) -> None:
        manifest["files"][0]["bytes"] = size + 64
        manifest["algorithm"], manifest["files"][0]["blocks"] = "crc32", f"{zlib.crc32(path.read_bytes()):08x}"
        own = tensor(manifest)["boxes"][0][1]
        tensor(manifest)["boxes"] = [[0, own, [0, 0], [2, 4]], [0, size, [first, 0], [1, 4]]]

    edit_manifest(folder, lambda manifest: edit(manifest, 2))
    assert checkpoint.verify(folder) == folder
    edit_manifest(folder, lambda manifest: edit(manifest, 1))
    refused(folder, r"'model/0\.weight': two boxes overlap")


def test_a_key_twice(folder: Path) -> None:
    edit_to_crc32(folder)
    text = json.dumps(json.loads((folder / MANIFEST).read_text())["manifest"])
    write_manifest(folder, text)
    assert read_manifest(folder).step == 7
    write_manifest(folder, text.replace('"step": 7', '"step": 7, "step": 7'))
    refused(folder, "the same key twice")


def test_a_pickle_is_not_read(folder: Path) -> None:
    class Bomb:
        def __reduce__(self) -> Any:
            return os.abort, ()

    torch.save({"x": Bomb()}, folder / MANIFEST)
    refused(folder, "is not a valid manifest")
    (folder / MANIFEST).write_text(json.dumps({"checksum": "pickle:00", "manifest": {}}) + "\n")
    refused(folder, "checksums of the unknown kind 'pickle'")


def test_a_huge_manifest_is_not_read(folder: Path) -> None:
    with open(folder / MANIFEST, "r+b") as file:
        file.truncate(2**40)  # it has no blocks on the disk
    refused(folder, r"is not a file of at most")
