"""A rank that fails, or dies, while a checkpoint is saved or loaded: all ranks raise, and the last one stays whole."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from bed import pool, world
from bed.branches import quick
from bed.damage import failing, flip
from bed.pool import JobFailed
from bed.runs import Run, assert_same
from torch import nn

from unshard import CheckpointError, checkpoint, fully_shard
from unshard.checkpoint.load import Loading

quiet = pytest.mark.filterwarnings("ignore")


def names(path: Path) -> list[str]:
    return sorted(each.name for each in path.iterdir())


@quiet
@pytest.mark.parametrize(("rank", "function"), [(1, "write"), (0, "write"), (0, "mkdir"), (0, "rename"), (2, "fsync")])
@world(3)
def test_a_rank_that_cannot_write(rank: int, function: str, tmp_path: Path) -> None:
    run = Run("fully_shard")
    run.train(range(1))
    checkpoint.save(tmp_path, step=1, **run.parts())
    state = run.state()
    run.train(range(1, 2))
    original = getattr(os, function)
    if dist.get_rank() == rank:
        setattr(os, function, failing(original, 2 if function == "mkdir" else 1))
    try:
        with pytest.raises(
            CheckpointError, match=rf"Saving step 2 to .* failed\. On rank {rank}: .*No space left on device"
        ):
            checkpoint.save(tmp_path, step=2, keep_last=1, **run.parts())
    finally:
        setattr(os, function, original)
    dist.barrier()
    assert names(tmp_path) == ["step_00000001"]
    checkpoint.load(tmp_path, **run.parts())
    assert_same(run.state(), state)
    checkpoint.save(tmp_path, step=2, keep_last=1, **run.parts())
    assert names(tmp_path) == ["step_00000002"]


class Odd:
    """Cannot be saved on rank 1."""

    def state_dict(self) -> dict[str, Any]:
        return {"reader": object() if dist.get_rank() == 1 else None, "rank": dist.get_rank()}

    def load_state_dict(self, state: Any) -> None: ...


@quiet
@world(2)
def test_state_that_one_rank_cannot_save(tmp_path: Path) -> None:
    model = fully_shard(nn.Linear(3, 3))
    with pytest.raises(CheckpointError, match=r"On rank 1: data/1\.reader is a builtins\.object"):
        checkpoint.save(tmp_path, model=model, data=Odd(), step=1)
    assert names(tmp_path) == []


@quiet
@world(3)
def test_ranks_that_pass_different_things(tmp_path: Path) -> None:
    model, rank = fully_shard(nn.Linear(3, 3)), dist.get_rank()
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    checkpoint.save(tmp_path, model=model, optimizer=optimizer, data=Ranked(same=True), step=1)
    before = model.weight.to_local().clone()
    for given in ({"optimizer": optimizer}, {"data": Ranked(same=True)}):
        with pytest.raises(CheckpointError, match=rf"rank 0 passed {next(iter(given))}, and rank 2 passed nothing"):
            checkpoint.load(tmp_path, model=model, **given if rank < 2 else {})
    with pytest.raises(CheckpointError, match="Besides the model, rank 0 passed nothing, and rank 1 passed data"):
        checkpoint.save(tmp_path, model=model, data=Ranked(same=True) if rank else None, step=2)
    assert torch.equal(model.weight.to_local(), before)
    assert names(tmp_path) == ["step_00000001"]


class Ranked:
    """Its state differs between ranks, and nothing says how to deal it out to another number of them."""

    def __init__(self, same: bool) -> None:
        self.same, self.loaded = same, None

    def state_dict(self) -> dict[str, Any]:
        return {"seen": 12 if self.same else dist.get_rank()}

    def load_state_dict(self, state: Any) -> None:
        self.loaded = state


def save_data(path: str) -> None:
    for same in (False, True):
        checkpoint.save(Path(path, str(same)), model=fully_shard(nn.Linear(3, 3)), data=Ranked(same), step=1)


def load_data(path: str) -> None:
    model, data = fully_shard(nn.Linear(3, 3)), Ranked(True)
    with pytest.raises(CheckpointError, match=r"data was saved by 2 ranks.*load_state_dicts"):
        checkpoint.load(Path(path, "False"), model=model, data=data)
    assert data.loaded is None
    checkpoint.load(Path(path, "True"), model=model, data=data)
    assert data.loaded == {"seen": 12}
    draws: list[Any] = [None] * dist.get_world_size()
    for _ in range(2):
        checkpoint.load(Path(path, "True"), model=model)
        before = draws
        draws = [None] * dist.get_world_size()
        dist.all_gather_object(draws, torch.rand(2).tolist())
    assert draws == before and draws[2] not in draws[:2]  # a new rank has seeds of its own


def test_data_of_another_number_of_ranks(tmp_path: Path) -> None:
    start(save_data, 2, path=str(tmp_path))
    start(load_data, 3, path=str(tmp_path))


@quiet
@pytest.mark.parametrize("damage", ["flip", "truncate", "remove"])
@world(2, 3)
def test_damage_that_one_rank_sees(damage: str, tmp_path: Path) -> None:
    """All ranks raise the same, those that read other files as well, and none has changed anything."""
    run = Run("fully_shard")
    run.train(range(2))
    folder = checkpoint.save(tmp_path, step=2, **run.parts())
    run.train(range(2, 3))
    state, drawn = run.state(), torch.get_rng_state()
    dist.barrier()
    if dist.get_rank() == 0:
        path = folder / "rank_00001.bin"
        if damage == "flip":
            flip(path, 3)
        elif damage == "truncate":
            os.truncate(path, 100)
        else:
            path.unlink()
    dist.barrier()
    with pytest.raises(CheckpointError, match=r"rank_00001\.bin .*(model|optimizer)/") as caught:
        checkpoint.load(tmp_path, **run.parts())
    messages: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(messages, str(caught.value))
    assert len(set(messages)) == 1
    assert_same(run.state(), state)
    assert torch.equal(torch.get_rng_state(), drawn)


# -- ranks that die -----------------------------------------------------------------------------------------------


@quick()
def die_while_saving(path: str, rank: int, function: str, at: int) -> None:
    """Save steps 1 and 2; the rank kills itself at the `at`th call of a function of `os` in the second."""
    run = Run("fully_shard")
    run.train(range(1))
    checkpoint.save(path, step=1, **run.parts())
    run.train(range(1, 2))
    original, calls = getattr(os, function), 0

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == at and dist.get_rank() == rank:
            if function == "write":
                original(args[0], args[1][: len(args[1]) // 2])
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*args, **kwargs)

    setattr(os, function, wrapper)
    try:
        checkpoint.save(path, step=2, keep_last=1, **run.parts())
    finally:
        setattr(os, function, original)


def go_on(path: str, step: int) -> None:
    """The next job: loads the latest, and saves."""
    run = Run("fully_shard")
    found = checkpoint.load(path, **run.parts())
    assert found >= step and run.data.position == found
    checkpoint.save(path, step=found + 100, keep_last=1, **run.parts())


def start(body: Any, size: int, **arguments: Any) -> None:
    pool.shared().run((body.__module__, body.__qualname__), size, arguments, filters=["ignore"])


def check_after_death(path: Path) -> None:
    """The last published checkpoint is whole, and the next job leaves nothing behind besides its own."""
    found = checkpoint.verify(path)
    assert found == checkpoint.latest(path)
    public = [each for each in names(path) if not each.startswith(".")]
    assert all(checkpoint.verify(path / each) for each in public)
    start(go_on, 2, path=str(path), step=int(found.name[5:]))
    assert names(path) == [f"step_{int(found.name[5:]) + 100:08d}"]
    assert names(path / names(path)[0]) == ["manifest.json", "rank_00000.bin", "rank_00001.bin"]


def lost(rank: int) -> str:
    """What the other rank says."""
    return rf"Rank {1 - rank} wanted to .* waited for rank {rank}: rank {rank} has shown .* checkpoints are intact\."


MOMENTS = [
    *((0, "write", at) for at in (1, 2, 9)),
    *((1, "write", at) for at in (1, 5)),
    *((0, "fsync", at) for at in (1, 2, 3, 4, 5)),
    *((1, "fsync", at) for at in (1, 2)),
    *((0, "rename", at) for at in (1, 2)),
    *((0, "mkdir", 1), (0, "unlink", 1), (0, "unlink", 2)),
]
QUICK = {(1, "write", 1), (0, "rename", 1)}


@pytest.mark.parametrize(
    ("rank", "function", "at"),
    [pytest.param(*each, marks=() if each in QUICK else pytest.mark.slow) for each in MOMENTS],
)
def test_a_rank_that_is_killed(rank: int, function: str, at: int, tmp_path: Path) -> None:
    with pytest.raises(JobFailed) as caught:
        start(die_while_saving, 2, path=str(tmp_path), rank=rank, function=function, at=at)
    assert re.search(rf"CheckpointError: Saving step 2 to .* failed\. {lost(rank)}", caught.value.failures[1 - rank])
    check_after_death(tmp_path)


@quick()
def die_while_loading(path: str, where: str) -> None:
    """Rank 1 dies in one of the stages."""
    run = Run("fully_shard")
    run.train(range(1))
    checkpoint.save(path, step=1, **run.parts())
    if dist.get_rank() == 1:
        setattr(Loading, where, lambda *unused: os.kill(os.getpid(), signal.SIGKILL))
    checkpoint.load(path, **run.parts())


@pytest.mark.parametrize("where", ["compare", "verify", pytest.param("apply_tensors", marks=pytest.mark.slow)])
def test_a_rank_that_is_killed_while_it_loads(where: str, tmp_path: Path) -> None:
    with pytest.raises(JobFailed) as caught:
        start(die_while_loading, 2, path=str(tmp_path), where=where)
    assert re.search(rf"CheckpointError: Loading {tmp_path} failed\. {lost(1)}", caught.value.failures[0])
    assert checkpoint.verify(tmp_path)


@quick()
def die_while_exchanging(loads: bool) -> None:
    """Rank 2 dies between two tensors."""
    model = fully_shard(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)))
    if dist.get_rank() == 2:
        target = f"unshard.checkpoint.full_state_dict.{'fill' if loads else '_send'}"
        mock.patch(target, lambda *unused: os.kill(os.getpid(), signal.SIGKILL)).start()
    if loads:
        checkpoint.load_full_state_dict(model, nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)).state_dict())
    checkpoint.full_state_dict(model, rank0_only=False)


@pytest.mark.parametrize("loads", [False, True])
def test_a_rank_that_is_killed_while_tensors_are_exchanged(loads: bool) -> None:
    """Both others name it, whichever collective of theirs fails, and with which of the backend's messages."""
    with pytest.raises(JobFailed) as caught:
        start(die_while_exchanging, 3, loads=loads)
    what = "load a full state dict" if loads else "gather the full state dict"
    for rank in range(2):
        expected = (
            rf"CheckpointError: .* failed\. Rank {rank} wanted to {what}, .* waited for rank 2: rank 2 has shown no"
        )
        assert re.search(expected, caught.value.failures[rank]), caught.value.failures


