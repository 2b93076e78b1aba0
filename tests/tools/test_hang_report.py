"""Which ranks wait for which, how the table groups them, and how much hundreds of ranks read and write."""

from __future__ import annotations

import json
import time
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

from unshard.comm.order.peers import STEP
from unshard.errors import ArgumentError
from unshard.tools import explain_hangs
from unshard.tools.hang_facts import DATA, LOCK, SLEEP
from unshard.tools.hang_report import Facts, HangReport, report_of, unit_in
from unshard.tools.hang_waits import Waits, find_waits, will_not_come
from unshard.tools.hang_watch import JobWatch
from unshard.tools.hangs import explain_hangs_from_environment

GATHER = "all-gather unit 'blocks.1'"


def record(positions: dict[str, int], last: str = GATHER, idle: float = 40.0, **others: Any) -> dict[str, Any]:
    facts = {"host": "node", "pid": 7, "every": 5.0, "line": "train.py:3 in step", "doing": "", "age": idle}
    facts |= others.pop("facts", {})
    groups = {name: [issued, last, 1000.0 - idle] for name, issued in positions.items()}
    return {"count": 1, "written": 1000.0, "groups": groups, "facts": facts, "ended": "", **others}


def waits(*records: dict[str, Any], silent: tuple[int, ...] = ()) -> Waits:
    return find_waits(dict(enumerate(records)), {"all": list(range(len(records)))}, 30.0, silent)


def test_a_rank_behind_is_missing() -> None:
    found = waits(record({"all": 5}), record({"all": 5}), record({"all": 4}))
    assert found.missing == [2] and found.waiting == [0, 1] and not found.circular
    assert waits(record({"all": 5}), record({}), {}).missing == [1, 2]  # they have not sharded anything


def test_no_rank_is_missing() -> None:
    assert not waits(record({"all": 5}), record({"all": 5})).missing  # an evaluation
    assert not waits(record({"all": 5}, idle=10), record({"all": 4})).missing  # too early
    assert not waits(record({"all": 5}, last=STEP), record({"all": 4})).missing  # a step waits for nobody
    assert not waits(record({"all": 5}), record({"all": 5}, ended="has ended")).missing
    assert not waits(record({"all": 5}), record({"all": 5}), silent=(1,)).missing  # and nobody waits for it


def test_a_rank_that_dies_at_the_same_position() -> None:
    saving = record({"all": 5}, facts={"doing": "saving a checkpoint"})
    assert waits(saving, saving, silent=(1,)).missing == [1]


def test_the_rank_that_holds_up_the_others_is_the_cause() -> None:
    """Of HSDP: rank 3 is missing, rank 2 waits for it, rank 0 for rank 2, and rank 1 for rank 3."""
    ranks = [
        record({"shards 01": 8, "replicas 02": 4}),
        record({"shards 01": 8, "replicas 13": 4}),
        record({"shards 23": 8, "replicas 02": 3}),
        record({"shards 23": 7, "replicas 13": 3}),
    ]
    found = find_waits(dict(enumerate(ranks)), {}, 30.0)
    assert found.missing == [3] and found.waiting == [0, 1, 2] and found.edges[0] == {2: "replicas 02"}


def test_ranks_that_wait_for_each_other() -> None:
    found = waits(record({"all": 5, "a": 1}), record({"all": 4, "a": 2}))
    assert found.missing == [0, 1] and found.circular


def test_ranks_that_differ_at_one_position() -> None:
    assert waits(*[record({"all": 5})] * 3, record({"all": 5}, last="all-gather unit 'x'")).missing == [3]


def test_a_rank_that_moves_on_is_given_time() -> None:
    ranks = {0: record({"all": 5}), 1: record({"all": 4}, idle=2.0)}
    found = find_waits(ranks, {}, 30.0)
    assert found.missing == [1] and not will_not_come(found, ranks, 30.0) and will_not_come(found, ranks, 30.0, [1])
    assert will_not_come(found, {1: record({"all": 4}, idle=2.0, ended="has ended")}, 30.0) == [1]


