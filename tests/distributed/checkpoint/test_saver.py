"""Saving in the background: the same files as `save` writes, of the moment of the call, with bounded host memory."""

from __future__ import annotations

import gc
import os
import re
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy
import pytest
import torch
import torch.distributed as dist
from bed import world
from bed.damage import failing
from bed.runs import Run, assert_same
from torch import nn

from unshard import CheckpointError, checkpoint, fully_shard
from unshard.checkpoint import saver as saver_module
from unshard.checkpoint.host_buffers import HostBuffer
from unshard.checkpoint.manifest import read_manifest
from unshard.checkpoint.saver import Saver
from unshard.comm.order.check import known_orders
from unshard.errors import ArgumentError

quiet = pytest.mark.filterwarnings("ignore")
KINDS = [
    *("fully_shard", "fully_shard mixed,flat", "fully_shard offload", "fully_shard columns convolution"),
    *("flat", "flat channels convolution", "originals tied,sgd"),
]


def names(path: Path) -> list[str]:
    return sorted(each.name for each in path.iterdir())


def in_background() -> bool:
    return threading.current_thread().name == "unshard checkpoint"


@contextmanager
def held_back(function: str = "write") -> Iterator[threading.Event]:
    """The threads of savers wait before a function of `os` until the event is set."""
    original, event = getattr(os, function), threading.Event()

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if in_background():
            assert event.wait(60)
        return original(*args, **kwargs)

    setattr(os, function, wrapper)
    try:
        yield event
    finally:
        event.set()
        setattr(os, function, original)


def assert_equal_folders(found: Path, expected: Path) -> None:
    """Byte by byte; the manifests differ in the step only."""
    assert names(found) == names(expected)
    for name in names(expected):
        if name.endswith(".bin"):
            assert (found / name).read_bytes() == (expected / name).read_bytes(), name
    one, other = read_manifest(found), read_manifest(expected)
    assert (one.files, one.aliases, one.values) == (other.files, other.aliases, other.values)
    for name, entry in other.tensors.items():
        assert replace(one.tensors[name], boxes=entry.boxes) == entry
        assert list(one.tensors[name].boxes) == list(entry.boxes) != []
    assert one.tensors.keys() == other.tensors.keys()


@quiet
@pytest.mark.parametrize("host_bytes", [None, 192, 1000])
@pytest.mark.parametrize("kind", KINDS)
@world(1, 2, 3, slow=(1, 3))
def test_the_files_are_those_of_save(kind: str, host_bytes: int | None, tmp_path: Path) -> None:
    run = Run(kind)
    run.train(range(2))
    checkpoint.save(tmp_path / "a", step=2, **run.parts())
    saver = Saver(tmp_path / "b", host_bytes=host_bytes)
    saver.save(step=2, **run.parts())
    assert saver.wait() == tmp_path / "b" / "step_00000002"
    assert saver.wait() is None
    assert_equal_folders(tmp_path / "b" / "step_00000002", tmp_path / "a" / "step_00000002")
    assert names(tmp_path / "b") == ["step_00000002"]
    if host_bytes is not None:
        assert 0 < saver.host_bytes <= host_bytes
    run.train(range(2, 3))  # other bytes in the same buffers
    checkpoint.save(tmp_path / "a", step=3, **run.parts())
    saver.save(step=3, **run.parts())
    saver.wait()
    assert_equal_folders(tmp_path / "b" / "step_00000003", tmp_path / "a" / "step_00000003")


@quiet
@pytest.mark.parametrize("kind", ["fully_shard", "flat offload", "originals", "fully_shard mixed,flat"])
@world(1, 2, 4, slow=(1, 4))
def test_changes_after_save_do_not_reach_the_checkpoint(kind: str, tmp_path: Path) -> None:
    run = Run(kind)
    run.train(range(2))
    state, order = run.state(), run.data.order.clone()
    saver = Saver(tmp_path)
    with held_back() as event:
        saver.save(step=2, **run.parts())
        run.data.order.zero_()
        run.train(range(2, 4))
        with torch.no_grad():
            for tensor in (*run.model.parameters(), *run.model.buffers()):
                tensor.fill_(7)
        for group in run.optimizer.param_groups:
            group["lr"] = 7.0
        assert checkpoint.latest(tmp_path) is None
        event.set()
        saver.wait()
    checkpoint.load(tmp_path, **run.parts())
    assert_same(run.state(), state)
    assert torch.equal(run.data.order, order)


