"""A collective that fails names the ranks that did not take part in it, and what they do instead."""

from __future__ import annotations

import gc
import logging
import re
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from bed import world
from bed.branches import Branches, after_three_steps, quick, sharded, short_group, step
from bed.stack import assert_at_rest, assert_gradients, batch
from bed.worker import _forget_meshes
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from unshard import FullyShardedDataParallel, fully_shard
from unshard.comm.order import announcing as module
from unshard.errors import CollectiveError, OrderError

THREAD = "unshard announces"


def is_last() -> bool:
    return dist.get_rank() == dist.get_world_size() - 1


@contextmanager
def the_last_rank_waits_for_the_others() -> Iterator[None]:
    """The others leave the block first; meanwhile the last one is in the program's own code."""
    store = dist.distributed_c10d._get_default_store()
    if is_last():
        store.wait(["done"])
    yield
    if not is_last() and store.add("given up", 1) == dist.get_world_size() - 1:
        store.set("done", "")


def bad_data(*unused: Any) -> None:
    raise ValueError("bad data\nand more about it")


# --- ranks that do not come ----------------------------------------------------------------------------------------


@world(2, 3)
def test_a_rank_that_is_busy_with_something_else() -> None:
    """Both errors name the rank that was late, also that of the rank itself, once it comes."""
    late, rank = dist.get_world_size() - 1, dist.get_rank()
    with quick():
        model = after_three_steps()
        expected = (
            rf"Rank {rank} wanted to all-gather unit '\(root\)', and .* process group of ranks 0, .* waited for rank "
            rf"{late}: rank {late} last announced to reduce-scatter the gradients of unit '\(root\)', \d+ s ago; is "
            r"now at \S*test_absent.py:\d+ in the_last_rank_waits_for_the_others. Every rank must"
        )
        if is_last():
            expected = rf"rank 0 raised CollectiveError: rank 0 waited for rank {late}: rank {late} last announced to"
        with the_last_rank_waits_for_the_others(), pytest.raises(CollectiveError, match=expected) as caught:
            step(model, [0, 1, 2])
        assert isinstance(caught.value, dist.DistBackendError) and isinstance(caught.value.__cause__, RuntimeError)
        assert_at_rest(model)


@pytest.mark.parametrize("front_end", ["fully_shard", pytest.param("wrapper", marks=pytest.mark.slow)])
@world(3)
def test_a_rank_that_shards_nothing(front_end: str) -> None:
    with quick():
        group, model = short_group(), nn.Linear(4, 4)
        mesh = DeviceMesh.from_group(group, "cpu")
        if is_last():
            with the_last_rank_waits_for_the_others():
                return
        expected = r"module Linear.* with the other ranks, and .* waited for rank 2: rank 2 has not sharded any module"
        with the_last_rank_waits_for_the_others(), pytest.raises(CollectiveError, match=expected):
            if front_end == "wrapper":
                FullyShardedDataParallel(model, process_group=group)
            else:
                fully_shard(model, mesh=mesh)


