"""What a rank asks the store and what it computes grow no faster than the number of ranks. Counted, not timed."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from bed.recorders import TorchCalls

from benchmarks.bytecodes import counted
from benchmarks.stores import CountingStore
from unshard.captured_step import recording
from unshard.captured_step.recording import Agreement
from unshard.comm.order import announcing
from unshard.comm.order.announcing import Announcer
from unshard.comm.order.requests import JobStore
from unshard.comm.order.sequence import OrderStore
from unshard.comm.process_group import add_up
from unshard.tools.hang_waits import find_waits

WORLDS = [8, 1024]


def order_store(world: int, rank: int = 0) -> tuple[CountingStore, OrderStore]:
    store = CountingStore(world)
    return store, OrderStore(JobStore(dist.PrefixStore("job", store)), "group", list(range(world)), rank)


@pytest.mark.parametrize("world", WORLDS)
def test_a_look_for_errors_is_one_request(world: int) -> None:
    store, order = order_store(world)
    assert order.error_elsewhere() == ""
    assert len(store.requests) == 1
    elsewhere = OrderStore(JobStore(dist.PrefixStore("job", store)), "other group", [world, world + 1], world)
    elsewhere.acknowledge("of ranks that are not members")
    assert order.error_elsewhere() == ""
    before = len(store.requests)
    assert order.error_elsewhere() == ""  # the error above is not read again
    assert len(store.requests) == before + 1
    OrderStore(JobStore(dist.PrefixStore("job", store)), "other group", [1, world], 1).acknowledge("wrong order")
    assert order.error_elsewhere() == order.error_elsewhere() == "wrong order"


@pytest.mark.parametrize("world", WORLDS)
def test_absent_ranks_take_few_requests(world: int) -> None:
    store, _ = order_store(world)
    absent = {3, world - 1}
    job = JobStore(dist.PrefixStore("job", store))
    for rank in set(range(world)) - absent:
        order_store_of_rank = OrderStore(job, "group", list(range(world)), rank)
        order_store_of_rank.add_name(7)
    store.requests.clear()
    assert set(order_store_of_rank.missing(7)) == absent
    assert len(store.requests) <= 1 + 2 * len(absent) * math.log2(world)


@pytest.mark.parametrize("world", WORLDS)
def test_announcements_are_read_together(world: int, monkeypatch: pytest.MonkeyPatch) -> None:
    store = CountingStore(world)
    for rank in range(1, world):  # rank 0 has announced nothing
        store.set(f"job/rank {rank}", json.dumps({"count": rank}))
    announcer = Announcer.__new__(Announcer)  # without its thread
    announcer.job = JobStore(dist.PrefixStore("job", store))
    store.requests.clear()
    found = announcer.records(list(range(world)))
    assert found == {0: {}, **{rank: {"count": rank} for rank in range(1, world)}}
    kinds = [kind for kind, _ in store.requests]
    assert kinds.count("multi_get") == 1 and "get" not in kinds
    assert len(kinds) <= 2 + 2 * math.log2(world)


def test_the_name_of_an_agreement_has_one_length(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = set()
    for world in WORLDS:
        store = CountingStore(world)
        monkeypatch.setattr(recording, "keys_of_job", lambda store=store: store)
        monkeypatch.setattr(dist, "get_rank", lambda: 0)
        Agreement(range(world), 1).decide(5, "begin", True)
        assert 0 < len(store.requests) <= 2
        lengths |= {len(key) for key in store.keys}
        other = Agreement(range(1, world + 1), 1)  # other ranks must not share keys
        other.decide(5, "begin", True)
        assert len(store.keys) == 4
    assert max(lengths) < 64


def announced(world: int, late: int) -> dict[int, dict[str, Any]]:
    return {
        rank: {
            "count": 5,
            "written": 100.0,
            "groups": {"group": [9 if rank == late else 10, "all-gather", 50.0]},
            "facts": {"doing": "in a collective", "every": 5.0},
        }
        for rank in range(world)
    }


def test_the_explanation_of_a_hang_grows_like_the_job() -> None:
    counts = {}
    for world in (32, 256):
        records = announced(world, late=world // 2)
        with counted() as found:
            waits = find_waits(records, {"group": list(range(world))}, seconds=30)
        assert waits.missing == [world // 2] and len(waits.waiting) == world - 1
        counts[world] = sum(found.bytecodes.values())
    assert counts[32] > 32
    assert counts[256] < 10 * counts[32]


def test_gloos_pieces_are_added_up_in_a_bounded_number_of_calls() -> None:
    for world in (3, 16, 17, 1024):
        rows = torch.arange(world * 8, dtype=torch.float32).view(world, 8)
        output = torch.empty(8)
        with TorchCalls() as calls:
            add_up(rows, output, average=True)
        assert torch.equal(output, rows.double().mean(0).float())
        assert calls.total <= 18


def test_announcements_are_rarer_in_large_jobs() -> None:
    class Group:
        def __init__(self, world: int) -> None:
            self.world = world

        def size(self) -> int:
            return self.world

    def written_per_second(world: int, monkeypatch: pytest.MonkeyPatch) -> float:
        monkeypatch.setattr(announcing.threading.Thread, "start", lambda thread: None)
        announcer = Announcer(CountingStore(world), Group(world), 0, 5.0)
        announcing._announcers.discard(announcer)
        return world / announcer.interval

    with pytest.MonkeyPatch.context() as monkeypatch:
        assert written_per_second(500, monkeypatch) == 100
        assert written_per_second(100_000, monkeypatch) == 100
