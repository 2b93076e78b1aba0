"""Which ranks are named when a collective fails, and what is said of them."""

from __future__ import annotations

import json
import logging
import re
import sys
import threading
import time
from types import SimpleNamespace
from unittest import mock

import pytest

from unshard.comm.order import announcing
from unshard.comm.order.announcing import Announcement, Announcer, first_line_of
from unshard.comm.order.check import WARN_SECONDS
from unshard.comm.order.peers import RECENT, Peers, absent_ranks, raised_lately

MINE = Announcement(0, issued=50)


def other(rank: int = 1, issued: int = 50, **more: object) -> Announcement:
    return Announcement(
        rank, count=3, written=90.0, issued=issued, last="all-gather unit 'a'", since=80.0, place="train.py:7", **more
    )


def absent(*others: Announcement, silent: tuple[int, ...] = ()) -> dict[int, str]:
    return absent_ranks(list(others), MINE, {each.rank for each in others} - set(silent), set(silent), 100.0)


def test_a_rank_that_is_behind() -> None:
    said = "rank 2 last announced to all-gather unit 'a', 20 s ago; is now at train.py:7"
    assert absent(other(1), other(2, issued=49)) == {2: said}
    assert not absent(other(1), other(2))
    assert not absent_ranks([other(1, issued=49)], MINE, set(), set(), 100.0)  # it may have gone on since


def test_a_rank_that_has_ended_or_been_killed() -> None:
    ended = other(1, ended="has ended with KeyError: 'x'")
    seen = "last announced to all-gather unit 'a', 20 s ago; was last seen at train.py:7"
    assert absent(ended) == {1: f"rank 1 has ended with KeyError: 'x'; {seen}"}
    killed = absent(other(), silent=(1,))[1]
    assert killed.startswith("rank 1 has shown no sign of life for 10 s") and killed.endswith(seen)
    assert absent(Announcement(1), silent=(1,)) == {
        1: "rank 1 has not sharded any module over this process group: it ended before that, or runs PyTorch's FSDP "
        "(start all ranks with `unshard run`)"
    }


def test_ranks_that_are_only_behind_may_wait_for_one_that_is_gone() -> None:
    behind, ended = other(1, issued=49), other(2, ended="has ended")
    assert list(absent(behind, ended)) == list(absent(behind, other(2), silent=(2,))) == [2]
    assert list(absent(behind, other(2))) == [1]


def test_hosts_are_named_if_there_are_several() -> None:
    text = absent(other(1, host="b"), silent=(1,))[1]
    assert text.startswith("rank 1 on b has shown no sign of life for 10 s (its host or the network has failed, its")
    assert "network" not in absent(other(1), silent=(1,))[1]


def test_a_rank_that_raised() -> None:
    raised = other(1, raised="ValueError: x (in forward)", raised_after=50, raised_at=70.0)
    assert absent(raised)[1].startswith("rank 1 raised ValueError: x (in forward), 30 s ago; last announced")
    assert not absent(other(1, raised="ValueError: x", raised_after=50 - RECENT - 1))  # long ago: all ranks went on
    alike = Announcement(0, issued=50, raised="ValueError: x", raised_after=50)
    assert not absent_ranks([raised], alike, {1}, set(), 100.0)


def test_a_rank_that_gave_up_is_named_only_if_no_other_is() -> None:
    gave_up = other(1, raised="CollectiveError: rank 1 waited for rank 3", raised_after=50, waited_for=[3])
    gone = other(1, ended="has ended", raised="CollectiveError: ...", raised_after=50, waited_for=[3])
    for each in (gave_up, gone):
        assert list(absent(each, other(2), other(3, issued=40))) == [3]
        assert list(absent(each, other(2))) == [1]


def test_exceptions_that_ranks_have_in_common_are_no_cause() -> None:
    both = [other(rank, raised="ValueError: x", raised_after=50, raised_at=70.0) for rank in (0, 1)]
    assert raised_lately(both, 100.0) == ""
    assert raised_lately([both[0], other(1)], 100.0) == "rank 0 raised ValueError: x, 30 s ago"
    elsewhere = other(1, raised="OSError: y", raised_after=48, raised_at=70.0)
    assert "rank 1 raised OSError: y" in raised_lately([both[0], elsewhere], 100.0)