def table_of(*records: dict[str, Any], **others: Any) -> HangReport:
    return report_of(Facts(0, dict(enumerate(records)), waits(*records), **others), "no progress for 40 s")


def test_equal_rows_share_a_line() -> None:
    ranks = [record({"all": 5}, facts={"pid": number, "host": f"node{number // 8}"}) for number in range(128)]
    ranks[77] = record({"all": 4}, facts={"doing": "in its data loader", "host": "node9", "pid": 99})
    report = table_of(*ranks)
    lines = str(report).splitlines()
    assert len(report.rows) == 128 and report.missing == [77] and report.position == 5
    assert [line.split()[:4] for line in lines if line[:1].isdigit()] == [
        ["0-76,", "78-127", "16", "hosts"],
        ["77", "node9", "99", "in"],
    ]
    assert "Ranks 0-76, 78-127 wait to all-gather unit 'blocks.1', position 5." in report.finding
    assert "in its data loader, at the same line for 40 s (blocked)" in report.finding and len(lines) < 12
    assert list(report.to_dict())[:2] == ["kind", "unshard"] and json.dumps(report.to_dict())


def test_states() -> None:
    def state(last: dict[str, Any], **others: Any) -> str:
        return table_of(record({"all": 5}), last, **others).rows[1].state

    behind = {"all": 4}
    assert state({}).startswith("has announced nothing")
    assert state(record(behind, raised="ValueError: x", raised_after=behind)) == "raised ValueError: x"
    assert state(record(behind, ended="has ended")) == "has ended"
    assert state(record(behind, facts={"doing": LOCK})).startswith("deadlocked in user code?")
    assert state(record(behind, facts={"age": 1.0})) == "slow: in the program; its line changes"
    assert state(record(behind, facts={"busy": True})).endswith("(computing)")
    silent: Any = {"silent": {1: 12.0}}
    assert "silent for 12 s: state unknown (no rank on its host); killed" in state(record(behind), **silent)
    assert state(record(behind), **silent, processes={1: "stopped (SIGSTOP)"}) == "stopped (SIGSTOP)"
    assert "silent for 12 s: alive (state S); holds Python's" in state(
        record(behind), **silent, processes={1: "alive (state S)"}
    )


def test_advice() -> None:
    """About the network, for a host that is cut off and for a collective that all of its ranks have joined."""
    ahead, behind = record({"all": 5}), record({"all": 4}, facts={"doing": "in a collective"})
    silent = table_of(ahead, record({"all": 4}), silent={1: 12.0}).finding
    assert "Look at the host of each silent rank" in silent and "kill -CONT" not in silent
    assert "data does not arrive: look at the network" in table_of(ahead, behind, behind).finding
    stopped = table_of(ahead, behind, silent={1: 12.0}, processes={1: "stopped (SIGSTOP)"}).finding
    assert "kill -CONT" in stopped and "network" not in stopped


@pytest.mark.parametrize(
    ("advice", "facts"),
    [
        ("Look at the line of the missing rank: what does it wait for", {"doing": SLEEP}),
        ("Look at the line of the missing rank: what does it wait for", {"doing": ""}),
        ("Look at the line of the missing rank for a loop that does not end", {"busy": True}),
        ("Look for a torch.distributed call that only some ranks make", {"doing": "in torch.distributed.barrier"}),
        ("Look for work that only this rank does, such as an evaluation", {"doing": "in forward", "age": 1.0}),
        ("Look for a lock, queue or thread", {"doing": LOCK}),
        ("Look for a loader worker", {"doing": DATA}),
        ("Every rank must run the same units in the same order", {"doing": "in forward"}),
    ],
)
def test_advice_suits_the_state(advice: str, facts: dict[str, Any]) -> None:
    finding = table_of(record({"all": 5}), record({"all": 4}, facts=facts)).finding
    assert finding.splitlines()[-1].startswith(advice)
    ended = table_of(record({"all": 5}), record({"all": 4}, facts=facts, ended="has left the job")).finding
    assert ended.splitlines()[-1].startswith("Let every rank run the same number of steps")


