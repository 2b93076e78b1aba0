"""A disk that is really full: a clear error on all ranks, the last checkpoint intact, and the space free again."""

from __future__ import annotations

import os
import re
import resource
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from bed import world
from bed.runs import Run, assert_same
from bed.world import mostly_slow

from unshard import CheckpointError, checkpoint

quiet = pytest.mark.filterwarnings("ignore")
PAGE = 4096
HOWS = ["save", "saver", "bounded"]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 2 MiB."""
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(tmp_path)], capture_output=True, text=True
    )
    if done.returncode:
        pytest.skip(f"no file system can be mounted here: {done.stderr}")
    try:
        yield tmp_path
    finally:
        subprocess.run(["umount", "--lazy", str(tmp_path)], check=True)


def free(path: Path) -> int:
    return os.statvfs(path).f_bavail * os.statvfs(path).f_frsize


def leave(path: Path, nbytes: int) -> None:
    """Fill the disk, on rank 0, until so many bytes are free."""
    if dist.get_rank() == 0:
        filler = path / "filler"
        filler.write_bytes(b"")
        filler.write_bytes(b"x" * (free(path) - nbytes))
        assert free(path) == nbytes
    dist.barrier()


def saves(how: str, path: Path, run: Run) -> Callable[[int], Any]:
    if how == "save":
        return lambda step: checkpoint.save(path, step=step, **run.parts())
    saver = checkpoint.Saver(path, host_bytes=1024 if how == "bounded" else None)

    def save(step: int) -> None:
        saver.save(step=step, **run.parts())
        saver.wait()

    return save


@quiet
@pytest.mark.parametrize("how", mostly_slow(HOWS, ["saver"]))
@world(2)
def test_a_full_disk(how: str, small_disk: Path) -> None:
    """With every number of free pages, a save is whole or not there."""
    path, run = small_disk / "checkpoints", Run("fully_shard")
    save = saves(how, path, run)
    run.train(range(1))
    save(1)
    state, outcomes = run.state(), []
    used = sum(-(-each.stat().st_size // PAGE) for each in path.rglob("*") if each.is_file())
    run.train(range(1, 2))
    for pages in range(used + 8):
        leave(small_disk, pages * PAGE)
        try:
            save(2)
        except CheckpointError as error:
            outcomes.append(False)
            assert re.match(rf"Saving step 2 to {path} failed\. On .*: .*{path}/\.saving_.*", str(error)), error
            assert "No space left on device" in str(error)
            if re.search(r"\.(bin|entry|json)", str(error)):
                assert re.search(r"after \d+ of \d+ bytes\. Its file system has \d+ bytes free\.", str(error)), error
            dist.barrier()  # rank 0 has deleted its folder
            assert [each.name for each in path.iterdir()] == ["step_00000001"]
            assert free(small_disk) == pages * PAGE
        else:
            outcomes.append(True)
            assert checkpoint.verify(path) == path / "step_00000002"
            dist.barrier()
            if dist.get_rank() == 0:
                shutil.rmtree(path / "step_00000002")
        dist.barrier()
    assert outcomes[0] is False and outcomes[-1] is True and outcomes == sorted(outcomes)
    assert checkpoint.load(path, **run.parts()) == 1
    assert_same(run.state(), state)


@quiet
@pytest.mark.parametrize("how", HOWS)
@world(2)
def test_a_file_that_may_not_grow(how: str, tmp_path: Path) -> None:
    """The same without a file system of its own: the limit of one rank stops its file in the middle."""
    run = Run("fully_shard")
    save = saves(how, tmp_path, run)
    run.train(range(1))
    save(1)
    nbytes = (tmp_path / "step_00000001" / "rank_00001.bin").stat().st_size
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if dist.get_rank() == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes // 2, limits[1]))
    try:
        with pytest.raises(CheckpointError) as caught:
            save(2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    expected = f"rank_00001.bin could not be written: File too large, after {nbytes // 2} of {nbytes} bytes. Its file"
    assert "On rank 1: " in str(caught.value) and expected in str(caught.value)
    dist.barrier()
    assert [each.name for each in tmp_path.iterdir()] == ["step_00000001"]
    save(2)
    assert checkpoint.verify(tmp_path) == tmp_path / "step_00000002"
