"""Tells the other ranks what this rank is doing, and finds the ranks that a collective waits for.

A thread in each process writes one key to the job's store every few seconds. The process also writes this key
immediately after an exception and at the end of the program. A rank whose wait fails reads the keys of the other ranks.
Training steps neither write nor read keys. No collectives are needed.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import sys
import threading
import time
import weakref
from collections.abc import Collection, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch.distributed as dist

from ...errors import CollectiveError, OrderError, listed
from ...torch_private import job_store, line_of_program
from .sequence import OrderStore, Progress

RECENT = 16  # a rank can be this many collectives ahead of another rank that waits
_RANKS_PER_SECOND = 100  # in a large job, at most this many ranks write their keys per second

STEP = "step its optimizer"

REMEDY = (
    "Every rank must run the same forwards and backwards in the same order, and clip, step and save between the same "
    "ones. Look for branches, loops and losses that depend on the rank or its data, for different numbers of "
    "micro-batches, and for exceptions that only one rank catches. If ranks have different work, put it into "
    "`with unshard.step(model)`. Or run a unit without data on a dummy input (one that requires a gradient if the real "
    "one does) and add `0 * output.sum()` to the loss; or leave the module in a larger unit that every rank runs, and "
    "call set_reduce_scatter_unused_params(True) on that unit. The process group is no longer usable: end the job."
)
RAISED_REMEDY = (
    "Training can continue after an exception only if all ranks raise one at the same point. Otherwise some ranks have "
    "issued collectives that others never issue, and the process group is no longer usable: end the job on all ranks "
    "and restart it from a checkpoint. To skip bad data, let all ranks decide together before forward: all-reduce a "
    "flag and skip the step everywhere."
)
FAILED_REMEDY = (
    "Every rank must shard the same modules, run the same forwards and backwards, and end after the same number of "
    "steps. If a rank is only slow, give init_process_group a longer timeout. The process group is no longer usable: "
    "end the job on all ranks and restart it from a checkpoint."
)

_log = logging.getLogger("unshard")
_announcers: set[Announcer] = set()
_jobs: weakref.WeakKeyDictionary[Any, Announcer] = weakref.WeakKeyDictionary()  # by default process group


@dataclass
class Announcement:
    """One rank's report about itself. `issued`, `last`, `since` and `raised_after` refer to one process group."""

    rank: int
    written: float = 0.0
    """When the rank wrote this report, by its own clock. A live rank writes one every `Announcer.interval` seconds."""
    count: int = 0
    issued: int = -1
    """How many collectives the rank has announced in the process group, including the one that it is about to issue.

    The value is -1 if the rank has not sharded any module over the process group.
    """
    last: str = ""
    since: float = 0.0
    place: str = ""
    """The line of the user's program that the main thread is running, or was running before the rank ended."""
    raised: str = ""
    raised_after: int = -1
    """The value of `issued` when the latest exception left forward or backward."""
    raised_at: float = 0.0
    waited_for: list[int] = field(default_factory=list)
    """The ranks that did not join a collective, if their absence caused the exception."""
    left: bool = False
    """True if the exception left a block (such as `unshard.step`) and other ranks wait for the end of that block."""
    ended: str = ""


def _parsed(rank: int, value: bytes, group: str) -> Announcement:
    if not value:
        return Announcement(rank)
    record = json.loads(value)
    issued, last, since = record.pop("groups").get(group, (-1, "", 0.0))
    after = record.pop("raised_after", {}).get(group, -1)
    return Announcement(rank, issued=issued, last=last, since=since, raised_after=after, **record)


# -- announcements of this rank ----------------------------------------------------------------------------


def announcer_of_job(interval: float) -> Announcer:
    """Return the announcer of this job. The first call creates it, with `interval` seconds between announcements."""
    group = dist.group.WORLD
    if group not in _jobs:
        job = dist.PrefixStore("unshard", job_store())
        # A program may leave the job and join again. The store then still contains the keys of the first time.
        joins = job.add(f"joins of {dist.get_rank()}", 1)
        _jobs[group] = Announcer(dist.PrefixStore(f"{joins}", job), group, dist.get_rank(), interval)
    return _jobs[group]


def keys_of_job() -> Any:
    """Return the part of the job's store that contains the keys of this library.

    Call this only if this rank compares collectives with other ranks. Otherwise, this part does not exist.
    """
    return _jobs[dist.group.WORLD].job


