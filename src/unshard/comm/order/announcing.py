"""Writes to the job's store what this rank is doing, so that other ranks can find out why they wait.

A thread in each process writes one key every few seconds. The process also writes this key immediately after an
exception and at the end of the program. Training steps neither write nor read keys. No collectives are needed.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import socket
import sys
import threading
import time
import weakref
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from ...errors import CollectiveError, OrderError
from ...torch_private import job_store, line_of_error, line_of_program
from .requests import JobStore, SilentStoreError
from .sequence import absent_keys

if TYPE_CHECKING:
    from .peers import Peers

_log = logging.getLogger("unshard")

_RANKS_PER_SECOND = 100  # in a large job, at most this many ranks write their keys per second

_announcers: set[Announcer] = set()
_jobs: weakref.WeakKeyDictionary[Any, Announcer] = weakref.WeakKeyDictionary()  # by default process group
_creating = threading.Lock()
_joins = 0  # how often this process has joined a job


class Watcher:
    """Base class of objects that use the announcers' threads to watch the jobs of this process."""

    def pause(self, announcer: Announcer) -> float:
        """Return how many seconds the announcer may wait before it announces again."""
        return announcer.interval

    def facts(self) -> dict[str, Any]:
        """Return what else to announce about this process."""
        return {}

    def look(self, announcer: Announcer) -> None:
        """Look at the other ranks. The announcer's thread calls this method after every announcement."""

    def failed(self, announcer: Announcer, error: str) -> None:
        """Note that a collective has failed because of another rank."""

    def finish(self) -> None:
        """Finish reports in progress, because the program is about to end."""


watcher: Watcher | None = None


@dataclass
class Announcement:
    """One rank's report about itself. `issued`, `last`, `since` and `raised_after` refer to one process group."""

    rank: int
    host: str = ""
    written: float = 0.0
    """When the rank wrote this report (see `Announcer.now`). A live rank writes one every `Announcer.interval` seconds.
    """
    count: int = 0
    issued: int = -1
    """How many collectives the rank has announced in the process group, including the one that it is about to issue.

    The value is -1 if the rank has not sharded any module over the process group.
    """
    last: str = ""
    since: float = 0.0
    place: str = ""
    """The line of the user's program that the main thread is running, or was running before the rank ended.

    It is empty if the rank has ended and the last known line is older than the latest collective.
    """
    raised: str = ""
    raised_after: int = -1
    """The value of `issued` when the latest exception left forward or backward."""
    raised_at: float = 0.0
    waited_for: list[int] = field(default_factory=list)
    """The ranks that did not join a collective, if their absence caused the exception."""
    left: bool = False
    """True if the exception left a block (such as `unshard.step`) and other ranks wait for the end of that block."""
    ended: str = ""
    facts: dict[str, Any] = field(default_factory=dict)
    """More about the process, from its `watcher`."""


def announcement(rank: int, record: dict[str, Any], group: str) -> Announcement:
    """Return what `record` (from `Announcer.records`) says about one process group."""
    if not record:
        return Announcement(rank)
    record = dict(record)
    issued, last, since = record.pop("groups").get(group, (-1, "", 0.0))
    after = record.pop("raised_after", {}).get(group, -1)
    return Announcement(rank, issued=issued, last=last, since=since, raised_after=after, **record)


# -- announcements of this rank ----------------------------------------------------------------------------


def announcer_of_job(interval: float) -> Announcer:
    """Return the announcer of this job. The first call creates it, with `interval` seconds between announcements."""
    group = dist.group.WORLD
    with _creating:  # a watcher's thread may create the announcer
        if group not in _jobs:
            _jobs[group] = _new_announcer(group, interval)
        return _jobs[group]


def announcers() -> list[Announcer]:
    """Return the announcers of this process whose jobs go on."""
    return [each for each in list(_announcers) if not each.has_left()]


def _new_announcer(group: Any, interval: float) -> Announcer:
    job = JobStore(dist.PrefixStore("unshard", job_store()))
    # A program may leave the job and join again. The store then still contains the keys of the first time.
    joins = job.add(f"joins of {dist.get_rank()}", 1)
    global _joins
    _joins += 1
    if joins > _joins:
        _log.warning(
            "Rank %d joins a job whose store still has the keys of an earlier start. The ranks may wait for processes "
            "that have ended. Set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 for torchrun.",
            dist.get_rank(),
        )
    return Announcer(job.prefixed(f"{joins}"), group, dist.get_rank(), interval)


def keys_of_job() -> Any:
    """Return the part of the job's store that contains the keys of this library.

    Call this only if this rank compares collectives with other ranks. Otherwise, this part does not exist.
    """
    return _jobs[dist.group.WORLD].job.store