@quiet
@world(1, 3)
def test_training_goes_on_while_the_thread_writes(tmp_path: Path) -> None:
    """Collectives of training run between those of the save, and the thread has none of its own."""
    run = Run("fully_shard")
    run.train(range(1))
    with Saver(tmp_path, keep_last=2) as saver:
        with held_back("fsync") as event:
            saver.save(step=1, **run.parts())
            run.train(range(1, 2))
            assert names(tmp_path)[0].startswith(".saving")
            event.set()
            saver.wait()
        for step in range(2, 6):
            saver.save(step=step, **run.parts())
            run.train(range(step, step + 1))
    assert names(tmp_path) == ["step_00000004", "step_00000005"]
    for each in names(tmp_path):
        assert checkpoint.verify(tmp_path / each)
    with pytest.raises(CheckpointError, match="exists already"):
        saver.save(step=5, **run.parts())
    saver.save(step=6, **run.parts())
    assert saver.wait() == tmp_path / "step_00000006"


@quiet
@world(2)
def test_it_is_published_without_wait(tmp_path: Path) -> None:
    run = Run("fully_shard")
    saver = Saver(tmp_path)
    saver.save(step=1, **run.parts())
    for _ in range(3000):
        if checkpoint.latest(tmp_path) is not None:
            break
        threading.Event().wait(0.02)
    assert checkpoint.latest(tmp_path) == tmp_path / "step_00000001"
    saver.wait()


@quiet
@world(1, 2, slow=(1,))
def test_buffers_are_made_once(tmp_path: Path) -> None:
    run = Run("fully_shard")
    saver = Saver(tmp_path)
    run.train(range(1))
    saver.prepare(**run.parts())
    made, nbytes = list(saver._buffers.buffers), saver.host_bytes
    assert nbytes > 0 and names(tmp_path) == []
    for step in (1, 2):
        saver.save(step=step, **run.parts())
        saver.wait()
        assert saver._buffers.buffers == made and saver.host_bytes == nbytes
    larger = fully_shard(nn.Linear(20000, 3))
    saver.save(step=3, model=larger)
    saver.wait()
    assert saver.host_bytes > nbytes
    assert checkpoint.load(tmp_path, model=larger) == 3


def memory_of(buffer: HostBuffer) -> int:
    """Bytes of a buffer that the system has given, in whole pages."""
    found, inside = 0, False
    address = buffer.tensor.data_ptr()
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if match := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            inside = int(match[1], 16) <= address < int(match[2], 16)
        elif inside and line.startswith("Rss:"):
            found += int(line.split()[1]) * 1024
    return found


@quiet
@pytest.mark.parametrize("host_bytes", [None, 2**22])
@world(1, 2, slow=(1,))
def test_prepare_does_not_block_training(host_bytes: int | None, tmp_path: Path) -> None:
    """A thread makes the memory; `wait` and `save` wait for it."""
    model, saver = fully_shard(nn.Linear(2**20, 8)), Saver(tmp_path, host_bytes=host_bytes)
    touch, event = HostBuffer.touch, threading.Event()

    def touch_later(buffer: HostBuffer) -> None:
        assert event.wait(60)
        touch(buffer)

    HostBuffer.touch = touch_later  # type: ignore[method-assign]
    try:
        saver.prepare(model=model)
        expected = saver.host_bytes
        assert expected == host_bytes or expected >= 2**25 // dist.get_world_size()
        assert not any(map(memory_of, saver._buffers.buffers))
        event.set()
        saver.wait()
    finally:
        HostBuffer.touch = touch  # type: ignore[method-assign]
        event.set()
    assert all(memory_of(each) >= each.nbytes for each in saver._buffers.buffers)
    saver.save(step=1, model=model)
    saver.wait()
    assert saver.host_bytes == expected
    assert checkpoint.load(tmp_path, model=model) == 1