class Announcer:
    """Writes to the job's store what this rank is doing. There is one announcer per default process group."""

    def __init__(self, job: Any, group: Any, rank: int, interval: float):
        self.interval = max(interval, group.size() / _RANKS_PER_SECOND)
        self.job, self._group, self._rank, self._process = job, weakref.ref(group), rank, os.getpid()
        self._peers: weakref.WeakSet[Peers] = weakref.WeakSet()
        self.last_raised: dict[str, Any] = {}
        self._place = ""
        self._count = 0
        self._lock = threading.Lock()
        self._stop, self._wake = threading.Event(), threading.Event()
        _register_at_exit()
        _announcers.add(self)
        self._thread = threading.Thread(target=self._run, name="unshard announces", daemon=True)
        self._thread.start()

    def add(self, peers: Peers) -> None:
        """Start announcing the process group of `peers`, and announce it once immediately.

        If this rank is killed before it announces the group, it looks as if it had never sharded a module over it.
        """
        with self._lock:
            self._peers.add(peers)
        self._wake.set()

    def _all_peers(self) -> list[Peers]:
        with self._lock:
            return list(self._peers)

    def _run(self) -> None:
        with suppress(RuntimeError):  # the store cannot be reached: the job is ending
            while not self._stop.is_set():
                self._wake.wait(self.interval)
                self._wake.clear()
                if self.has_left():
                    self.end("has left the job (destroy_process_group)")
                    break
                self.announce()
                for peers in self._all_peers():
                    peers.warn_of_absent()
        _announcers.discard(self)

    def has_left(self) -> bool:
        """Return True if this process has left the job.

        Only this method holds the default process group in a local variable. If `_run` held the group while it waits,
        the group would outlive the job.
        """
        group = self._group()
        return group is None or group is not dist.group.WORLD

    def announce(self, ended: str = "") -> None:
        """Write to the store what this rank is doing.

        If `ended` is not empty, it says how this rank ended, and this announcement is the last one.
        """
        with self._lock:  # the main thread announces exceptions
            if self._stop.is_set():
                return
            if ended:
                self._stop.set()
                self._wake.set()
            self._count += 1
            now = time.time()
            groups = {peers.name: peers.position(now) for peers in list(self._peers)}
            place = line_of_program(threading.main_thread().ident or 0)
            self._place = place or self._place  # when the program ends, the main thread has already left its code
            record = {"count": self._count, "written": now, "place": self._place, "groups": groups, "ended": ended}
            # One request for all facts, because torch logs every failed request if the store is gone.
            self.job.set(f"rank {self._rank}", json.dumps({**record, **self.last_raised}))

    def raised(self, text: str, waited_for: Iterable[int] = (), left: bool = False) -> None:
        """Announce that an exception has left forward or backward. For `waited_for` and `left`, see `Announcement`."""
        self.last_raised = {
            "raised": text,
            "raised_after": {peers.name: peers.progress.last_announced()[0] for peers in self._all_peers()},
            "raised_at": time.time(),
            "waited_for": list(waited_for),
            "left": left,
        }
        self.announce()

    def end(self, how: str) -> None:
        """Announce that this rank leaves the job. `how` is a text such as "has ended"."""
        if self._process == os.getpid():  # not in a forked child
            with suppress(RuntimeError):
                self.announce(ended=how)

    def join(self) -> None:
        """Wait until the announcer's thread has ended. Call this after `end`.

        If the thread were still using the store while Python shuts down, the process would abort.
        """
        if self._process == os.getpid():
            self._thread.join(timeout=2)


@cache
def _register_at_exit() -> None:
    atexit.register(announce_end)


def announce_end() -> None:
    """Announce that the program has ended. If an exception ended the program, name the exception."""
    how, error = "has ended", getattr(sys, "last_value", None)
    if error is not None and not isinstance(error, (CollectiveError, OrderError)):  # these were announced when raised
        how += f" with {first_line_of(error)}"
    for announcer in list(_announcers):
        announcer.end(how)
        announcer.join()


def first_line_of(error: BaseException) -> str:
    """Return the type of `error` and the first line of its message."""
    lines = str(error).splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:300]}".rstrip(": ")


# -- the other ranks ---------------------------------------------------------------------------------------