class _Job:
    """A store that keeps announcements, and nothing else."""

    def __init__(self) -> None:
        self.written = dict[str, str]()

    def set(self, key: str, value: str) -> None:
        self.written[key] = value


def _announcer(issued: list[int]) -> tuple[Announcer, _Job]:
    """An announcer without a thread. `issued` has the number of collectives of its only process group."""
    job, peers = _Job(), SimpleNamespace(name="a", position=lambda now: (issued[0], "step its optimizer", now))
    announcer = Announcer.__new__(Announcer)
    announcer.job, announcer.rank, announcer._ahead, announcer._peers = job, 1, 0.0, [peers]
    announcer._lock, announcer._stop, announcer._wake = threading.Lock(), threading.Event(), threading.Event()
    announcer._count, announcer.last_raised, announcer._place, announcer._placed_at = 0, {}, "", []
    return announcer, job


@pytest.mark.parametrize(("moved", "fails"), [(False, False), (True, False), (True, True)])
def test_the_line_of_a_rank_that_ended_is_not_older_than_its_collective(moved: bool, fails: bool) -> None:
    issued, last = [3], None
    announcer, job = _announcer(issued)
    with mock.patch.object(announcing, "line_of_program", lambda thread: "train.py:10 in shard"):
        announcer.announce()
    issued[0] += moved
    if fails:
        with pytest.raises(ZeroDivisionError) as caught:
            raise ZeroDivisionError
        last = caught.value
    with (
        mock.patch.object(announcing, "line_of_program", lambda thread: ""),
        mock.patch.object(sys, "last_value", last, create=True),
    ):
        announcer.announce(ended="has ended")
    place = json.loads(job.written["rank 1"])["place"]
    if fails:
        assert re.fullmatch(r".*test_absent\.py:\d+ in test_the_line_of_a_rank_that_ended_\w+", place)
    else:
        assert place == ("" if moved else "train.py:10 in shard")


def test_an_exception_in_one_line() -> None:
    assert first_line_of(ValueError("a\nb")) == "ValueError: a"
    assert first_line_of(ValueError()) == "ValueError"


# --- messages of a rank that waits ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("they", "limit", "said"),
    [
        (other(1, issued=49), 900.0, [30, 60, 120, 240]),  # seconds: early, and sparsely then
        (other(1, issued=49), 12.0, [15, 30, 60, 120, 240]),  # half the timeout is less
        (other(1, issued=49, ended="has ended"), 900.0, [10, 20, 30, 60, 120, 240]),  # it cannot come any more
        (other(1, issued=50), 900.0, []),  # this rank is not ahead: it computes, or writes a checkpoint
    ],
)
def test_when_a_rank_says_that_it_waits(
    they: Announcement, limit: float, said: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    announcer = SimpleNamespace(interval=5.0, add=lambda peers: None, last_raised={}, now=lambda: time.time())
    store = SimpleNamespace(name="", rank=0, ranks=[0, 1])
    progress, now = SimpleNamespace(last_announced=lambda: (50, "all-gather unit 'b'")), 1000.0
    peers, times = Peers(store, announcer, progress, warn_seconds=min(WARN_SECONDS, limit)), []
    peers.others = lambda: [they]
    with mock.patch("time.time", lambda: now):
        peers.position(now)
    for seconds in range(0, 300, 5):
        later = mock.patch("time.time", lambda seconds=seconds: now + seconds)
        with caplog.at_level(logging.WARNING, "unshard"), later:
            peers.warn_of_absent()
        if caplog.messages:
            times.append(seconds)
            assert caplog.messages[0].startswith(f"rank 0 has waited {seconds} s to all-gather unit 'b': rank 1 ")
            assert caplog.messages[0].endswith("at train.py:7")
        caplog.clear()
    assert times == said
