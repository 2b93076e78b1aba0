"""Checkpoints without a process group: folders, dtypes, ties, and the command."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from unshard import CheckpointError, checkpoint, cli
from unshard.checkpoint import files, folders, storage
from unshard.checkpoint.manifest import MANIFEST, read_manifest
from unshard.errors import ArgumentError


def model() -> nn.Module:
    return nn.Linear(3, 2)


def steps(path: Path) -> list[str]:
    return sorted(each.name for each in path.iterdir())


def test_latest_and_keep_last(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert checkpoint.latest(tmp_path / "nothing") is None
    (tmp_path / "step_00000099").mkdir()  # not a checkpoint: neither counted nor deleted
    for step in (1, 2, 5, 10):
        checkpoint.save(tmp_path, model=model(), step=step, keep_last=2)
    assert steps(tmp_path) == ["step_00000005", "step_00000010", "step_00000099"]
    with caplog.at_level(logging.WARNING, "unshard"):
        assert checkpoint.latest(tmp_path) == tmp_path / "step_00000010"
    assert "step_00000099" in caplog.text
    assert checkpoint.load(tmp_path, model=model()) == 10
    assert checkpoint.load(tmp_path / "step_00000005", model=model()) == 5
    with pytest.raises(CheckpointError, match="exists already"):
        checkpoint.save(tmp_path, model=model(), step=10)
    for step, keep in ((-1, None), (True, None), (3, 0), ("3", None)):
        with pytest.raises(ArgumentError, match="must be"):
            checkpoint.save(tmp_path, model=model(), step=step, keep_last=keep)  # type: ignore[arg-type]


def test_leftovers_of_dead_saves_are_removed_and_others_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dead = folders.Unpublished(tmp_path, 1)
    (dead.folder / "rank_00000.bin").write_bytes(b"x" * 100)
    os.close(dead._lock)  # as its death does
    alive = folders.Unpublished(tmp_path, 2)
    assert not dead.folder.exists()
    young, old = tmp_path / ".saving_step_00000003_a", tmp_path / ".saving_step_00000003_b"
    young.mkdir()
    old.mkdir()
    os.utime(old, (1, 1))
    half = tmp_path / ".deleting_step_00000004_c"
    half.mkdir()
    mine = tmp_path / ".saving_my_own_files"
    mine.mkdir()
    checkpoint.save(tmp_path, model=model(), step=9)
    assert set(steps(tmp_path)) == {alive.folder.name, young.name, mine.name, "step_00000009"}
    assert steps(tmp_path / "step_00000009") == [MANIFEST, "rank_00000.bin"]
    alive.close()


def test_a_locked_save_of_another_process_stays(tmp_path: Path) -> None:
    folder = tmp_path / ".saving_step_00000001_abc"
    folder.mkdir()
    lock = f"f = open({str(folder / 'lock')!r}, 'w'); fcntl.flock(f, fcntl.LOCK_EX)"
    code = f"import fcntl, time; {lock}; print(1, flush=True); time.sleep(600)"
    other = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    try:
        assert other.stdout is not None and other.stdout.readline() == b"1\n"
        folders.remove_leftovers(tmp_path)
        assert folder.exists()
    finally:
        other.kill()
        other.communicate()
    folders.remove_leftovers(tmp_path)
    assert not folder.exists()


class Awkward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scalar = nn.Parameter(torch.tensor(0.5))
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.narrow = nn.Parameter(torch.randn(3, 2).bfloat16())
        self.waves = nn.Parameter(torch.randn(3, dtype=torch.complex64))
        self.strided = nn.Parameter(torch.randn(4, 6).T)
        self.a = nn.Linear(3, 3)
        self.b = nn.Linear(3, 3)
        self.b.weight = self.a.weight
        self.register_buffer("eight", torch.randn(5).to(torch.float8_e4m3fn))
        self.register_buffer("flags", torch.tensor([True, False]))
        self.register_buffer("scratch", torch.randn(2), persistent=False)
        self.count = 3

    def get_extra_state(self) -> Any:
        return {"count": self.count}

    def set_extra_state(self, state: Any) -> None:
        self.count = state["count"]


def test_awkward_tensors(tmp_path: Path) -> None:
    saved, loaded = Awkward(), Awkward()
    saved.count = 8
    folder = checkpoint.save(tmp_path, model=saved, step=0)
    manifest = read_manifest(folder)
    assert manifest.aliases == {"model/b.weight": "model/a.weight"}
    assert "model/scratch" not in manifest.tensors
    scratch = loaded.scratch.clone()
    checkpoint.load(folder, model=loaded)
    for (name, one), other in zip(saved.state_dict().items(), loaded.state_dict().values(), strict=True):
        if isinstance(one, torch.Tensor):
            assert one.dtype == other.dtype and one.shape == other.shape, name
            bits = [each.contiguous().reshape(-1).view(torch.uint8) for each in (one.detach(), other.detach())]
            assert torch.equal(*bits), name
    assert loaded.count == 8 and torch.equal(loaded.scratch, scratch)
    assert loaded.b.weight is loaded.a.weight
    untied = Awkward()
    untied.b.weight = nn.Parameter(torch.randn(3, 3))
    checkpoint.load(folder, model=untied)
    assert torch.equal(untied.b.weight, saved.a.weight)
    other = checkpoint.save(tmp_path, model=untied, step=1)
    with pytest.raises(CheckpointError, match=r"model/a\.weight and model/b\.weight are tied here"):
        checkpoint.load(other, model=loaded)


def test_state_of_another_dtype_than_the_parameter(tmp_path: Path) -> None:
    """Torch would cast it to the parameter's when it is loaded."""
    runs = []
    for _ in range(2):
        net = model().bfloat16()
        optimizer = torch.optim.SGD(net.parameters(), momentum=0.9)
        runs.append((net, optimizer))
    net, optimizer = runs[0]
    for each in net.parameters():
        optimizer.state[each]["momentum_buffer"] = torch.randn(each.shape)
    checkpoint.save(tmp_path, model=net, optimizer=optimizer, step=1)
    other, loaded = runs[1]
    checkpoint.load(tmp_path, model=other, optimizer=loaded)
    for one, two in zip(net.parameters(), other.parameters(), strict=True):
        found = loaded.state[two]["momentum_buffer"]
        assert found.dtype == torch.float32 and torch.equal(found, optimizer.state[one]["momentum_buffer"])