@quick()
def die_before_saving(path: str) -> None:
    model = fully_shard(nn.Linear(3, 3))
    model(torch.ones(1, 3)).sum().backward()
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    checkpoint.save(path, model=model, step=1)


@pytest.mark.slow  # starts workers of its own
def test_a_rank_that_is_killed_before_the_others_save(tmp_path: Path) -> None:
    """They do not wait for it until the timeout, although they compare the call before its first collective."""
    workers = pool.Pool(grace=60)
    try:
        with pytest.raises(JobFailed) as caught:
            workers.run((__name__, "die_before_saving"), 2, {"path": str(tmp_path)}, filters=["ignore"])
    finally:
        workers.close()
    assert re.search(lost(1), caught.value.failures[0]), caught.value.failures


# -- ranks that die while a thread saves ---------------------------------------------------------------------------


@quick()
def die_in_background(path: str, rank: int, function: str, at: int, trains: bool) -> None:
    """As `die_while_saving`, in the thread of a saver."""
    run = Run("fully_shard")
    run.train(range(1))
    with checkpoint.Saver(path, keep_last=1, host_bytes=1024) as saver:
        saver.save(step=1, **run.parts())
        saver.wait()
        run.train(range(1, 2))
        original, calls = getattr(os, function), 0

        def wrapper(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            if threading.current_thread().name == "unshard checkpoint":
                calls += 1
                if calls == at and dist.get_rank() == rank:
                    if function == "write":
                        original(args[0], args[1][: len(args[1]) // 2])
                    os.kill(os.getpid(), signal.SIGKILL)
            return original(*args, **kwargs)

        setattr(os, function, wrapper)
        try:
            saver.save(step=2, **run.parts())
            for step in range(2, 100 if trains else 2):
                run.train(range(step, step + 1))
            saver.wait()
        finally:
            setattr(os, function, original)


BACKGROUND_MOMENTS = [
    *((0, "write", at) for at in (1, 9)),
    *((1, "write", at) for at in (1, 5)),
    *((0, "fsync", at) for at in (1, 2, 3, 4, 5)),
    *((1, "fsync", at) for at in (1, 2)),
    *((0, "rename", at) for at in (1, 2, 3)),
    *((1, "rename", 1), (0, "unlink", 1), (0, "unlink", 3)),
]


@pytest.mark.parametrize(
    ("rank", "function", "at"),
    [pytest.param(*each, marks=() if each in QUICK else pytest.mark.slow) for each in BACKGROUND_MOMENTS],
)
def test_a_rank_that_is_killed_while_its_thread_saves(rank: int, function: str, at: int, tmp_path: Path) -> None:
    """The collective that fails is one of training, or of the saver."""
    trains = at % 2 == 0
    with pytest.raises(JobFailed) as caught:
        start(die_in_background, 2, path=str(tmp_path), rank=rank, function=function, at=at, trains=trains)
    if not trains:
        assert re.search(
            rf"CheckpointError: Saving step 2 to .* failed\. {lost(rank)}", caught.value.failures[1 - rank]
        )
    check_after_death(tmp_path)


@pytest.mark.parametrize("failing_rename", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_program_that_ends_without_wait(failing_rename: bool, tmp_path: Path) -> None:
    program = f"""
import os, time
from torch import nn
from unshard import checkpoint

def rename(*args, rename=os.rename):
    time.sleep(0.5)
    if {failing_rename}:
        raise OSError(28, "No space left on device")
    rename(*args)

saver = checkpoint.Saver({str(tmp_path)!r})
os.rename = rename
saver.save(model=nn.Linear(3, 3), step=4)
if os.fork() == 0:
    raise SystemExit  # a forked process neither waits for the thread nor deletes what it writes
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert names(tmp_path) == ([] if failing_rename else ["step_00000004"])
    expected = "Saving step 4 to .* failed, and the program exits without wait.*No space left on device"
    assert bool(re.search(expected, done.stderr)) == failing_rename