class Peers:
    """Tells the other members of a process group what this rank is doing, and reads what they are doing."""

    def __init__(self, store: OrderStore, announcer: Announcer, progress: Progress, warn_seconds: float):
        """`warn_seconds` is how long this rank waits for other ranks before it logs what they are doing."""
        self.name, self.ranks, self.announcer, self.progress = store.name, store.ranks, announcer, progress
        self.failed = False
        """True if this rank has raised an error about other ranks. This rank then logs no more warnings."""
        self._store, self._warn_seconds = store, warn_seconds
        self._next_look = 0.0
        self._position = -1, 0.0
        announcer.add(self)

    def position(self, now: float) -> tuple[int, str, float]:
        """Return how many collectives this rank has announced, a description of the latest one, and a time.

        The time is the `now` of the first call that returned the current count. Only the announcer calls this method.
        """
        issued, text = self.progress.last_announced()
        if self._position[0] != issued:
            self._position = issued, now
        return issued, text, self._position[1]

    def own(self) -> Announcement:
        """Return an announcement that describes this rank now."""
        issued, last = self.progress.last_announced()
        raised = dict(self.announcer.last_raised)
        after = raised.pop("raised_after", {}).get(self.name, -1)
        return Announcement(self._store.rank, issued=issued, last=last, raised_after=after, **raised)

    def others(self) -> list[Announcement]:
        """Return the latest announcements of the other members of the process group."""
        job, others = self._store.job, [rank for rank in self.ranks if rank != self._store.rank]
        keys = [f"rank {rank}" for rank in others]
        if job.has_extended_api() and job.check(keys):
            values = job.multi_get(keys)
        else:
            values = [job.get(key) if job.check([key]) else b"" for key in keys]
        return [_parsed(rank, value, self.name) for rank, value in zip(others, values, strict=True)]

    def doing(self, ranks: Collection[int]) -> list[str]:
        """Return one text for each other rank in `ranks`. The text says what that rank is doing."""
        mine, now = self.own(), time.time()
        return [described(each, mine, False, now) for each in self.others() if each.rank in ranks]

    def any_gave_up(self) -> bool:
        """Return True if another rank has raised an error and will not join a collective that this rank waits for."""
        mine = self.own()
        return any((each.waited_for or each.left) and raised_alone(each, mine) for each in self.others())

    def cause(self) -> str:
        """Return a message that says why the ranks may differ and what the user should do."""
        raised = raised_lately([self.own(), *self.others()], time.time())
        return f"The cause is an exception: {raised}. {RAISED_REMEDY}" if raised else REMEDY

    def explain_failure(self, what: str, patient: bool) -> str:
        """Return a message that names the ranks that the failed collective `what` waited for.

        Return an empty string if no such ranks are found. If `patient` is True, this method first waits to find out
        which ranks are alive.
        """
        rank = self._store.rank
        begin = f"Rank {rank} wanted to {what}, and the backend failed."
        try:
            absent = self._find_absent(patient)
            if not absent:
                return ""
            raised = any(each.raised and not each.waited_for for each in self.others() if each.rank in absent)
        except RuntimeError:
            return (
                f"{begin} The job's store does not answer either: the process that hosts it, rank 0 or the launcher, "
                f"has ended. {FAILED_REMEDY}"
            )
        who = f"rank {rank} waited for {named(list(absent))}: {listed(absent.values(), 8)}"
        with suppress(RuntimeError):
            self.announcer.raised(f"CollectiveError: {who}", absent)
            self._wait_for_readers(absent)
        remedy = RAISED_REMEDY if raised else FAILED_REMEDY
        return f"{begin} In the process group of {named(self.ranks)}, {who}. {remedy}"

    def _find_absent(self, patient: bool) -> dict[int, str]:
        mine, interval = self.own(), self.announcer.interval
        limit = time.monotonic() + (1.5 * interval if patient else 0.0)
        others = self.others()
        first = {each.rank: each.count for each in others}
        # A rank that announces something after the failure is alive.
        while True:
            fresh = {each.rank for each in others if each.count > first[each.rank]}
            known = any((each.ended or raised_alone(each, mine)) and not each.waited_for for each in others)
            late = time.monotonic() > limit
            if known or late or all(each.ended or each.rank in fresh for each in others):
                silent = set(first) - fresh if late and patient and not known else set()
                return absent_ranks(others, mine, fresh, silent, time.time())
            time.sleep(interval / 20)
            others = self.others()

    def _wait_for_readers(self, absent: Collection[int]) -> None:
        # Ranks with the same failure also read the cause from the store, which may end with this process.
        limit = time.monotonic() + 2 * self.announcer.interval
        while time.monotonic() < limit:
            others = [each for each in self.others() if each.rank not in absent]
            if all(each.ended or each.waited_for for each in others):
                return
            time.sleep(self.announcer.interval / 20)

    def warn_of_absent(self) -> None:
        """Log a warning that says which ranks this rank is waiting for. Only the announcer's thread calls this method.

        This method logs the first warning after `warn_seconds`, or earlier if one of these ranks can no longer join. It
        logs the next warning each time the duration of the wait has doubled.
        """
        issued, since = self._position
        stalled = time.time() - since if issued == self.progress.last_announced()[0] else 0.0
        if stalled < 2 * self.announcer.interval:
            self._next_look = 0.0
            return
        if stalled < self._next_look or self.failed:
            return
        late = stalled >= self._warn_seconds
        self._next_look = 2 * stalled if late else min(2 * stalled, self._warn_seconds)
        mine, now = self.own(), time.time()
        if mine.last == STEP:
            return  # an optimizer step waits for nobody
        behind = [
            each
            for each in self.others()
            if each.issued < mine.issued and (late or each.ended or raised_alone(each, mine))
        ]
        if behind:
            what = listed([described(each, mine, False, now) for each in behind])
            _log.warning("rank %d has waited %.0f s to %s: %s", self._store.rank, stalled, mine.last, what)


