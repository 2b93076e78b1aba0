"""Watches one job for collectives that do not end, and asks other ranks for their stacks over the job's store.

All methods except `ask`, `failed` and `is_reporting` run in the announcer's thread, so the main thread may be blocked.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from typing import Any

from ..comm.order.announcing import Announcer
from ..comm.order.peers import named
from .hang_facts import main_chain, other_threads, process_state, stack_of
from .hang_report import Facts, HangReport, report_of
from .hang_waits import Record, Waits, every, find_waits, issued_by, some_of, stalled, will_not_come

_MOST_ASKED = 16  # ask at most this many missing ranks for their stacks ...
_ALL_ASKED = 8  # ... but all ranks of a small job
_FIRST_RANKS = 8  # one of these ranks reports if it waits as well
_PATIENCE = 1.0  # seconds to wait for answers, in addition to two announcements
_LONG = 4  # report ranks that issue collectives elsewhere if they are missing for this many times `seconds`


class _Inquiry:
    """A report in progress."""

    def __init__(self, number: int, asked: list[int], kind: str, error: str, counts: dict[int, int], patience: float):
        self.number, self.asked, self.kind, self.error, self.counts = number, asked, kind, error, counts
        self.began = time.monotonic()
        self.deadline = self.began + patience
        self.claim = ""


class JobWatch:
    """Watches one job. `publish` receives reports, `say` receives single lines, `facts` describes this process."""

    def __init__(
        self,
        announcer: Announcer,
        seconds: float,
        publish: Callable[[HangReport], None],
        say: Callable[[str], None],
        facts: Callable[[], dict[str, Any]],
    ):
        self.announcer, self._seconds = announcer, seconds
        self._publish, self._say, self._facts = publish, say, facts
        self.beat = time.monotonic()
        """When the announcer's thread last showed that the store answers."""
        self._answered = -1
        self._issued, self._since = -1, time.monotonic()
        self._settled, self._next_look = -1, 0.0
        self._inquiry: _Inquiry | None = None
        self._counts: dict[int, tuple[int, float]] = {}
        self._late: dict[int, tuple[int, float]] = {}
        self._asked, self._error, self._failure_seen, self._reported = False, "", False, False

    # -- called by other threads ---------------------------------------------------------------------------

    def ask(self) -> None:
        """Report what all ranks do, whether or not any rank waits."""
        self._asked = True
        self.announcer.wake()

    def failed(self, error: str) -> None:
        """Report what all ranks do, because a collective has failed. Only the first failure of a job is reported."""
        if not self._failure_seen:
            self._failure_seen, self._error = True, error
            self.announcer.wake()

    def is_reporting(self) -> bool:
        return self._inquiry is not None or bool(self._error)

    def stall(self) -> float:
        """Return for how many seconds this rank has announced no new collective. Any thread may call this method."""
        issued = sum(peers.progress.last_announced()[0] for peers in self.announcer.all_peers())
        if issued != self._issued:
            self._issued, self._since = issued, time.monotonic()
        return time.monotonic() - self._since

    # -- called by the announcer's thread ------------------------------------------------------------------

    def say_arrived(self) -> None:
        """Say which missing ranks have arrived, because the collective that waited for them has ended.

        The job may end at once, so this method also runs at the end of the program. Any thread may call it.
        """
        self.stall()
        if self._issued > self._settled:
            self._say_that_arrived(list(self._late))

    def _say_that_arrived(self, ranks: list[int]) -> None:
        for rank in ranks:
            if (found := self._late.pop(rank, None)) is not None:  # another thread may have said so
                self._say(f"unshard: rank {rank} arrived after {time.monotonic() - found[1]:.0f} s")

    def pause(self) -> float:
        pause = min(self.announcer.interval, max(self._seconds / 3, self.announcer.size / 100))
        return min(pause, 0.2) if self._inquiry else pause

    def look(self) -> None:
        """Answer requests, and start, continue or finish a report."""
        self.beat = time.monotonic()
        self._answer()
        if self._inquiry:
            self._continue(self._inquiry)
        elif self._error:
            # After a hang, the table has been printed already.
            if not self.announcer.job.check(["hang reported"]) and self._claim("failure"):
                self._begin("failure", error=self._error)
            self._error = ""  # not before: the end of the program waits while `is_reporting` is True
        elif self._asked:
            self._asked = False
            self._begin("signal")
        else:
            self._look_for_absent()
        self._look_for_late()
        self.beat = time.monotonic()

    def _claim(self, key: str) -> bool:
        return self.announcer.job.compare_set(f"claimed {key}", "", f"{self.announcer.rank}").decode() == str(
            self.announcer.rank
        )

    def _records(self) -> dict[int, Record]:
        return self.announcer.records(list(range(self.announcer.size)))

    def _waits(self, records: dict[int, Record], silent: dict[int, float]) -> Waits:
        groups = {peers.name: peers.ranks for peers in self.announcer.all_peers()}
        return find_waits(records, groups, self._seconds, silent)

    def _look_for_absent(self) -> None:
        stall, now = self.stall(), time.monotonic()
        if stall < self._seconds or self._issued <= 0 or self._issued == self._settled or now < self._next_look:
            return
        self._next_look = now + max(self._seconds / 3, stall / 4)
        if stall < self._seconds + 3 * self.pause() and self._another_reports():
            return
        records = self._records()
        silent = self._silent(records)
        waits = self._waits(records, silent)
        if self.announcer.rank not in waits.edges:
            return
        for rank in waits.missing[:_MOST_ASKED]:
            known = records[rank].get("facts", {})
            here = known.get("kernel") == self._facts()["kernel"]
            if here and process_state(known["pid"]).startswith(("dead", "stopped")):
                silent.setdefault(rank, 0.0)
        if not will_not_come(waits, records, self._seconds, silent) and stall < _LONG * self._seconds:
            return
        first = waits.missing[0]
        claim = f"{first} at {issued_by(records[first])}"
        self._settled = self._issued
        if not self.announcer.job.check(["claimed failure"]) and self._claim(claim):
            self._begin("hang", records, claim=claim)

    def _silent(self, records: dict[int, Record]) -> dict[int, float]:
        """Return the ranks that have announced nothing since the previous calls, and for how many seconds."""
        now, silent = time.monotonic(), {}
        for rank, record in records.items():
            count, since = self._counts.get(rank, (-1, now))
            if record.get("ended") or record.get("count", 0) != count:
                self._counts[rank] = record.get("count", 0), now
            elif record and now - since > 2 * every(record) + _PATIENCE / 2:
                silent[rank] = now - since
        return silent

    def _another_reports(self) -> bool:
        """Return True if a lower rank seems to wait for the same ranks, so that only one rank reports."""
        mine = {peers.name: peers.progress.last_announced()[0] for peers in self.announcer.all_peers()}
        for record in self.announcer.records(list(range(min(self.announcer.rank, _FIRST_RANKS)))).values():
            groups = record.get("groups", {})
            common = mine.keys() & groups.keys()
            if (
                common
                and all(groups[name][0] >= mine[name] for name in common)
                and stalled(record) >= self._seconds / 2
                and "every" in record.get("facts", {})
                and not record.get("ended")
            ):
                return True
        return False

    # -- reports -------------------------------------------------------------------------------------------

    def _begin(self, kind: str, records: dict[int, Record] | None = None, error: str = "", claim: str = "") -> None:
        records = self._records() if records is None else records
        waits, job = self._waits(records, {}), self.announcer.job
        can_answer = {rank for rank, record in records.items() if "every" in record.get("facts", {})}
        if len(records) <= _ALL_ASKED:
            asked = can_answer
        else:
            named_in_error = {int(each) for each in re.findall(r"\brank (\d+)", error[:2000])}
            asked = {self.announcer.rank, *some_of(waits.waiting, 2)}
            asked |= {*some_of(named_in_error, _MOST_ASKED), *some_of(waits.missing, _MOST_ASKED)}
            # One rank per host, to look at the processes there.
            hosts = {
                records[rank]["facts"]["kernel"]: rank for rank in sorted(can_answer - {*waits.missing}, reverse=True)
            }
            missing_hosts = {records[rank].get("facts", {}).get("kernel") for rank in asked}
            asked = (asked | {rank for host, rank in hosts.items() if host in missing_hosts}) & can_answer
        patience = 2 * max([every(records[rank]) for rank in asked], default=0.0) + _PATIENCE
        number = job.add("requests", 1)
        watched = {
            rank: [facts["kernel"], facts["pid"], facts.get("error_file", "")]
            for rank in sorted({*asked, *some_of(waits.missing, _MOST_ASKED)})
            if (facts := records[rank].get("facts"))
        }
        job.set(f"request {number}", json.dumps({"asked": sorted(asked), "processes": watched}))
        counts = {rank: record.get("count", 0) for rank, record in records.items()}
        self._inquiry = _Inquiry(number, sorted(asked), kind, error, counts, patience)
        self._inquiry.claim = claim
        self._answer()

    def _answer(self) -> None:
        job, rank = self.announcer.job, self.announcer.rank
        if self._answered < 0:  # requests of earlier times are not for this rank
            self._answered = max(job.add("requests", 0) - 1, 0)
        while job.check([f"request {self._answered + 1}"]):
            self._answered += 1
            request = json.loads(job.get(f"request {self._answered}"))
            if rank in request["asked"]:
                job.set(f"answer {self._answered}/{rank}", json.dumps(self._own_answer(request["processes"])))

    def _own_answer(self, processes: dict[str, Any]) -> dict[str, Any]:
        facts = self._facts()
        here = {rank: each for rank, each in processes.items() if each[0] == facts["kernel"]}
        return {
            "facts": facts,
            "stack": stack_of(main_chain()),
            "threads": other_threads(),
            "recent": {peers.name: peers.progress.recent(16) for peers in self.announcer.all_peers()},
            "processes": {rank: process_state(pid, error_file) for rank, (_, pid, error_file) in here.items()},
        }

    def _continue(self, inquiry: _Inquiry) -> None:
        job = self.announcer.job
        keys = {rank: f"answer {inquiry.number}/{rank}" for rank in inquiry.asked}
        answers = {rank: json.loads(job.get(key)) for rank, key in keys.items() if job.check([key])}
        if len(answers) < len(keys) and time.monotonic() < inquiry.deadline:
            return
        try:
            self._conclude(inquiry, answers)
        finally:
            self._inquiry = None  # not before: the end of the program waits for the report

    def _conclude(self, inquiry: _Inquiry, answers: dict[int, Any]) -> None:
        job, records = self.announcer.job, self._records()
        silent = self._silent(records)
        for rank in set(inquiry.asked) - answers.keys():
            if records[rank]["count"] == inquiry.counts[rank] and not records[rank].get("ended"):
                silent.setdefault(rank, time.monotonic() - inquiry.began)
        waits = self._waits(records, silent)
        if inquiry.kind == "hang" and not waits.missing:  # the rank has arrived in the meantime
            self._settled = -1
            job.delete_key(f"claimed {inquiry.claim}")
            return
        processes = {int(rank): text for each in answers.values() for rank, text in each["processes"].items()}
        texts = {peers.name: peers.progress.recent(1 << 12) for peers in self.announcer.all_peers()}
        facts = Facts(self.announcer.rank, records, waits, answers, silent, processes, texts, inquiry.error)
        self._publish(report_of(facts, self._reason(inquiry, waits)))
        if inquiry.kind == "hang":
            job.set("hang reported", "")
            self._reported = True
            self._late = {rank: (issued_by(records[rank]), self._since) for rank in waits.missing}

    def _reason(self, inquiry: _Inquiry, waits: Waits) -> str:
        if inquiry.kind == "failure":
            return f"a collective has failed on rank {self.announcer.rank}"
        if inquiry.kind == "signal":
            return f"rank {self.announcer.rank} received SIGUSR1"
        return f"no progress for {self.stall():.0f} s: {named(waits.missing[:16])} did not join a collective"

    def _look_for_late(self) -> None:
        if not self._reported:
            return
        self.say_arrived()
        for rank, record in self.announcer.records(list(self._late)).items() if self._late else ():
            if issued_by(record) > self._late.get(rank, (1 << 62, 0.0))[0]:
                self._say_that_arrived([rank])
            elif record.get("ended"):
                self._late.pop(rank, None)
        if not self._late:
            self._reported, self._settled = False, -1
            self.announcer.job.delete_key("hang reported")
