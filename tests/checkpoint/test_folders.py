"""Which checkpoint under a path is loaded, saved beside and deleted."""

from __future__ import annotations

import os
import shutil
import stat
import threading
from pathlib import Path
from typing import BinaryIO

import pytest
import torch
from torch import nn

from unshard import checkpoint
from unshard.checkpoint import files, folders
from unshard.errors import ArgumentError, CheckpointError


def net() -> nn.Module:
    return nn.Linear(3, 2)


def save(path: Path, *steps: int, keep_last: int | None = None) -> None:
    for step in steps:
        checkpoint.save(path, model=net(), step=step, keep_last=keep_last)


def names(path: Path) -> list[str]:
    return sorted(each.name for each in path.iterdir())


def test_a_run_that_goes_back(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Nothing is deleted in favour of what was given up, and no restart goes on with that."""
    save(tmp_path, 10, 20, 30)
    assert checkpoint.load(tmp_path / "step_00000010", model=net()) == 10
    assert "step_00000030 is a later checkpoint" in caplog.text
    with pytest.raises(CheckpointError, match=r"step_00000030 has a later step than 15.*move or delete the later ones"):
        save(tmp_path, 15, keep_last=2)
    assert names(tmp_path) == ["step_00000010", "step_00000020", "step_00000030"]
    for step in (20, 30):
        shutil.rmtree(tmp_path / f"step_{step:08d}")
    save(tmp_path, 15, 20, keep_last=2)
    assert names(tmp_path) == ["step_00000015", "step_00000020"]
    caplog.clear()
    assert checkpoint.load(tmp_path / "step_00000020", model=net()) == 20 and not caplog.text


@pytest.mark.parametrize("kind", ["truncated", "empty", "file"])
def test_what_is_not_whole_makes_way(kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A run that was loaded from the checkpoint before comes to the same step again."""
    save(tmp_path, 10, 20)
    target = tmp_path / "step_00000020"
    if kind == "truncated":
        (target / "manifest.json").write_bytes((target / "manifest.json").read_bytes()[:-9])
    else:
        shutil.rmtree(target)
        target.mkdir() if kind == "empty" else target.write_text("x")
    assert checkpoint.load(tmp_path, model=net()) == 10
    save(tmp_path, 20)
    assert checkpoint.latest(tmp_path) == target and checkpoint.verify(target)
    (aside,) = [name for name in names(tmp_path) if name.startswith("damaged_step_00000020_")]
    assert f"Renamed to {tmp_path / aside}" in caplog.text
    save(tmp_path, 30, keep_last=1)
    assert names(tmp_path) == [aside, "step_00000030"]


def test_a_manifest_that_cannot_be_read_is_not_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, 1, 2)
    opened = os.open

    def failing(path: str, *args: int, **kwargs: int) -> int:
        if "step_00000002" in str(path) and str(path).endswith("manifest.json"):
            raise PermissionError(13, "Permission denied", str(path))
        return opened(path, *args, **kwargs)

    monkeypatch.setattr(os, "open", failing)
    with pytest.raises(CheckpointError, match="Permission denied"):
        checkpoint.load(tmp_path, model=net())


