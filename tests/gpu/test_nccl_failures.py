"""Ranks of NCCL that disagree, raise or end: every rank raises an error or is ended, within a bounded time."""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from bed.branches import Branches, sharded
from bed.pool import JobFailed, Pool
from bed.stack import batch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from unshard.comm.order import check as order

pytestmark = pytest.mark.nccl_ranks
RANKS, TIMEOUT = 3, 20.0


@pytest.fixture
def ranks() -> Iterator[Pool]:
    """Workers of this test alone, that are given the time to end by themselves.

    They do without CUDA's multi-process service, which a process that is ended by force leaves unusable.
    """
    workers = Pool(grace=4 * TIMEOUT)
    yield workers
    workers.close()


def trained(steps: int = 3) -> nn.Module:
    """A model whose collectives may take `TIMEOUT` seconds, after some steps of all ranks."""
    # After a failure torch's watchdog sleeps four times this long, by default a minute, before it ends the process.
    os.environ["TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC"] = "2000"
    group = dist.new_group(backend="nccl", timeout=timedelta(seconds=TIMEOUT))
    model = sharded(Branches().cuda(), mesh=DeviceMesh.from_group(group, "cuda"))
    for _ in range(steps):
        step(model, [0, 1, 2])
    torch.cuda.synchronize()
    return model


def step(model: nn.Module, which: list[int]) -> None:
    outputs = model(batch().cuda(), which)
    sum(outputs[number].square().mean() for number in which).backward()


def is_last() -> bool:
    return dist.get_rank() == RANKS - 1


def another_order() -> None:
    """The last rank runs its blocks in another order."""
    with mock.patch.multiple(order, POLL_SECONDS=0.5):
        model = trained()
        for _ in range(3):
            step(model, [2, 1, 0] if is_last() else [0, 1, 2])
        torch.cuda.synchronize()


def a_rank_raises() -> None:
    """In forward, and goes on with its next step."""
    with mock.patch.multiple(order, POLL_SECONDS=0.5):
        model = trained()
        if is_last():
            handle = model.blocks[1].register_forward_pre_hook(_raise)
            with pytest.raises(ValueError, match="bad data"):
                step(model, [0, 1, 2])
            handle.remove()
        for _ in range(3):
            step(model, [0, 1, 2])
        torch.cuda.synchronize()


def _raise(*unused: object) -> None:
    raise ValueError("bad data")


def a_rank_ends() -> None:
    model = trained()
    if is_last():
        os._exit(3)
    for _ in range(3):
        step(model, [0, 1, 2])
    torch.cuda.synchronize()


class Notes(logging.Handler):
    """Tells the other ranks that this one has logged where the last one is."""

    expected = re.compile(
        r"rank \d has waited \d+ s to .*: rank 2 .*; is now at \S*test_nccl_failures.py:\d+ in a_rank"
    )

    def emit(self, record: logging.LogRecord) -> None:
        if self.expected.match(record.getMessage()):
            dist.distributed_c10d._get_default_store().set(f"said by {dist.get_rank()}", "")


def a_rank_is_late() -> None:
    """The others say where it is, and go on once it comes."""
    logging.getLogger("unshard").addHandler(Notes())
    with mock.patch.multiple(order, POLL_SECONDS=0.5, WARN_SECONDS=1.5):
        model = trained()
        if is_last():
            dist.distributed_c10d._get_default_store().wait(["said by 0", "said by 1"], timedelta(seconds=TIMEOUT))
        step(model, [0, 1, 2])
        torch.cuda.synchronize()


def test_a_rank_that_waits_says_where_the_others_are(ranks: Pool) -> None:
    ranks.run(a_rank_is_late, RANKS, backend="nccl", timeout=8 * TIMEOUT)


def other_numbers_of_micro_batches() -> None:
    """All ranks run four before the last step, so that collectives match."""
    with mock.patch.multiple(order, POLL_SECONDS=0.5):
        model = trained(steps=0)
        optimizer = torch.optim.SGD(model.parameters())
        for counts in ([2, 2], [1, 3] if is_last() else [3, 1]):
            for count in counts:
                for _ in range(count):
                    step(model, [0, 1, 2])
                optimizer.step()
        torch.cuda.synchronize()


@pytest.mark.parametrize(
    ("what", "said"),
    [
        (another_order, "did not join"),
        (other_numbers_of_micro_batches, "step its optimizer"),
        (a_rank_raises, "rank 2 raised ValueError: bad data"),
        (a_rank_ends, "the worker ended with exit status 3"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_every_rank_ends(ranks: Pool, what: Callable[[], None], said: str) -> None:
    """With an error that says why on one rank at least; the watchdog of NCCL ends the processes of the others."""
    began = time.monotonic()
    with pytest.raises(JobFailed) as caught:
        ranks.run(what, RANKS, backend="nccl", timeout=8 * TIMEOUT)
    failures = caught.value.failures
    assert set(failures) == set(range(RANKS))
    assert not [text for text in failures.values() if "no answer within" in text], failures
    assert any(said in text for text in failures.values()), failures
    assert time.monotonic() - began < 6 * TIMEOUT
