"""What each rank announces outside of collectives, so that ranks that wait for it can say what it is doing.

A thread writes one key to the job's store every few seconds; exceptions and the end of the program write it at once.
Nothing is written or read in a step. A rank whose wait ends with an error reads the keys of the others.
"""

from __future__ import annotations

import atexit
import json
import os
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
from ...torch_private import line_of_program

if TYPE_CHECKING:
    from .check import Order

RECENT = 16  # collectives that one rank can be ahead of another that waits
_RANKS_PER_SECOND = 100  # write their keys, in a large job

_announcers: set[Announcer] = set()


@dataclass
class Announcement:
    """What one rank says about itself, as far as the process group of the reader is concerned."""

    rank: int
    written: float = 0.0
    """When, by the clock of the rank. Announcements come every `interval` seconds while the process lives."""
    count: int = 0
    issued: int = -1
    """Collectives of the process group, with the one that it is about to issue; -1: it has not sharded anything."""
    last: str = ""
    since: float = 0.0
    place: str = ""
    """The line of the program that the main thread is at, or was at before the rank ended."""
    raised: str = ""
    raised_after: int = -1
    """As `issued`, when the last exception left forward or backward."""
    raised_at: float = 0.0
    waited_for: list[int] = field(default_factory=list)
    """The exception says that these ranks did not take part in a collective."""
    ended: str = ""


class Announcer:
    """Writes what this rank does. One per job, that is, per default process group."""

    def __init__(self, store: Any, group: Any, rank: int, interval: float):
        self.interval = max(interval, group.size() / _RANKS_PER_SECOND)
        self._store, self._group, self._rank, self._process = store, weakref.ref(group), rank, os.getpid()
        self._orders: weakref.WeakSet[Order] = weakref.WeakSet()
        self._last: dict[str, tuple[int, float]] = {}
        self._raised: dict[str, Any] = {}
        self._place = ""
        self._count = 0
        self._lock = threading.Lock()
        self._stop, self._wake = threading.Event(), threading.Event()
        _register_at_exit()
        _announcers.add(self)
        self._thread = threading.Thread(target=self._run, name="unshard announces", daemon=True)
        self._thread.start()

    def add(self, order: Order) -> None:
        """It is announced at once: a rank that is killed soon after would seem to have sharded nothing."""
        with self._lock:
            self._orders.add(order)
        self._wake.set()

    def _all_orders(self) -> list[Order]:
        with self._lock:
            return list(self._orders)

    def _run(self) -> None:
        with suppress(RuntimeError):  # the store cannot be reached: the job ends
            while not self._stop.is_set():
                self._wake.wait(self.interval)
                self._wake.clear()
                if self.has_left():
                    self.end("has left the job (destroy_process_group)")
                    break
                self.announce()
                for order in self._all_orders():
                    order.warn_of_absent()
        _announcers.discard(self)

    def has_left(self) -> bool:
        """Return True if the job is over.

        No local variable of the thread may hold the process group while it waits: it would outlive the job.
        """
        group = self._group()
        return group is None or group is not dist.group.WORLD

    def announce(self, ended: str = "") -> None:
        """Write where this rank is. One request: torch reports each further one, once the store is gone."""
        with self._lock:
            if self._stop.is_set():
                return
            if ended:
                self._stop.set()
                self._wake.set()
            self._count += 1
            now, groups = time.time(), {}
            for order in list(self._orders):
                issued, text = order.last_announced()
                if self._last.get(order.name, (-1, 0))[0] != issued:
                    self._last[order.name] = issued, now
                groups[order.name] = issued, text, self._last[order.name][1]
            self._place = (
                line_of_program(threading.main_thread().ident or 0) or self._place
            )  # at the end of the program, the main thread has left its code
            record = {"count": self._count, "written": now, "place": self._place, "groups": groups, "ended": ended}
            self._store.set(_key(self._rank), json.dumps({**record, **self._raised}))

    def raised(self, text: str, waited_for: Iterable[int] = ()) -> None:
        """An exception leaves forward or backward of this rank."""
        after = {order.name: order.last_announced()[0] for order in self._all_orders()}
        self._raised = {
            "raised": text,
            "raised_after": after,
            "raised_at": time.time(),
            "waited_for": list(waited_for),
        }
        self.announce()

    def end(self, how: str) -> None:
        """This rank takes part in nothing any more."""
        if self._process == os.getpid():  # and not a child of it
            with suppress(RuntimeError):
                self.announce(ended=how)

    def join(self) -> None:
        """Wait for the thread after `end`. One that is inside the store while Python shuts down aborts the process."""
        if self._process == os.getpid():
            self._thread.join(timeout=2)

    def own(self, order: Order) -> Announcement:
        """What this rank would announce now."""
        issued, last = order.last_announced()
        raised = {**self._raised, "raised_after": self._raised.get("raised_after", {}).get(order.name, -1)}
        return Announcement(self._rank, issued=issued, last=last, **raised)

    def stalled(self, order: Order) -> float:
        """For how long nothing was announced in a process group."""
        issued, since = self._last.get(order.name, (-1, 0.0))
        return time.time() - since if issued == order.last_announced()[0] else 0.0


def _key(rank: int) -> str:
    return f"rank {rank}"


def read(store: Any, group: str, ranks: list[int]) -> list[Announcement]:
    """What `ranks` have announced last, about the process group called `group`."""
    keys = [_key(rank) for rank in ranks]
    if store.has_extended_api() and store.check(keys):
        values = store.multi_get(keys)
    else:
        values = [store.get(key) if store.check([key]) else b"" for key in keys]
    return [_parsed(rank, value, group) for rank, value in zip(ranks, values, strict=True)]


def _parsed(rank: int, value: bytes, group: str) -> Announcement:
    if not value:
        return Announcement(rank)
    record = json.loads(value)
    issued, last, since = record.pop("groups").get(group, (-1, "", 0.0))
    after = record.pop("raised_after", {}).get(group, -1)
    return Announcement(rank, issued=issued, last=last, since=since, raised_after=after, **record)


@cache
def _register_at_exit() -> None:
    atexit.register(announce_end)


def announce_end() -> None:
    """At the end of the program. An exception that nobody caught has been printed, and Python keeps it."""
    how, error = "has ended", getattr(sys, "last_value", None)
    if error is not None and not isinstance(error, (CollectiveError, OrderError)):  # announced by what raises them
        how += f" with {first_line_of(error)}"
    for announcer in list(_announcers):
        announcer.end(how)
        announcer.join()


def first_line_of(error: BaseException) -> str:
    """Type and first line of the message."""
    lines = str(error).splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:300]}".rstrip(": ")
