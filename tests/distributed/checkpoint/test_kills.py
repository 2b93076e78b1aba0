"""Ranks that are killed at random moments of saving. The next job loads the latest checkpoint, and is killed, too."""

from __future__ import annotations

import collections
import mmap
import os
import random
import re
import shutil
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from bed import pool
from bed.branches import quick
from bed.pool import JobFailed
from bed.runs import full
from torch import nn

from unshard import checkpoint, fully_shard
from unshard.checkpoint import folders
from unshard.checkpoint.host_buffers import Staging
from unshard.checkpoint.manifest import BlockChecksums
from unshard.checkpoint.save import Saving
from unshard.checkpoint.saver import BackgroundSave

RANKS, KEPT = 2, 2
BETWEEN = "between saves"


class Phases:
    """What each thread of a rank is doing, in a file that is there after the rank is killed: a line for each thread."""

    WIDTH = 32

    def __init__(self, path: Path):
        path.write_bytes(b" " * 2 * self.WIDTH)
        with path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), 0)
        self._saving = [BETWEEN, BETWEEN]

    def begin(self, saving: str, thread: int | None = None) -> None:
        """From now on this thread saves, or does not."""
        thread = self._thread() if thread is None else thread
        self._saving[thread] = saving
        self._write(thread, saving)

    def mark(self, owner: Any, name: str, phase: str) -> None:
        """While a function runs in a save, the phase is this one."""
        original = getattr(owner, name)

        def wrapper(*args: Any, **kwargs: Any) -> Any:
            thread = self._thread()
            if self._saving[thread] == BETWEEN:
                return original(*args, **kwargs)
            self._write(thread, phase)
            try:
                return original(*args, **kwargs)
            finally:
                self._write(thread, self._saving[thread])

        setattr(owner, name, wrapper)

    def _thread(self) -> int:
        return int(threading.current_thread().name == "unshard checkpoint")

    def _write(self, thread: int, text: str) -> None:
        self._memory[thread * self.WIDTH : (thread + 1) * self.WIDTH] = text.encode().ljust(self.WIDTH)

    @staticmethod
    def read(path: Path) -> str:
        """The phase of the thread that trains in a save, or else of the one that writes."""
        text = path.read_bytes().decode()
        training, writing = text[: Phases.WIDTH].strip(), text[Phases.WIDTH :].strip()
        return training if training != BETWEEN or writing in (BETWEEN, "") else f"thread: {writing}"


class Filled:
    """A run in which everything is equal to the step, so that a mixture of two steps is found."""

    def __init__(self) -> None:
        self.model = fully_shard(nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(4))))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), foreach=False)
        for parameter in self.model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        self.optimizer.step()
        self.position = 0

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]

    def parts(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer, "data": self}

    @torch.no_grad()
    def fill(self, step: int) -> None:
        self.position = step
        for parameter in self.model.parameters():
            parameter.fill_(step)
            for value in self.optimizer.state[parameter].values():
                value.fill_(step)

    def check(self, step: int) -> None:
        assert self.position == step
        for parameter in self.model.parameters():
            for value in (parameter, *self.optimizer.state[parameter].values()):
                assert torch.equal(full(value), torch.full(value.shape, float(step))), step


@quick()
def save_until_killed(path: str, how: str, notes: str) -> None:
    """Load what the job before has left, and save, until the end. `notes`: a folder for what the test has to know."""
    run, rank, phases = Filled(), dist.get_rank(), Phases(Path(notes, f"phases{dist.get_rank()}"))
    found = checkpoint.load(path, **run.parts()) if checkpoint.latest(path) else 0
    if found:
        run.check(found)
    save = _saves(path, how, run, phases)
    began = time.monotonic()
    save(found + 1)  # deletes what the job before has left
    seconds = time.monotonic() - began
    dist.barrier()
    assert left_in(path) == [f"step_{step:08d}" for step in (found, found + 1) if step]
    dist.barrier()
    for owner, name, phase in [
        *((Saving, "collect", "collect"), (Staging, "copy", "copy"), (os, "write", "write"), (os, "fsync", "fsync")),
        *((os, "rename", "rename"), (os, "mkdir", "mkdir"), (shutil, "rmtree", "delete")),
        *((dist, "all_gather_object", "exchange"), (folders, "read_manifest", "read manifests")),
        *((BlockChecksums, "update", "checksum"), (BackgroundSave, "_entry_from", "wait for entries")),
    ]:
        phases.mark(owner, name, phase)
    Path(notes, f"half{rank}").write_text(f"{os.getpid()} {seconds}")
    os.rename(Path(notes, f"half{rank}"), Path(notes, f"ready{rank}"))
    for step in range(found + 2, 10**6):
        save(step)
        Path(notes, f"saved{rank}").write_text(str(step))