class Announcer:
    """Writes to the job's store what this rank is doing. There is one announcer per default process group."""

    def __init__(self, job: JobStore, group: Any, rank: int, interval: float):
        self.interval = max(interval, group.size() / _RANKS_PER_SECOND)
        self.job, self._group, self.rank, self._process = job, weakref.ref(group), rank, os.getpid()
        self.size = group.size()
        self.store_failed = False
        self._peers: weakref.WeakSet[Peers] = weakref.WeakSet()
        self.last_raised: dict[str, Any] = {}
        self._place, self._placed_at = "", list[int]()
        """The latest known line of the program, and the numbers of collectives that were announced before it."""
        self._count = 0
        self._ahead: float | None = None if rank else 0.0
        """How many seconds this rank's clock is ahead of rank 0's, or None if that is not known yet."""
        self.first_host = ""
        """The host of rank 0, if it is known and is another one."""
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

    def wake(self) -> None:
        """Announce now."""
        self._wake.set()

    def all_peers(self) -> list[Peers]:
        with self._lock:
            return list(self._peers)

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                self._wake.wait(self.interval if watcher is None else watcher.pause(self))
                self._wake.clear()
                if self.has_left():
                    self.end("has left the job (destroy_process_group)")
                    break
                with suppress(SilentStoreError):  # it may answer again
                    self._announce_and_look()
        except RuntimeError:  # the store cannot be reached: the job is ending
            self.store_failed = True
        _announcers.discard(self)

    def _announce_and_look(self) -> None:
        self.announce()
        if self._ahead is None:
            self._look_at_first_rank()
        if watcher is None:
            for peers in self.all_peers():
                peers.warn_of_absent()
        else:
            watcher.look(self)

    def has_left(self) -> bool:
        """Return True if this process has left the job.

        Only this method holds the default process group in a local variable. If `_run` held the group while it waits,
        the group would outlive the job.
        """
        group = self._group()
        return group is None or group is not dist.group.WORLD

    def now(self) -> float:
        """Return the time by the clock of rank 0, so that announcements of different hosts can be compared."""
        return time.time() - (self._ahead or 0.0)

    def _look_at_first_rank(self) -> None:
        first = self.records([0])[0]
        if not first:
            return
        ahead = time.time() - first["written"]
        if first["host"] != socket.gethostname():
            self.first_host = first["host"]
        # The announcement of rank 0 may be `interval` old, and most clocks are equal.
        self._ahead = ahead if abs(ahead) > 2 * self.interval else 0.0
        if self._ahead:
            for peers in self.all_peers():
                peers.forget_position()
            self.announce()

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
            now = self.now()
            groups = {peers.name: peers.position(now) for peers in list(self._peers)}
            place = line_of_program(threading.main_thread().ident or 0)
            if ended and not place:  # the main thread has already left its code
                place = line_of_error(getattr(sys, "last_value", None))
            issued = [each[0] for each in groups.values()]
            if place or issued != self._placed_at:  # else, the last known line is not older than the last collective
                self._place, self._placed_at = place, issued
            record = {"count": self._count, "written": now, "place": self._place, "groups": groups, "ended": ended}
            record["host"] = socket.gethostname()
            if watcher is not None:
                record["facts"] = watcher.facts()
            # One request for all facts, because torch logs every failed request if the store is gone.
            self.job.set(f"rank {self.rank}", json.dumps({**record, **self.last_raised}))

    def records(self, ranks: list[int]) -> dict[int, dict[str, Any]]:
        """Return the latest announcements of `ranks`. The announcement is empty if the rank has made none."""
        job, names = self.job, {f"rank {rank}": rank for rank in ranks}
        found: dict[int, dict[str, Any]] = {rank: {} for rank in ranks}
        keys = [*(names.keys() - absent_keys(job, list(names)))]
        values = job.multi_get(keys) if keys and job.has_extended_api() else map(job.get, keys)
        found.update({names[key]: json.loads(value) for key, value in zip(keys, values, strict=True)})
        return found

    def raised(self, text: str, waited_for: Iterable[int] = (), left: bool = False) -> None:
        """Announce that an exception has left forward or backward. For `waited_for` and `left`, see `Announcement`."""
        self.last_raised = {
            "raised": text,
            "raised_after": {peers.name: peers.progress.last_announced()[0] for peers in self.all_peers()},
            "raised_at": self.now(),
            "waited_for": list(waited_for),
            "left": left,
        }
        self.announce()
        self.job.set("raised", "")

    def any_raised(self) -> bool:
        """Return True if any rank has called `raised`. This takes one request, however many ranks there are."""
        return self.job.check(["raised"])

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
    if watcher is not None:
        watcher.finish()
    for announcer in list(_announcers):
        announcer.end(how)
        announcer.join()


def first_line_of(error: BaseException) -> str:
    """Return the type of `error` and the first line of its message."""
    lines = str(error).splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:300]}".rstrip(": ")