def test_a_parameter_that_had_no_state_has_none(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def build() -> tuple[nn.ModuleList, torch.optim.Optimizer]:
        modules = nn.ModuleList([model(), model()])
        return modules, torch.optim.AdamW(modules.parameters())

    modules, optimizer = build()
    modules[0](torch.randn(2, 3)).sum().backward()
    optimizer.step()
    checkpoint.save(tmp_path, model=modules, optimizer=optimizer, step=1)
    others, loaded = build()
    others[1](torch.randn(2, 3)).sum().backward()
    loaded.step()
    checkpoint.load(tmp_path, model=others, optimizer=loaded)
    assert set(loaded.state) == set(others[0].parameters())
    nbytes = sum(each.nbytes for each in others[1].parameters())
    assert f"no state for 2 parameters ({nbytes} bytes): " in caplog.text and "1.weight" in caplog.text


def test_an_optimizer_that_has_lost_its_state(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The checkpoint has none at all, and the optimizer that loads it has some; SGD never has any."""
    net = model()
    for build, reported in ((torch.optim.AdamW, True), (torch.optim.SGD, False)):
        checkpoint.save(tmp_path / str(reported), model=net, optimizer=build(net.parameters()), step=1)
        other = build(net.parameters())
        net(torch.randn(2, 3)).sum().backward()
        other.step()
        caplog.clear()
        checkpoint.load(tmp_path / str(reported), model=net, optimizer=other)
        assert ("no state for 2 parameters" in caplog.text) == reported


def test_groups_are_matched_by_names(tmp_path: Path) -> None:
    net = nn.Sequential(model(), nn.Linear(2, 2))
    optimizer = torch.optim.SGD(
        [{"params": net[0].parameters(), "lr": 1.0}, {"params": net[1].parameters(), "lr": 2.0}]
    )
    checkpoint.save(tmp_path, model=net, optimizer=optimizer, step=1)
    swapped = torch.optim.SGD([{"params": net[1].parameters()}, {"params": net[0].parameters()}])
    checkpoint.load(tmp_path, model=net, optimizer=swapped)
    assert [group["lr"] for group in swapped.param_groups] == [2.0, 1.0]
    together = torch.optim.SGD(net.parameters())
    with pytest.raises(CheckpointError, match=r"of the groups \[0, 1\] of the checkpoint"):
        checkpoint.load(tmp_path, model=net, optimizer=together)


def test_without_xxhash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("xxhash")
    with_it = checkpoint.save(tmp_path, model=model(), step=1)
    monkeypatch.setitem(sys.modules, "xxhash", None)
    with pytest.raises(CheckpointError, match="pip install xxhash"):
        checkpoint.verify(with_it)
    folder = checkpoint.save(tmp_path / "other", model=model(), step=2)
    assert read_manifest(folder).algorithm == "crc32"
    assert checkpoint.load(folder, model=model()) == 2


def test_optimizers_and_objects_that_do_not_fit(tmp_path: Path) -> None:
    net = model()
    with pytest.raises(CheckpointError, match="2 of the parameters of this SGD are not in the model"):
        checkpoint.save(tmp_path, model=net, optimizer=torch.optim.SGD(model().parameters()), step=1)
    with pytest.raises(CheckpointError, match="scheduler must have the methods state_dict"):
        checkpoint.save(tmp_path, model=net, scheduler=3, step=1)
    with pytest.raises(CheckpointError, match="is on the meta device"):
        checkpoint.save(tmp_path, model=nn.Linear(2, 2, device="meta"), step=1)
    assert not tmp_path.exists() or not steps(tmp_path)


@pytest.mark.parametrize("name", ["save", "load", "Saver.save", "Saver.prepare", "full_state_dict"])
def test_arguments_of_other_types(name: str, tmp_path: Path) -> None:
    call = {
        "save": lambda **of: checkpoint.save(tmp_path, step=1, **of),
        "load": lambda **of: checkpoint.load(tmp_path, **of),
        "Saver.save": lambda **of: checkpoint.Saver(tmp_path).save(step=1, **of),
        "Saver.prepare": lambda **of: checkpoint.Saver(tmp_path).prepare(**of),
        "full_state_dict": lambda model: checkpoint.full_state_dict(model),
    }[name]
    with pytest.raises(ArgumentError, match=r"^model must be a torch\.nn\.Module, got a str\.$"):
        call(model="x")
    if name != "full_state_dict":
        with pytest.raises(ArgumentError, match=r"^optimizer must be one torch\.optim.*None, got a Linear\.$"):
            call(model=model(), optimizer=model())
    assert steps(tmp_path) == []


def test_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint.save(tmp_path, model=model(), step=1)
    write = os.write

    def full(descriptor: int, data: Any) -> int:
        if len(data) > 20:
            raise OSError(28, "No space left on device")
        return write(descriptor, data)

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(CheckpointError, match=r"rank_00000\.bin could not be written: No space left on device"):
        checkpoint.save(tmp_path, model=model(), step=2, keep_last=1)
    assert steps(tmp_path) == ["step_00000001"]
    assert checkpoint.verify(tmp_path) == tmp_path / "step_00000001"


def test_a_tied_tensor_may_have_any_of_its_names(tmp_path: Path) -> None:
    saved = nn.ModuleDict({"b": nn.Linear(3, 3, bias=False)})
    folder = checkpoint.save(tmp_path, model=saved, step=1)
    model = nn.ModuleDict({"a": nn.Linear(3, 3, bias=False), "b": nn.Linear(3, 3, bias=False)})
    model["b"].weight = model["a"].weight
    checkpoint.load(folder, model=model)
    assert torch.equal(model["a"].weight, saved["b"].weight) and model["a"].weight is model["b"].weight


@pytest.mark.parametrize("advice", ["works", "fails"])
def test_large_files_are_written_to_the_disk_early(
    advice: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In pieces, of which each is on its way to the disk while the next is copied."""
    ranges, fadvise = [], os.posix_fadvise

    def advised(descriptor: int, first: int, nbytes: int, kind: int) -> None:
        assert kind == os.POSIX_FADV_DONTNEED and os.fstat(descriptor).st_size == first + nbytes
        if os.readlink(f"/proc/self/fd/{descriptor}").endswith(".bin"):
            ranges.append((first, nbytes))
        if advice == "fails":
            raise OSError(38, "Function not implemented")
        fadvise(descriptor, first, nbytes, kind)

    monkeypatch.setattr(os, "posix_fadvise", advised)
    monkeypatch.setattr(files, "CHUNK_BYTES", 1000)
    monkeypatch.setattr(storage, "WRITE_BACK_BYTES", 1000)
    net = nn.Linear(100, 70)
    folder = checkpoint.save(tmp_path, model=net, step=1)
    ends = [first + nbytes for first, nbytes in ranges]
    assert [0, *ends[:-1]] == [first for first, _ in ranges] and len(ranges) > 10
    assert (folder / "rank_00000.bin").stat().st_size - ends[-1] < 1000
    assert checkpoint.verify(folder)
    other = nn.Linear(100, 70)
    checkpoint.load(folder, model=other)
    assert torch.equal(other.weight, net.weight) and torch.equal(other.bias, net.bias)


def command(monkeypatch: pytest.MonkeyPatch, *arguments: Any) -> int:
    monkeypatch.setattr(sys, "argv", ["unshard", *map(str, arguments)])
    return cli.main()


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    net = model()
    folder = checkpoint.save(tmp_path, model=net, optimizer=torch.optim.SGD(net.parameters()), step=4)
    assert command(monkeypatch, "checkpoint", "verify", tmp_path) == 0
    assert f"{folder} is complete" in capsys.readouterr().out
    assert command(monkeypatch, "checkpoint", "inspect", folder) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].startswith("step 4, saved by 1 rank; 2 tensors, 128 bytes")
    rows = [line.split() for line in lines if line.startswith("model/")]
    assert rows == [["model/bias", "float32", "2", "8", "1", "0"], ["model/weight", "float32", "2x3", "24", "1", "0"]]
    (folder / "rank_00000.bin").write_bytes(b"")
    assert command(monkeypatch, "checkpoint", "verify", tmp_path) == 1
    assert "has 0 bytes, expected 128" in capsys.readouterr().err