@world(2, 3)
def test_a_rank_that_waits_says_where_the_others_are() -> None:
    """Long before it gives up; and training goes on, since the rank was only slow."""
    rank, late = dist.get_rank(), dist.get_world_size() - 1
    expected = re.compile(
        rf"rank {rank} has waited \d+ s to all-gather unit '.*': rank {late} last announced to reduce-scatter .* ago; "
        r"is now at \S*test_absent.py:\d+ in test_a_rank_that_waits"
    )
    store, said = dist.distributed_c10d._get_default_store(), threading.Event()

    class Notes(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if expected.match(record.getMessage()) and not said.is_set():
                said.set()
                if store.add("have said so", 1) == late:
                    store.set("all have said so", "")

    handler = Notes()
    logging.getLogger("unshard").addHandler(handler)
    try:
        with quick(WARN_SECONDS=1.5):
            model, reference = sharded(), Branches()
            step(model, [0, 1, 2])
            if is_last():
                store.wait(["all have said so"])
            for each in (model, reference):
                each.zero_grad()
                step(each, [0, 1, 2])
        assert_gradients(model, reference)
    finally:
        logging.getLogger("unshard").removeHandler(handler)


# --- ranks that raise ----------------------------------------------------------------------------------------------


HINT = r"({}|The error of rank 0 says what to do\.)"  # once all ranks raise, only the first one prints the long hint


@pytest.mark.parametrize("stage", ["forward", "backward"])
@world(2, 3)
def test_one_rank_raises_and_goes_on(stage: str) -> None:
    """All ranks say which one raised what."""
    with quick():
        model = sharded()
        for _ in range(3):
            step(model, [0, 1, 2])
        cause = (
            r"The cause is an exception: rank \d raised ValueError: bad data \(in forward, unit 'blocks.1'; forward "
        )
        if stage == "backward":
            cause = r"rank \d raised an exception \(in backward, units '\(root\)', 'blocks.1'; forward "
        with pytest.raises(
            OrderError, match=cause + r"number 4\), \d+ s ago. " + HINT.format("Training can")
        ) as caught:
            if is_last():
                with pytest.raises(ValueError, match="bad data"):
                    _raise_in(model, stage)
            step(model, [0, 1, 2])
            step(model, [0, 1, 2])
        assert "Look for branches" not in str(caught.value)
        assert_at_rest(model)


def _raise_in(model: nn.Module, stage: str) -> None:
    if stage == "backward":
        outputs = model(batch(), [0, 1, 2])
        outputs[1].register_hook(bad_data)
        sum(output.square().mean() for output in outputs.values()).backward()
    handle = model.blocks[1].register_forward_pre_hook(bad_data)
    try:
        step(model, [0, 1, 2])
    finally:
        handle.remove()


@world(2)
def test_one_rank_raises_and_does_not_go_on() -> None:
    with quick():
        model = after_three_steps()
        if is_last():
            with pytest.raises(ValueError, match="bad data"):
                _raise_in(model, "forward")
            with the_last_rank_waits_for_the_others():
                return
        expected = r"waited for rank 1: rank 1 raised ValueError: bad data \(.*; last announced to .*Training can"
        with the_last_rank_waits_for_the_others(), pytest.raises(CollectiveError, match=expected):
            step(model, [0, 1, 2])
        assert_at_rest(model)


@world(4)
def test_one_rank_of_a_replica_raises() -> None:
    """Also ranks that have no process group in common with it name it, as the whole job numbers it."""
    with quick():
        model = sharded(mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))
        for _ in range(3):
            step(model, [0, 1, 2])
        with pytest.raises(OrderError, match="rank 3 raised ValueError: bad data"):
            if is_last():
                with pytest.raises(ValueError, match="bad data"):
                    _raise_in(model, "forward")
            step(model, [0, 1, 2])
            step(model, [0, 1, 2])


@pytest.mark.parametrize("stage", ["forward", "backward"])
@world(2)
def test_all_ranks_raise(stage: str) -> None:
    """They go on, and the exception is not taken for the cause of what happens later."""
    with quick():
        model, reference = sharded(), Branches()
        for _ in range(3):
            step(model, [0, 1, 2])
        with pytest.raises(ValueError, match="bad data"):
            _raise_in(model, stage)
        for each in (model, reference):
            each.zero_grad()
            step(each, [0, 1, 2])
        assert_gradients(model, reference)
        with pytest.raises(OrderError, match=HINT.format("Every rank must run the same forwards")) as caught:
            step(model, [2, 1, 0] if is_last() else [0, 1, 2])
        assert "bad data" not in str(caught.value)


# --- the thread ----------------------------------------------------------------------------------------------------


def announcing() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == THREAD]


@world(1, 2)
def test_the_thread_lives_as_long_as_the_job() -> None:
    for thread in announcing():  # of another test on this worker
        thread.join(300)
    with quick():
        step(sharded(), [0, 1, 2])
        step(sharded(), [0, 1, 2])
    (*threads,) = announcing()
    assert len(threads) == (dist.get_world_size() > 1)
    dist.barrier()
    group = weakref.ref(dist.group.WORLD)
    dist.destroy_process_group()
    _forget_meshes()
    gc.collect()
    if torch.__version__ >= "2.13":  # before, torch keeps the group once a DTensor has been made
        assert group() is None  # the thread, which wakes up later, does not hold it
    for thread in threads:
        thread.join(300)
    assert not announcing()


@world(1)
def test_a_store_that_an_earlier_process_has_used() -> None:
    """As torchrun's is after a restart. A process that joins again itself is no reason for a warning."""
    texts: list[str] = []
    log = mock.Mock(warning=lambda text, *args: texts.append(text % args))
    with mock.patch.multiple(module, job_store=mock.Mock(return_value=dist.HashStore()), _joins=0, _log=log):
        for process in range(2):
            module._joins = 0
            for _ in range(2):
                module._new_announcer(dist.group.WORLD, 5.0).end("ended")
            assert len(texts) == 2 * process
    assert "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" in texts[0]