def left_in(path: str | Path) -> list[str]:
    """Without empty folders, of a save that was killed between making its folder and its lock: they stay an hour."""
    return sorted(each.name for each in Path(path).iterdir() if any(each.iterdir()))


def _saves(path: str, how: str, run: Filled, phases: Phases) -> Callable[[int], None]:
    saver = (
        None
        if how == "save"
        else checkpoint.Saver(path, keep_last=KEPT, host_bytes=2**20 if how == "bounded" else None)
    )

    def save(step: int) -> None:
        run.fill(step)
        phases.begin("in save")
        if saver is None:
            checkpoint.save(path, step=step, keep_last=KEPT, **run.parts())
        else:
            phases.begin("in the thread", thread=1)
            saver.save(step=step, **run.parts())
            phases.begin(BETWEEN)
            run.fill(-step)  # training goes on
            saver.wait()
            phases.begin(BETWEEN, thread=1)
        phases.begin(BETWEEN)

    return save


def kill(notes: Path, ranks: list[int], when: random.Random) -> None:
    """As soon as all ranks are ready, and after a random time."""
    ready = [notes / f"ready{rank}" for rank in range(RANKS)]
    while not all(each.exists() for each in ready):
        if (notes / "ended").exists():
            return
        time.sleep(0.005)
    pids, seconds = zip(*(each.read_text().split() for each in ready), strict=True)
    time.sleep(when.uniform(0.0, 3 * float(seconds[0])))
    for rank in ranks:
        os.kill(int(pids[rank]), signal.SIGKILL)


def kill_once(path: Path, notes: Path, how: str, everyone: bool, seed: int) -> str:
    """Run a job until it is killed; returns the phase in which it was."""
    dice = random.Random(seed)
    ranks = list(range(RANKS)) if everyone else [dice.randrange(RANKS)]
    shutil.rmtree(notes, ignore_errors=True)
    notes.mkdir()
    killer = threading.Thread(target=kill, args=(notes, ranks, dice))
    killer.start()
    arguments = {"path": str(path), "how": how, "notes": str(notes)}
    try:
        with pytest.raises(JobFailed) as caught:
            pool.shared().run((__name__, "save_until_killed"), RANKS, arguments, filters=["ignore"])
    finally:
        (notes / "ended").touch()
        killer.join()
    for rank, text in caught.value.failures.items():
        expected = "killed by SIGKILL" if rank in ranks else rf"CheckpointError: .* waited for rank {ranks[0]}: "
        assert re.search(expected, text), f"rank {rank}:\n{text}"
    for each in path.glob("step_*"):
        checkpoint.verify(each)
    latest, saved = checkpoint.latest(path), [int(each.read_text() or 0) for each in notes.glob("saved*")]
    assert latest is not None and int(latest.name[5:]) >= max(saved, default=0)
    return Phases.read(notes / f"phases{ranks[0]}")


def go_on(path: str) -> None:
    run = Filled()
    step = checkpoint.load(path, **run.parts())
    run.check(step)
    checkpoint.save(path, step=step + 1, keep_last=1, **run.parts())


def kill_often(path: Path, how: Callable[[int], str], one: int, all_ranks: int) -> collections.Counter[str]:
    """One job after the other in one folder. Returns how many were killed in each phase."""
    phases: collections.Counter[str] = collections.Counter()
    everyone = [False] * one + [True] * all_ranks
    for seed in range(one + all_ranks):
        try:
            phases[kill_once(path / "saved", path / "notes", how(seed), everyone[seed], seed)] += 1
        except (Exception, pytest.fail.Exception) as error:
            who = "all ranks" if everyone[seed] else "one rank"
            raise AssertionError(
                f"{who}, {how(seed)}, seed {seed}; what this job has loaded is from seed {seed - 1}"
            ) from error
    pool.shared().run((__name__, "go_on"), RANKS, {"path": str(path / "saved")}, filters=["ignore"])
    (name,) = left_in(path / "saved")
    last = path / "saved" / name
    assert sorted(each.name for each in last.iterdir()) == ["manifest.json", "rank_00000.bin", "rank_00001.bin"]
    print(f"killed: {dict(phases)}")
    return phases


HOWS = {"save": ["save"], "saver": ["saver", "bounded"]}


@pytest.mark.parametrize("how", ["saver", pytest.param("save", marks=pytest.mark.slow)])
def test_some_kills(how: str, tmp_path: Path) -> None:
    kill_often(tmp_path, lambda seed: HOWS[how][-1], 1, 1)


@pytest.mark.slow
@pytest.mark.parametrize("how", HOWS)
def test_many_kills(how: str, tmp_path: Path) -> None:
    """25 times a random rank, 10 times all ranks; most of them while they save, in many phases."""
    phases = kill_often(tmp_path, lambda seed: HOWS[how][seed % len(HOWS[how])], 25, 10)
    assert phases[BETWEEN] <= 0.4 * phases.total() and len(phases) >= 4, phases
