"""What ranks write for each other outside of collectives, in the store that their process group was made with."""

from __future__ import annotations

import weakref
from collections import deque
from typing import Any

import torch.distributed as dist

from ...torch_private import job_store
from .announcements import Announcement, Announcer, read

# Keys this many positions back are not needed any more: the collectives keep ranks from being that far apart.
KEPT = 1024

_jobs: weakref.WeakKeyDictionary[Any, tuple[Any, Announcer]] = weakref.WeakKeyDictionary()


def _job(interval: float) -> tuple[Any, Announcer]:
    """Our keys in the job's store, over one connection, and what writes this rank's announcements to it."""
    group = dist.group.WORLD
    if group not in _jobs:
        store = dist.PrefixStore("unshard", job_store())
        # A program may leave the job and join it again, over a store that still has the keys of the time before.
        time = store.add(f"joins of {dist.get_rank()}", 1)
        store = dist.PrefixStore(f"{time}", store)
        _jobs[group] = store, Announcer(store, group, dist.get_rank(), interval)
    return _jobs[group]


def keys_of_job() -> Any:
    """Our keys in the job's store, if collectives are compared in it."""
    return _jobs[dist.group.WORLD][0]


class OrderStore:
    """Which collective the ranks of one process group issue at each position, and the error if they differ.

    `ranks` are the members of the process group, as the whole job numbers them.
    """

    def __init__(self, name: str, ranks: list[int], rank: int, interval: float):
        """`interval`: seconds between two announcements of a rank."""
        self.name, self.ranks, self.rank = name, ranks, rank
        self._job, self.announcer = _job(interval)
        self._store = dist.PrefixStore(name, self._job)
        self._own_positions: deque[int] = deque()

    def publish(self, position: int, text: str) -> tuple[int, str]:
        """Write what this rank issues at `position`; returns which rank did so first, and what it wrote."""
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
        """Count this rank in at `position`; true if it is the last one."""
        if self._store.add(f"{position}/count", 1) < len(self.ranks):
            return False
        self._store.set(f"{position}/all", "")
        return True

    def all_joined(self, position: int) -> bool:
        return self._store.check([f"{position}/all"])

    def add_name(self, position: int) -> None:
        """Write that this rank waits at `position`; ranks whose names are missing have not joined."""
        self._store.set(f"{position}/{self.rank}", "")

    def remove_name(self, position: int) -> None:
        self._store.delete_key(f"{position}/{self.rank}")

    def missing(self, position: int) -> list[int]:
        return [rank for rank in self.ranks if not self._store.check([f"{position}/{rank}"])]

    def publish_error(self, error: str) -> str:
        """For the members of this process group; returns the error that was published first."""
        return self._store.compare_set("error", "", error).decode()

    def error(self) -> str:
        """The error that a member has published, or an empty string."""
        return self._store.get("error").decode() if self._store.check(["error"]) else ""

    def error_elsewhere(self) -> str:
        """An error that a member has met in another process group: it issues nothing in this one any more."""
        for rank in self.ranks:
            if self._job.check([f"error of {rank}"]):
                return self._job.get(f"error of {rank}").decode()
        return ""

    def announcements(self) -> list[Announcement]:
        """What the other ranks of this process group say about themselves."""
        return read(self._job, self.name, [rank for rank in self.ranks if rank != self.rank])

    def acknowledge(self, error: str) -> None:
        """This rank raises the error."""
        self._job.set(f"error of {self.rank}", error)
        if self._store.add("acknowledged", 1) == len(self.ranks):
            self._store.set("acknowledged by all", "")

    def acknowledged_by_all(self) -> bool:
        return self._store.check(["acknowledged by all"])