def raised_alone(each: Announcement, mine: Announcement) -> bool:
    """Return True if another rank has recently raised an exception, and this rank has not raised one at the same point.

    `each` is the announcement of the other rank, and `mine` is the announcement of this rank. Only exceptions that
    leave forward or backward count.
    """
    return bool(each.raised) and each.raised_after >= mine.issued - RECENT and each.raised_after != mine.raised_after


def absent_ranks(
    others: list[Announcement], mine: Announcement, fresh: set[int], silent: set[int], now: float
) -> dict[int, str]:
    """Return the ranks that a failed collective of this rank waited for, each with a text about what it did instead.

    `fresh` contains the ranks that have announced something after the collective failed. The announcements of all other
    ranks are too old to tell whether these ranks are behind. `silent` contains the ranks that have announced nothing
    for so long that their processes may have ended. Ranks that raised an error only because they had waited for others
    are returned only if this function finds no other ranks.
    """
    causes: dict[int, str] = {}
    gave_up: dict[int, str] = {}
    for each in others:
        raised = raised_alone(each, mine)
        if each.waited_for and raised:
            gave_up[each.rank] = described(each, mine, False, now)
        elif each.ended or each.rank in silent or raised or (each.rank in fresh and each.issued < mine.issued):
            causes[each.rank] = described(each, mine, each.rank in silent, now)
    return causes or gave_up


def raised_lately(announcements: list[Announcement], now: float) -> str:
    """Return a message that names the ranks that have raised an exception recently.

    Return an empty string if no rank has raised one, or if all ranks have raised an exception at the same point.
    """
    position = max(each.issued for each in announcements)
    recent = [each for each in announcements if each.raised and each.raised_after >= position - RECENT]
    if len(recent) == len(announcements) and len({each.raised_after for each in recent}) == 1:
        return ""
    return "; ".join(f"rank {each.rank} raised {each.raised}, {_ago(each.raised_at, now)}" for each in recent)


def described(each: Announcement, mine: Announcement, silent: bool, now: float) -> str:
    """Return a message that says what another rank has announced about itself.

    `silent` is True if the rank has announced nothing for so long that its process may have ended.
    """
    facts = []
    if raised_alone(each, mine):
        facts.append(f"raised {each.raised}, {_ago(each.raised_at, now)}")
    if each.ended:
        facts.append(each.ended)
    elif silent and each.count:
        facts.append(
            f"has shown no sign of life for {now - each.written:.0f} s (its process was killed, or runs code that "
            "never releases Python's global lock)"
        )
    if each.issued < 0 and not each.ended:
        facts.append(
            "has not sharded any module over this process group: it ended before that, or runs PyTorch's FSDP (start "
            "all ranks with `unshard run`)"
        )
    elif each.last:
        facts.append(f"last announced to {each.last}, {_ago(each.since, now)}")
    if each.place:
        facts.append(f"{'was last seen' if silent or each.ended else 'is now'} at {each.place}")
    return f"rank {each.rank} " + "; ".join(facts)


def _ago(then: float, now: float) -> str:
    return f"{max(0.0, now - then):.0f} s ago"


def named(ranks: list[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {listed(ranks, 16)}"