def test_the_first_difference_is_named() -> None:
    def answer(*texts: str) -> dict[str, Any]:
        return {"recent": {"all": dict(enumerate(texts, 4))}, "facts": {}}

    here, there = answer("0.1 gather a", "1.2 gather b"), answer("0.1 gather a", "2.3 gather c")
    same = record({"all": 5}, last="", facts={"doing": "in a collective"})
    report = table_of(
        same, same, same, answers={0: here, 1: there, 2: here}, texts=here["recent"], error="They differ."
    )
    assert report.missing == [1] and (report.position, report.collective) == (5, "gather b")
    assert "They differ." in report.finding
    assert "position 5: rank 1 wants to gather c, rank 0 to gather b." in report.finding
    assert "Every rank must run the same units in the same order" in report.finding


def test_a_rank_that_ended_because_of_a_difference() -> None:
    """The error says where the ranks differ. A rank that raised it may end before the report is made."""
    here = {"recent": {"all": {"4": "0.1 gather a", "5": "1.2 gather b"}}, "facts": {}}
    there = {**here, "recent": {"all": {"4": "0.1 gather a", "5": "2.3 gather c"}}}
    waiting = record({"all": 6}, last="prefetch d")
    ended = record({"all": 5}, facts={"doing": "in a collective"}, ended="has ended", place="train.py:9 in validate")
    texts = {**here["recent"]["all"], "6": "3.4 prefetch d"}
    error = "The ranks want different collectives: rank 1 wants to gather c, rank 0 to gather b."
    report = table_of(
        waiting, ended, answers={1: there}, texts={"all": {int(k): v for k, v in texts.items()}}, error=error
    )
    assert report.rows[1].state == "has ended" and report.finding.count("want different collectives") == 1
    assert report.finding.endswith("Look for a branch that depends on the rank or its data.")
    # Rank 0 has prefetched since.
    assert (report.position, report.collective) == (5, "gather b")
    assert (report.rows[0].waits_for, report.rows[0].last) == ("gather b", "prefetch d")
    assert report.rows[1].waits_for == ""


def test_a_line_that_is_older_than_the_last_collective_is_left_out() -> None:
    """Of a rank that has ended, what it was doing is known from its last announcement but one."""
    facts = {"doing": "in a collective", "line": "train.py:2 in shard"}
    stale, fresh = (record({"all": 4}, facts=facts, ended="has ended", place=each) for each in ("", "train.py:2 in f"))
    rows = [table_of(record({"all": 5}), each).rows[1] for each in (stale, fresh)]
    assert [(row.state, row.line) for row in rows] == [
        ("has ended", ""),
        ("has ended while in a collective", "train.py:2 in shard"),
    ]


def test_units_are_found_in_descriptions() -> None:
    assert unit_in("all-gather unit 'a.b'") == "a.b" and unit_in("reduce units 'a', 'b'") == "a, b"
    assert unit_in(STEP) == ""


# --- hundreds of ranks ---------------------------------------------------------------------------------------------


class Store(dict[str, bytes]):
    """A store in this process, which counts requests."""

    def __init__(self) -> None:
        self.requests: Counter[str] = Counter()

    def set(self, key: str, value: str) -> None:
        self[key] = value.encode()

    def check(self, keys: list[str]) -> bool:
        self.requests["check"] += 1
        return all(key in self for key in keys)

    def add(self, key: str, count: int) -> int:
        self[key] = str(int(self.get(key, b"0")) + count).encode()
        return int(self[key])

    def compare_set(self, key: str, before: str, value: str) -> bytes:
        if self.get(key, b"").decode() == before:
            self.set(key, value)
        return self[key]

    def delete_key(self, key: str) -> None:
        self.pop(key, None)