def test_a_checkpoint_that_another_job_deletes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next one is loaded then."""
    save(tmp_path, 1)
    opened, deleted = files.CheckpointFiles._open, []

    def deleting(self: files.CheckpointFiles, file: int) -> BinaryIO:
        if not deleted:
            deleted.append(self.folder)
            save(tmp_path, 2, keep_last=1)
        return opened(self, file)

    monkeypatch.setattr(files.CheckpointFiles, "_open", deleting)
    assert checkpoint.load(tmp_path, model=net()) == 2
    assert deleted == [tmp_path / "step_00000001"]
    deleted.clear()
    monkeypatch.setattr(folders, "latest", lambda path: tmp_path / "step_00000009")  # gone each time
    with pytest.raises(CheckpointError, match="is not a checkpoint"):
        checkpoint.load(tmp_path, model=net())


def test_two_jobs_that_save_the_same_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    renamed, once = os.rename, threading.Event()

    def slower(source: str, target: str) -> None:
        if not once.is_set():
            once.set()
            save(tmp_path, 1)
        renamed(source, target)

    monkeypatch.setattr(os, "rename", slower)
    with pytest.raises(CheckpointError, match="step_00000001 exists already"):
        save(tmp_path, 1)
    assert names(tmp_path) == ["step_00000001"] and checkpoint.verify(tmp_path)


def test_what_keep_last_cannot_delete(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path / "elsewhere", 1)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "step_00000001").symlink_to(tmp_path / "elsewhere" / "step_00000001")
    save(tmp_path / "run", 2, keep_last=1)
    assert names(tmp_path / "run") == ["step_00000002"] and checkpoint.verify(tmp_path / "elsewhere")
    monkeypatch.setattr(shutil, "rmtree", lambda *args, **kwargs: None)
    save(tmp_path / "run", 3, keep_last=1)
    assert "could not be deleted completely" in caplog.text
    monkeypatch.undo()
    save(tmp_path / "run", 4, keep_last=1)
    assert names(tmp_path / "run") == ["step_00000004"]
    assert stat.S_ISDIR((tmp_path / "run" / "step_00000004").stat().st_mode)


class Raising:
    def __init__(self, raises: bool = True):
        self.raises, self.loaded = raises, False

    def state_dict(self) -> dict[str, int]:
        return {"position": 1}

    def load_state_dict(self, state: dict[str, int]) -> None:
        if self.raises:
            raise KeyError("shuffle")
        self.loaded = True


def test_a_loader_that_raises_leaves_the_model_as_it_is(tmp_path: Path) -> None:
    one = net()
    optimizer = torch.optim.Adam(one.parameters())
    checkpoint.save(tmp_path, model=one, optimizer=optimizer, data=Raising(), step=1)
    other = net()
    before = [each.clone() for each in other.parameters()]
    its_optimizer = torch.optim.Adam(other.parameters())
    with pytest.raises(CheckpointError, match=r"load_state_dict of data/0 raised KeyError: 'shuffle'.*not changed"):
        checkpoint.load(tmp_path, model=other, optimizer=its_optimizer, data=Raising())
    assert all(map(torch.equal, before, other.parameters()))
    good = Raising(raises=False)
    checkpoint.load(tmp_path, model=other, optimizer=its_optimizer, data=good)
    assert good.loaded and torch.equal(other.weight, one.weight)


def test_a_scaler_that_was_disabled(tmp_path: Path) -> None:
    one = net()
    checkpoint.save(tmp_path, model=one, scaler=torch.amp.GradScaler("cpu", enabled=False), step=1)
    other = net()
    before = other.weight.clone()
    with pytest.raises(CheckpointError, match="load_state_dict of scaler raised RuntimeError"):
        checkpoint.load(tmp_path, model=other, scaler=torch.amp.GradScaler("cpu"))
    assert torch.equal(before, other.weight)


def test_what_is_loaded_in_part_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    one = nn.Sequential(net(), nn.Linear(2, 2))
    checkpoint.save(tmp_path, model=one, step=1)
    other = nn.Sequential(net(), nn.Linear(2, 2), nn.Linear(2, 2))
    checkpoint.load(tmp_path, model=other, strict=False)
    assert "partly loaded: 2 entries (24 bytes) missing in it: model/2.weight, model/2.bias" in caplog.text
    caplog.clear()
    checkpoint.load(tmp_path, model=nn.Sequential(net()), strict=False)
    assert "2 entries (24 bytes) of it unexpected here: model/1.bias, model/1.weight" in caplog.text
    with pytest.raises(CheckpointError, match="no tensor of the model has its name in the checkpoint"):
        checkpoint.load(tmp_path, model=nn.ModuleDict({"base": net()}), strict=False)


def test_parts_that_were_not_passed_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    one = net()
    optimizer = torch.optim.SGD(one.parameters())
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer)
    checkpoint.save(tmp_path, model=one, optimizer=optimizer, scheduler=scheduler, data=Raising(), step=1)
    checkpoint.load(tmp_path, model=one)  # to evaluate
    assert not caplog.text
    checkpoint.load(tmp_path, model=one, optimizer=optimizer)
    assert "also holds data, scheduler, not loaded" in caplog.text


def test_loading_in_inference_mode(tmp_path: Path) -> None:
    one = net()
    optimizer = torch.optim.Adam(one.parameters())
    one(torch.randn(2, 3)).sum().backward()
    optimizer.step()
    checkpoint.save(tmp_path, model=one, optimizer=optimizer, step=1)
    other = net()
    its_optimizer = torch.optim.Adam(other.parameters())
    with torch.inference_mode():
        checkpoint.load(tmp_path, model=other, optimizer=its_optimizer)
    other(torch.randn(2, 3)).sum().backward()
    its_optimizer.step()


def test_several_optimizers_are_refused(tmp_path: Path) -> None:
    one = net()
    optimizers = [torch.optim.SGD([each]) for each in one.parameters()]
    with pytest.raises(ArgumentError, match=r"must be one torch\.optim\.Optimizer"):
        checkpoint.save(tmp_path, model=one, optimizer=optimizers, step=1)  # type: ignore[arg-type]
