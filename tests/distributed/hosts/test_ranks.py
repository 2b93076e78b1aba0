"""Ranks whose hosts, clocks and users differ: errors name the hosts, times are right, checkpoints work."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
import torch.distributed as dist
from bed.branches import after_three_steps, quick, sharded, step
from bed.hosts import HostPool, hosts

from unshard.comm.order import announcing
from unshard.errors import CollectiveError, OrderError

HOUR = 3600.0


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[HostPool]:
    with hosts(2, 2, tmp_path) as bed:
        made = HostPool(bed, grace=60)
        yield made
        made.close()


def takes_another_way() -> str:
    with quick():
        model = sharded()
        for _ in range(3):
            step(model, [0, 1, 2])
        with pytest.raises(OrderError) as caught:
            step(model, [0, 2] if dist.get_rank() == 3 else [0, 1, 2])
            step(model, [0, 1, 2])
    return str(caught.value)


def test_an_order_error_names_hosts(pool: HostPool) -> None:
    for text in pool.run(takes_another_way, 4):
        assert re.search(r"rank \d on host[01] wants to .*, rank \d on host[01] to ", text), text
        assert "rank 3 on host1" in text


def stops(ahead: float) -> str:
    """What the others say when rank 3, whose host's clock is `ahead`, is stopped."""
    rank, store, now = dist.get_rank(), dist.distributed_c10d._get_default_store(), time.time
    clock = mock.patch("time.time", lambda: now() + (ahead if rank >= 2 else 0.0))
    with clock, quick():
        model = after_three_steps()
        (announcer,) = announcing.announcers()
        while announcer._ahead is None:
            time.sleep(0.01)
        count = announcer._count
        while announcer._count < count + 2:  # with the time of rank 0
            time.sleep(0.01)
        dist.barrier()
        if rank == 3:
            store.set("stopped", f"{os.getpid()}")
            os.kill(os.getpid(), signal.SIGSTOP)
        pid = int(store.get("stopped"))
        with pytest.raises(CollectiveError) as caught:
            step(model, [0, 1, 2])
        if rank == 3 or store.add("given up", 1) == 3:
            os.kill(pid, signal.SIGCONT)
    return str(caught.value)


@pytest.mark.slow
@pytest.mark.parametrize("ahead", [-HOUR, HOUR])
def test_times_of_hosts_whose_clocks_differ(pool: HostPool, ahead: float) -> None:
    *others, _ = pool.run(stops, 4, {"ahead": ahead})
    for rank, text in enumerate(others):
        where = "" if rank == 2 else " on host1"
        found = re.search(
            rf"rank 3{where} has shown no sign of life for (\d+) s .*; last announced to .*, (\d+) s ago", text
        )
        assert found, text
        assert all(2 < int(each) < HOUR / 6 for each in found.groups()), text
