"""Checkpoints across hosts whose folders are shared, private, or stale on one host."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from bed.hosts import HostPool, hosts
from bed.stack import Stack, loss_of, sharded
from torch import Tensor

from unshard import checkpoint
from unshard.errors import CheckpointError, OrderError

PATH = "checkpoints"  # under the folder of a host: the same path, and another disk


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HostPool]:
    with hosts(2, 2, tmp_path_factory.mktemp("hosts")) as bed:
        made = HostPool(bed, grace=60)
        yield made
        made.close()


@pytest.fixture
def disks(pool: HostPool, tmp_path: Path) -> list[Path]:
    """A folder for each host."""
    found = [tmp_path / f"disk{host}" for host in range(pool.bed.count)]
    for each in found:
        each.mkdir()
    return found


class Run:
    def __init__(self, lr: float = 0.1) -> None:
        self.model = sharded(Stack())
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr)

    def train(self, step: int) -> None:
        loss_of(self.model, step).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def parts(self) -> dict[str, object]:
        return {"model": self.model, "optimizer": self.optimizer}

    def local(self) -> list[Tensor]:
        states = [value for state in self.optimizer.state.values() for value in state.values()]
        return [getattr(each, "_local_tensor", each).detach().clone() for each in [*self.model.parameters(), *states]]


def enter(disks: list[Path]) -> None:
    os.chdir(disks[dist.get_rank() // 2])


def same(ones: list[Tensor], others: list[Tensor]) -> bool:
    return len(ones) == len(others) > 0 and all(torch.equal(a, b) for a, b in zip(ones, others, strict=True))


def save_and_load(disks: list[Path], lr: float = 0.1) -> None:
    enter(disks)
    run, other = Run(lr), Run()
    for step in (1, 2):
        run.train(step)
        checkpoint.save(PATH, step=step, **run.parts())
    with checkpoint.Saver(PATH, keep_last=2) as saver:
        run.train(3)
        saver.save(step=3, **run.parts())
    assert checkpoint.latest(PATH) == Path(PATH, "step_00000003")
    assert checkpoint.load(PATH, **other.parts()) == 3
    assert same(run.local(), other.local())


def test_a_shared_folder(pool: HostPool, disks: list[Path]) -> None:
    pool.run(save_and_load, 4, {"disks": [disks[0], disks[0]]})
    assert [each.name for each in sorted((disks[0] / PATH).iterdir())] == ["step_00000002", "step_00000003"]


def fail(disks: list[Path], call: Callable[[Run], object]) -> str:
    """The error of a call, after which the run is what it was, and goes on."""
    enter(disks)
    run = Run()
    run.train(1)
    before = run.local()
    with pytest.raises((CheckpointError, OrderError)) as caught:
        call(run)
    assert same(run.local(), before)
    return str(caught.value)


def save(run: Run) -> None:
    checkpoint.save(PATH, step=5, **run.parts())


def save_in_background(run: Run) -> None:
    saver = checkpoint.Saver(PATH)
    saver.save(step=5, **run.parts())
    saver.wait()


@pytest.mark.parametrize("call", [save, save_in_background])
def test_saving_to_private_folders(pool: HostPool, disks: list[Path], call: Callable[[Run], object]) -> None:
    """One error on all ranks, which says who does not see what. No folder of a checkpoint stays on any disk."""
    texts = pool.run(fail, 4, {"disks": disks, "call": call})
    for text in texts:
        assert text.startswith(
            "Saving step 5 to checkpoints failed. On ranks 2, 3 (host1): checkpoints/.saving_step_00000005_"
        )
        assert "does not exist on host1, but rank 0 sees it. All ranks must see the same files" in text
    assert not any([*(disk / PATH).glob("*")] for disk in disks)


def load(run: Run) -> None:
    checkpoint.load(PATH, **run.parts())


def load_latest(run: Run) -> None:
    checkpoint.load(checkpoint.latest(PATH), **run.parts())


def load_if_there_is_one(run: Run) -> None:
    if checkpoint.latest(PATH):
        checkpoint.load(PATH, **run.parts())
    run.train(1)


def make_stale(disks: list[Path], stale: int, steps: list[int]) -> None:
    """Give both hosts the same checkpoints, except that one has only those of `steps`."""
    shutil.copytree(disks[0] / PATH, disks[1] / PATH)
    for each in (disks[stale] / PATH).iterdir():
        if int(each.name.removeprefix("step_")) not in steps:
            shutil.rmtree(each)


AHEAD = "host1 sees step_00000003 in checkpoints, and rank 0 on host0 does not"
NOT_SEEN = (
    r"On ranks 2, 3 \(host1\): checkpoints/step_00000003/manifest.json does not exist on host1, but rank 0 sees it"
)
READERS = "one by rank 0 on host0, rank 1 on host0; one by rank 2 on host1, rank 3 on host1"


@pytest.mark.parametrize(
    ("stale", "steps", "call", "error"),
    [
        (0, [2], load, AHEAD),
        (1, [2], load, NOT_SEEN),
        (1, [], load, NOT_SEEN),
        (0, [], load, r"On rank 0 \(host0\): There is no checkpoint in checkpoints"),
        (0, [2], load_latest, f"different checkpoints: {READERS}"),
        (1, [2], load_latest, NOT_SEEN),
        (1, [], load_if_there_is_one, "wants to .*load a checkpoint"),
    ],
)
def test_loading_when_one_host_sees_an_older_folder(
    pool: HostPool, disks: list[Path], stale: int, steps: list[int], call: Callable[[Run], object], error: str
) -> None:
    pool.run(save_and_load, 4, {"disks": [disks[0], disks[0]]})
    make_stale(disks, stale, steps)
    for text in pool.run(fail, 4, {"disks": disks, "call": call}):
        assert re.search(error, text), text


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("manifest.json", f"different manifests in checkpoints/step_00000003: {READERS}"),
        ("rank_00003.bin", "On rank 3 (host1): checkpoints/step_00000003/rank_00003.bin is damaged"),
    ],
)
def test_loading_when_one_host_sees_an_older_file(pool: HostPool, disks: list[Path], name: str, error: str) -> None:
    """That of another run: the manifest of the step, or only its data."""
    for each, lr in zip(disks, (0.1, 0.2), strict=True):
        pool.run(save_and_load, 4, {"disks": [each, each], "lr": lr})
    ours, theirs = ((disk / PATH / "step_00000003" / name).read_bytes() for disk in disks)
    assert ours != theirs
    shutil.rmtree(disks[1] / PATH)
    shutil.copytree(disks[0] / PATH, disks[1] / PATH)
    (disks[1] / PATH / "step_00000003" / name).write_bytes(theirs)
    for text in pool.run(fail, 4, {"disks": disks, "call": load}):
        assert error in text, text


def use_private_files(disks: list[Path]) -> None:
    enter(disks)
    package = pytest.importorskip("safetensors.torch")
    run, other, third = Run(), Run(), Run()
    run.train(1)
    rank, weights = dist.get_rank(), checkpoint.full_state_dict(run.model, rank0_only=False)
    state = [checkpoint.full_state_dict(run.model), checkpoint.full_optimizer_state_dict(run.model, run.optimizer)]
    if rank == 0:
        torch.save(state, "full.pt")
    if rank in (0, 2):  # a copy for each host
        package.save_file(weights, "model.safetensors")
    dist.barrier()
    model, optimizer = torch.load("full.pt") if rank == 0 else (None, None)
    checkpoint.load_full_state_dict(other.model, model)
    checkpoint.load_full_optimizer_state_dict(other.model, other.optimizer, optimizer)
    assert same(run.local(), other.local())
    checkpoint.load_safetensors(third.model, "model.safetensors")
    assert same([each.to_local() for each in run.model.parameters()], third.local())
    if rank == 2:
        package.save_file({name: value.double() for name, value in weights.items()}, "model.safetensors")
    dist.barrier()
    with pytest.raises(CheckpointError, match=re.escape(f"different files in model.safetensors: {READERS}")):
        checkpoint.load_safetensors(third.model, "model.safetensors")


@pytest.mark.slow
def test_private_files(pool: HostPool, disks: list[Path]) -> None:
    """Only rank 0 reads and writes full state dicts, and each host may have a copy of safetensors files."""
    pool.run(use_private_files, 4, {"disks": disks})
    assert [(disk / "full.pt").exists() for disk in disks] == [True, False]


def become_another_user(disks: list[Path], umask: int) -> None:
    """Host 1 runs its ranks as another user, whose clock is a day behind."""
    os.umask(umask)
    host, now = dist.get_rank() // 2, time.time
    os.setgroups([])
    os.setgid(1001 + host)
    os.setuid(1001 + host)
    expected = (
        "later step than 1"
        if umask == 0
        else r"On rank 2 \(host1\): PermissionError: Permission denied \(checkpoints/.sav"
    )
    with mock.patch("time.time", lambda: now() - 86400 * host):
        if umask == 0:
            save_and_load(disks)
        with pytest.raises(CheckpointError, match=expected):
            save_and_load(disks)


@pytest.mark.slow
@pytest.mark.parametrize("umask", [0o000, 0o022], ids=oct)
def test_other_users_and_clocks(tmp_path: Path, umask: int) -> None:
    """Each rank must be able to write to the folder that rank 0 makes."""
    with tempfile.TemporaryDirectory() as folder, hosts(2, 2, tmp_path) as bed:
        os.chmod(folder, 0o777)
        pool = HostPool(bed)
        pool.run(become_another_user, 4, {"disks": [Path(folder)] * 2, "umask": umask})
        pool.close()
        owners = {each.stat().st_uid for each in Path(folder, PATH).glob("*/rank_*.bin")}
        assert owners == ({1001, 1002} if umask == 0 else set())