@quiet
@world(1, 2, slow=(1,))
def test_a_bound_on_host_memory(tmp_path: Path) -> None:
    """A file of many times the bound is written in pieces of half of it."""
    model, bound = fully_shard(nn.Linear(4096, 8)), 16384
    sizes: list[int] = []
    write, saver = os.write, Saver(tmp_path, host_bytes=bound)

    def counted(descriptor: int, data: Any) -> int:
        if os.readlink(f"/proc/self/fd/{descriptor}").endswith(".bin"):
            sizes.append(len(data))
        return write(descriptor, data)

    os.write = counted
    try:
        saver.save(step=1, model=model)
        saver.wait()
    finally:
        os.write = write
    assert saver.host_bytes == bound
    assert [each.tensor.untyped_storage().nbytes() for each in saver._buffers.buffers] == [bound // 2] * 2
    assert set(sizes[:-1]) == {bound // 2} and len(sizes) >= 4096 * 8 * 4 // dist.get_world_size() // (bound // 2)
    assert checkpoint.load(tmp_path, model=model) == 1


@quiet
@pytest.mark.parametrize("host_bytes", [None, 256])
@pytest.mark.parametrize(
    ("rank", "function", "at"),
    [
        *((1, "write", 1), (0, "write", 1), (0, "rename", 1), (2, "fsync", 1), (1, "rename", 1)),
        (0, "rename", 2),  # the first is that of its entry, the second publishes
    ],
)
@world(3)
def test_a_rank_that_cannot_write(rank: int, function: str, at: int, host_bytes: int | None, tmp_path: Path) -> None:
    run = Run("fully_shard")
    run.train(range(1))
    saver = Saver(tmp_path, keep_last=1, host_bytes=host_bytes)
    saver.save(step=1, **run.parts())
    saver.wait()
    state = run.state()
    expected = rf"Saving step 2 to .* failed\. On rank {rank}: .*No space left on device"
    for again in (saver.wait, lambda: saver.save(step=3, **run.parts())):
        original = getattr(os, function)
        run.train(range(1, 2))
        if dist.get_rank() == rank:
            setattr(os, function, failing(original, at))
        try:
            saver.save(step=2, **run.parts())
            with pytest.raises(CheckpointError, match=expected) as caught:
                again()
        finally:
            setattr(os, function, original)
        texts: list[Any] = [None] * 3
        dist.all_gather_object(texts, str(caught.value))
        assert len(set(texts)) == 1 and texts[0].count("On rank") == 1
        assert names(tmp_path) == ["step_00000001"]
        assert saver.wait() is None
        dist.barrier()
    checkpoint.load(tmp_path, **run.parts())
    assert_same(run.state(), state)
    saver.save(step=2, **run.parts())
    saver.wait()
    assert names(tmp_path) == ["step_00000002"] and checkpoint.verify(tmp_path)


@quiet
@world(2)
def test_a_rank_that_cannot_copy(tmp_path: Path) -> None:
    run = Run("fully_shard")
    saver = Saver(tmp_path)
    if dist.get_rank() == 1:
        saver._buffers.reserve = failing(saver._buffers.reserve, 1)  # type: ignore[method-assign]
    saver.save(step=1, **run.parts())
    with pytest.raises(CheckpointError, match=r"Saving step 1 to .* failed\. On rank 1: .*No space left"):
        saver.wait()
    dist.barrier()  # rank 0 has deleted its folder
    assert names(tmp_path) == []
    saver.save(step=1, **run.parts())
    assert saver.wait() == tmp_path / "step_00000001"


@quiet
@pytest.mark.parametrize("host_bytes", [192, 1000])
@world(1, 2, slow=(1,))
def test_a_slow_disk(host_bytes: int, tmp_path: Path) -> None:
    """A buffer is filled again after it is written, not before."""
    run, write = Run("fully_shard"), os.write
    run.train(range(1))
    checkpoint.save(tmp_path / "a", step=1, **run.parts())
    run.data.order = run.data.order[:100]  # not too many pieces
    checkpoint.save(tmp_path / "a", step=2, **run.parts())

    def write_later(*args: Any) -> int:
        if in_background():
            time.sleep(0.002)
        return write(*args)

    os.write = write_later
    try:
        with Saver(tmp_path / "b", host_bytes=host_bytes) as saver:
            saver.save(step=2, **run.parts())
    finally:
        os.write = write
    assert_equal_folders(tmp_path / "b" / "step_00000002", tmp_path / "a" / "step_00000002")


@quiet
@pytest.mark.parametrize("how", ["save", "saver"])
@world(1, 2, slow=(1,))
def test_what_is_on_the_disk_before_a_folder_gets_its_name(how: str, tmp_path: Path) -> None:
    """Each file after its last byte, then its folder; after the rename, the folder above."""
    run, calls, originals = Run("fully_shard"), [], (os.fsync, os.rename, os.write)

    def note(name: str, target: str) -> None:
        calls.append((name, re.sub(r"\.saving_step_\w+", "hidden", target)))

    def fsync(descriptor: int) -> None:
        originals[0](descriptor)
        note("fsync", os.path.relpath(os.readlink(f"/proc/self/fd/{descriptor}"), tmp_path))

    def rename(source: Path, target: Path) -> None:
        originals[1](source, target)
        note("rename", os.path.relpath(target, tmp_path))

    def write(descriptor: int, data: Any) -> int:
        target = os.readlink(f"/proc/self/fd/{descriptor}")
        if target.startswith(str(tmp_path)):
            note("write", os.path.relpath(target, tmp_path))
        return originals[2](descriptor, data)

    os.fsync, os.rename, os.write = fsync, rename, write
    try:
        if how == "save":
            checkpoint.save(tmp_path, step=1, **run.parts())
        else:
            with Saver(tmp_path) as saver:
                saver.save(step=1, **run.parts())
    finally:
        os.fsync, os.rename, os.write = originals
    rank = dist.get_rank()
    mine = [(name, target) for name, target in calls if not target.endswith(".entry")]
    files = [f"hidden/rank_{rank:05d}.bin", *(["hidden/manifest.json"] if rank == 0 else [])]
    expected: list[tuple[str, str]] = []
    for each in files:
        expected += [("write", each), ("fsync", each), ("fsync", "hidden")]
    expected += [("rename", "step_00000001"), ("fsync", ".")] if rank == 0 else []
    assert [each for number, each in enumerate(mine) if number == 0 or each != mine[number - 1]] == expected
    entry = ("rename", f"hidden/rank_{rank:05d}.entry")
    if how == "saver":
        assert calls.index(entry) > calls.index(("fsync", "hidden"))


@quiet
@world(1, 2, slow=(1,))
def test_the_model_may_be_deleted_while_the_thread_writes(tmp_path: Path) -> None:
    memory, model, saver = numpy.zeros((16, 16), "float32"), nn.Linear(16, 16), Saver(tmp_path)
    model.weight = nn.Parameter(torch.from_numpy(memory))
    reference = weakref.ref(memory)
    with held_back() as event:
        saver.save(step=1, model=model)
        del model, memory
        gc.collect()
        assert reference() is None
        event.set()
        saver.wait()
    assert checkpoint.verify(tmp_path)


@quiet
@world(2)
def test_a_program_that_ends_without_wait_after_a_rank_has_failed(tmp_path: Path) -> None:
    """Rank 0 learns it from the entry of rank 1, and waits no longer."""
    run, write, texts = Run("fully_shard"), os.write, []
    if dist.get_rank() == 1:
        os.write = failing(write, 1)
    saver = Saver(tmp_path)
    saver.save(step=1, **run.parts())
    error, saver_module._log.error = saver_module._log.error, lambda text, *args: texts.append(text % args)
    try:
        saver_module._finish_all()
    finally:
        os.write, saver_module._log.error = write, error
    (text,) = texts
    assert "Saving step 1 to" in text and "program exits without wait" in text and "No space left on device" in text
    assert ("Rank 1 failed" in text) == (dist.get_rank() == 0)
    dist.barrier()
    assert names(tmp_path) == []


@quiet
@world(1)
def test_the_end_of_a_with_block(tmp_path: Path) -> None:
    """It waits, unless an exception leaves it: other ranks may not come there."""
    saver, waits = Saver(tmp_path), []
    saver.save(step=1, model=nn.Linear(2, 2))
    wait, saver.wait = saver.wait, lambda: waits.append(saver)  # type: ignore[method-assign,func-returns-value]
    with pytest.raises(KeyError), saver:
        raise KeyError("of the program")
    assert not waits
    with saver:
        pass
    assert waits == [saver]
    assert wait() == tmp_path / "step_00000001"


@quiet
@world(2)
def test_a_process_group_that_ended_before_wait(tmp_path: Path) -> None:
    saver, group = Saver(tmp_path), saver_module.rank_and_size
    saver.save(step=1, model=fully_shard(nn.Linear(4, 4)))
    saver_module.rank_and_size = lambda: (0, 1)
    try:
        with pytest.raises(
            CheckpointError, match=r"started as rank . of 2, and this is rank 0 of 1 now\. Call wait\(\) before"
        ):
            saver.wait()
    finally:
        saver_module.rank_and_size = group
    assert saver.wait() == tmp_path / "step_00000001"


@quiet
@world(1)
def test_arguments(tmp_path: Path) -> None:
    for wrong in ({"host_bytes": 5}, {"host_bytes": 1e9}, {"keep_last": 0}):
        with pytest.raises(ArgumentError, match="must be None or an integer"):
            Saver(tmp_path, **wrong)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="step must be"):
        Saver(tmp_path).save(model=nn.Linear(2, 2), step=-1)


@quiet
@world(2)
def test_a_program_that_ends_after_a_rank_was_lost(tmp_path: Path) -> None:
    """A lost rank writes no file, and torchrun restarts the job only after rank 0 has ended."""
    run, texts, rank = Run("fully_shard"), [], dist.get_rank()
    saver = Saver(tmp_path)
    with held_back("fsync") as event:
        if rank == 0:
            event.set()
        saver.save(step=1, **run.parts())
        if rank == 0:
            (order,) = known_orders([dist.group.WORLD])
            order._peers.fail("Rank 1 was lost.")
            log = mock.Mock(error=lambda text, *args: texts.append(text % args))
            with mock.patch.multiple(saver_module, _FAILED_EXIT_SECONDS=0.01, _EXIT_SECONDS=1e6, _log=log):
                saver_module._finish_all()
        dist.barrier()
        event.set()
    if rank == 0:
        assert "Rank 1 did not write its file" in texts[0] and names(tmp_path) == []
    else:
        saver_module._finish_all()
