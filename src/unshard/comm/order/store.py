"""Keys that ranks write for each other in the job's store, outside of collectives."""

from __future__ import annotations

import json
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist

# Keys this many positions back are deleted: collectives keep ranks from being that far apart.
KEPT = 1024


@dataclass
class Announcement:
    """One rank's report about itself, with the values for the reader's process group."""

    rank: int
    written: float = 0.0
    """Time of writing, by the clock of the rank. The rank writes every `Announcer.interval` seconds while it lives."""
    count: int = 0
    issued: int = -1
    """Collectives issued in the process group, including the one about to be issued; -1: nothing is sharded over it."""
    last: str = ""
    since: float = 0.0
    place: str = ""
    """The line of the program that the main thread is at, or was at before the rank ended."""
    raised: str = ""
    raised_after: int = -1
    """The value of `issued` when the last exception left forward or backward."""
    raised_at: float = 0.0
    waited_for: list[int] = field(default_factory=list)
    """The ranks that did not take part in a collective, if that was the exception."""
    ended: str = ""


def announce(job: Any, rank: int, record: dict[str, Any]) -> None:
    """Write the announcement of `rank`. A single request: if the store is gone, torch logs every failed one."""
    job.set(_key(rank), json.dumps(record))


def _key(rank: int) -> str:
    return f"rank {rank}"


def _parsed(rank: int, value: bytes, group: str) -> Announcement:
    if not value:
        return Announcement(rank)
    record = json.loads(value)
    issued, last, since = record.pop("groups").get(group, (-1, "", 0.0))
    after = record.pop("raised_after", {}).get(group, -1)
    return Announcement(rank, issued=issued, last=last, since=since, raised_after=after, **record)


class OrderStore:
    """The keys of one process group: what ranks issue at each position, and the error if they differ.

    `job` has the keys of the job. `ranks` are the global ranks of the members.
    """

    def __init__(self, job: Any, name: str, ranks: list[int], rank: int):
        self.name, self.ranks, self.rank = name, ranks, rank
        self._job, self._store = job, dist.PrefixStore(name, job)
        self._own_positions: deque[int] = deque()

    def publish(self, position: int, text: str) -> tuple[int, str]:
        """Write what this rank issues at `position`. Returns the rank that wrote first, and its text."""
        self._delete_old(position)
        first = self._store.compare_set(f"{position}", "", f"{self.rank} {text}").decode()
        rank, _, other = first.partition(" ")
        if int(rank) == self.rank:
            self._own_positions.append(position)
        return int(rank), other

    def _delete_old(self, position: int) -> None:
        while self._own_positions and self._own_positions[0] < position - KEPT:
            old = self._own_positions.popleft()
            for key in (f"{old}", f"{old}/count", f"{old}/all"):
                self._store.delete_key(key)

    def join(self, position: int) -> bool:
        """Count this rank in at `position`. Returns True if it is the last one."""
        if self._store.add(f"{position}/count", 1) < len(self.ranks):
            return False
        self._store.set(f"{position}/all", "")
        return True

    def all_joined(self, position: int) -> bool:
        return self._store.check([f"{position}/all"])

    def add_name(self, position: int) -> None:
        """Write that this rank waits at `position`. Ranks without a name there have not joined."""
        self._store.set(f"{position}/{self.rank}", "")

    def remove_name(self, position: int) -> None:
        self._store.delete_key(f"{position}/{self.rank}")

    def missing(self, position: int) -> list[int]:
        return [rank for rank in self.ranks if not self._store.check([f"{position}/{rank}"])]

    def publish_error(self, error: str) -> str:
        """Publish an error to the members. Returns the error that was published first."""
        return self._store.compare_set("error", "", error).decode()

    def error(self) -> str:
        """The error that a member has published, or an empty string."""
        return self._store.get("error").decode() if self._store.check(["error"]) else ""

    def error_elsewhere(self) -> str:
        """An error of a member in another process group, after which it issues nothing in this one."""
        for rank in self.ranks:
            if self._job.check([f"error of {rank}"]):
                return self._job.get(f"error of {rank}").decode()
        return ""

    def acknowledge(self, error: str) -> None:
        """Write that this rank raises `error`."""
        self._job.set(f"error of {self.rank}", error)
        if self._store.add("acknowledged", 1) == len(self.ranks):
            self._store.set("acknowledged by all", "")

    def acknowledged_by_all(self) -> bool:
        return self._store.check(["acknowledged by all"])

    def announcements(self) -> list[Announcement]:
        """The latest announcements of the other members."""
        others = [rank for rank in self.ranks if rank != self.rank]
        keys = [_key(rank) for rank in others]
        if self._job.has_extended_api() and self._job.check(keys):
            values = self._job.multi_get(keys)
        else:
            values = [self._job.get(key) if self._job.check([key]) else b"" for key in keys]
        return [_parsed(rank, value, self.name) for rank, value in zip(others, values, strict=True)]
