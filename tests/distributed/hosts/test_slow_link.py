"""Hybrid sharding, shards inside a host and replicas on two hosts: bytes and seconds on the link between them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from bed.hosts import HostPool, hosts
from bed.stack import mesh
from torch import nn
from torch.distributed.fsdp import fully_shard as torch_fully_shard

from unshard import fully_shard

SIDES = {"unshard": fully_shard, "FSDP2": torch_fully_shard}
WIDTH, LAYERS, FLOAT = 256, 6, 4
STEPS = 4
PARAMETERS = LAYERS * (4 * WIDTH * WIDTH + 3 * WIDTH)
HEADERS = 1 + 66 / 1448  # of TCP, IP and Ethernet, for each 1,448 bytes


class Training:
    def __init__(self, side: str) -> None:
        torch.manual_seed(0)
        self.model, where = nn.Sequential(*(_layer() for _ in range(LAYERS))), mesh(2)
        for unit in (*self.model, self.model):
            SIDES[side](unit, mesh=where)
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.1)

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self.model(torch.ones(8, WIDTH)).square().mean().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()


def _layer() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.Tanh(), nn.Linear(2 * WIDTH, WIDTH))


def train(side: str, steps: int) -> None:
    Training(side).run(steps)


def exchange(size: int) -> None:
    """Two ranks of different hosts send `size` bytes to each other at the same time."""
    sent, received = torch.zeros(size, dtype=torch.uint8), torch.ones(size, dtype=torch.uint8)
    other = (dist.get_rank() + 2) % 4
    if dist.get_rank() in (0, 2):
        works = [dist.isend(sent, other), dist.irecv(received, other)]
        for work in works:
            work.wait()
        assert not received.any()


def times(rounds: int, steps: int) -> dict[str, list[float]]:
    """Seconds of a step in each round, in which both sides take turns; the first round is not counted."""
    trainings = {side: Training(side) for side in SIDES}
    found: dict[str, list[float]] = {side: [] for side in SIDES}
    for number in range(rounds + 1):
        for side in [*SIDES][:: 1 if number % 2 else -1]:
            dist.barrier()
            begin = time.perf_counter()
            trainings[side].run(steps)
            dist.barrier()
            found[side].append((time.perf_counter() - begin) / steps)
    return {side: seconds[1:] for side, seconds in found.items()}


@contextmanager
def pool_on(folder: Path, mbit: int) -> Iterator[HostPool]:
    with hosts(2, 2, folder, mbit) as bed:
        pool = HostPool(bed)
        yield pool
        pool.close()


def bytes_of(pool: HostPool, function: Callable[..., None], few: dict[str, object], many: dict[str, object]) -> int:
    """Bytes that host 0 sends in the second job beyond those of the first: so, without those of joining a job."""
    sent = []
    for kwargs in (few, many):
        before = pool.bed.sent(0)
        pool.run(function, 4, kwargs)
        sent.append(pool.bed.sent(0) - before)
    return sent[1] - sent[0]


def bytes_of_steps(pool: HostPool, side: str) -> int:
    return bytes_of(pool, train, {"side": side, "steps": 2}, {"side": side, "steps": 2 + STEPS})


def test_bytes_of_a_step(tmp_path: Path) -> None:
    """A step sends no more than an all-reduce of each sharded gradient over the replicas.

    A ring of n replicas sends 2 (n - 1) / n of a shard from each rank. The shards of a host's ranks are together the
    model, so with two replicas, a host sends as many bytes as the gradients have. It also acknowledges what it
    receives: an exchange of equally many bytes measures that.
    """
    replicas, size = 2, PARAMETERS * FLOAT
    formula = 2 * (replicas - 1) * size // replicas * STEPS
    with pool_on(tmp_path, mbit=1000) as pool:
        wire = bytes_of(pool, exchange, {"size": 1}, {"size": formula})
        sent = bytes_of_steps(pool, "unshard")
    print(f"{sent / formula / HEADERS:.4f} of the formula, {sent / wire:.4f} of an exchange of as many bytes")
    assert HEADERS < wire / formula < 1.1
    assert 0.98 < sent / wire < 1.02
    assert sent <= 1.02 * HEADERS * formula


@pytest.mark.slow
def test_bytes_and_times_beside_fsdp2(tmp_path: Path) -> None:
    """On a link of 100 Mbit/s; the median of the ratios of rounds, in which both take turns."""
    with pool_on(tmp_path, mbit=100) as pool:
        sent = {side: bytes_of_steps(pool, side) for side in SIDES}
        found = pool.run(times, 4, {"rounds": 8, "steps": 3})[0]
    ratio = statistics.median(a / b for a, b in zip(found["unshard"], found["FSDP2"], strict=True))
    print(sent, {side: f"{statistics.median(seconds):.3f} s" for side, seconds in found.items()}, f"ratio {ratio:.3f}")
    assert sent["unshard"] <= 1.01 * sent["FSDP2"]
    assert ratio <= 1.0