class Rank:
    """One rank of many, with an announcer that announces when told to."""

    def __init__(self, rank: int, size: int, store: Store, seconds: float) -> None:
        self.rank, self.size, self.job, self.interval, self.wake = rank, size, store, 5.0, lambda: None
        self.issued, self.read = 5, 0
        self.since = time.time()
        progress = SimpleNamespace(
            last_announced=lambda: (self.issued, GATHER), recent=lambda count: {5: f"0.1 {GATHER}"}
        )
        self.peers = SimpleNamespace(name="all", ranks=list(range(size)), progress=progress)
        self.reports: list[HangReport] = []
        self.lines: list[str] = []
        self.watch = JobWatch(self, seconds, self.reports.append, self.lines.append, self.facts)  # type: ignore[arg-type]

    def all_peers(self) -> list[Any]:
        return [self.peers]

    def facts(self) -> dict[str, Any]:
        return {"host": f"node{self.rank // 8}", "kernel": f"{self.rank // 8}", "pid": 1, "every": 0.05}

    def announce(self, count: int) -> None:
        groups = {"all": [self.issued, GATHER, self.since]}
        known = {"count": count, "written": time.time(), "groups": groups, "facts": self.facts(), "ended": ""}
        self.job.set(f"rank {self.rank}", json.dumps(known))

    def records(self, ranks: list[int]) -> dict[int, Any]:
        self.read += len(ranks)
        return {each: json.loads(self.job.get(f"rank {each}", b"{}")) for each in ranks}


@pytest.mark.parametrize("size", [3, 100])
def test_one_rank_of_many_reports(size: int) -> None:
    """The lowest one that waits. It asks few ranks, and the others read little."""
    store = Store()
    ranks = [Rank(number, size, store, seconds=0.5) for number in range(size)]
    missing = ranks[0]
    missing.issued = 4
    for round_ in range(200):
        for each in ranks:
            each.announce(round_)
            each.watch.look()
        if ranks[1].reports:
            break
        time.sleep(0.05)
    (report,) = ranks[1].reports
    assert report.missing == [0] and not any(each.reports for each in ranks if each is not ranks[1])
    answers = [key for key in store if key.startswith("answer")]
    assert 2 <= len(answers) <= (3 if size == 3 else 6)
    assert all(each.read <= 8 * 10 for each in ranks[2:]) and ranks[1].read < 10 * size
    if size == 3:  # the rank has arrived, because another one goes on; the job may end before the rank announces it
        ranks[1].watch.say_arrived()
        assert not ranks[1].lines
        ranks[1].issued = 6
        ranks[1].watch.say_arrived()
    else:
        missing.issued, missing.since = 6, time.time()
        missing.announce(1000)
    ranks[1].watch.look()
    assert "hang reported" not in store
    assert [line.rpartition(" after ")[0] for line in ranks[1].lines] == ["unshard: rank 0 arrived"]


# --- arguments -----------------------------------------------------------------------------------------------------


def test_arguments(monkeypatch: pytest.MonkeyPatch, tmp_path: Any, caplog: pytest.LogCaptureFixture) -> None:
    for seconds in (0, -1.0, float("nan"), "30", None):
        with pytest.raises(ArgumentError, match="positive number of seconds"):
            explain_hangs(seconds)  # type: ignore[arg-type]
    for value in ("", "0"):
        monkeypatch.setenv("UNSHARD_EXPLAIN_HANGS", value)
        assert explain_hangs_from_environment() is None
    monkeypatch.setenv("UNSHARD_EXPLAIN_HANGS", "soon")
    assert explain_hangs_from_environment() is None and "expected SECONDS or SECONDS:FILE" in caplog.text
    monkeypatch.setenv("UNSHARD_EXPLAIN_HANGS", f"7.5:{tmp_path}/a:b.json")
    explainer = explain_hangs_from_environment()
    assert explainer is not None
    with explainer:
        assert (explainer.seconds, str(explainer.file)) == (7.5, f"{tmp_path}/a:b.json")
        assert explain_hangs_from_environment() is None  # it is on already
