"""What ranks tell each other outside of collectives, over the store that their process group was made with."""

from __future__ import annotations

import weakref
from collections import deque
from typing import Any

import torch.distributed as dist

from ..torch_private import job_store

# Keys so many positions back are not needed any more: the collectives keep ranks from being that far apart.
KEPT = 1024

_jobs: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()


def _job() -> Any:
    """Our part of the job's store: one connection as long as the default process group lives."""
    group = dist.group.WORLD
    if group not in _jobs:
        store = dist.PrefixStore("unshard", job_store())
        # A program may leave the job and join it again, over a store that still has the keys of its former life.
        life = store.add(f"lives of {dist.get_rank()}", 1)
        _jobs[group] = dist.PrefixStore(f"{life}", store)
    return _jobs[group]


class Board:
    """Claims on the positions of a stream of collectives, and stories of what went wrong.

    `ranks` are the members of the process group that the board is for, as the whole job numbers them.
    """

    def __init__(self, name: str, ranks: list[int], rank: int):
        self.ranks, self.rank = ranks, rank
        self._job = _job()
        self._store = dist.PrefixStore(name, self._job)
        self._mine: deque[int] = deque()

    def claim(self, position: int, text: str) -> tuple[int, str]:
        """Say what this rank does at `position`; returns who spoke first, and what that rank said."""
        self._tidy(position)
        found = self._store.compare_set(f"{position}", "", f"{self.rank} {text}").decode()
        rank, _, other = found.partition(" ")
        if int(rank) == self.rank:
            self._mine.append(position)
        return int(rank), other

    def _tidy(self, position: int) -> None:
        while self._mine and self._mine[0] < position - KEPT:
            old = self._mine.popleft()
            for key in (f"{old}", f"{old}/count", f"{old}/all"):
                self._store.delete_key(key)

    def arrive(self, position: int) -> bool:
        """Come to the meeting at `position`; true if this rank is the last, and the meeting complete."""
        if self._store.add(f"{position}/count", 1) < len(self.ranks):
            return False
        self._store.set(f"{position}/all", "")
        return True

    def complete(self, position: int) -> bool:
        return self._store.check([f"{position}/all"])

    def sign(self, position: int) -> None:
        """Leave this rank's name at a meeting that takes long; whose name is missing did not come."""
        self._store.set(f"{position}/{self.rank}", "")

    def unsign(self, position: int) -> None:
        self._store.delete_key(f"{position}/{self.rank}")

    def missing(self, position: int) -> list[int]:
        return [rank for rank in self.ranks if not self._store.check([f"{position}/{rank}"])]

    def tell(self, story: str) -> str:
        """Tell the members; returns the story that was told first."""
        return self._store.compare_set("trouble", "", story).decode()

    def trouble(self) -> str:
        """The story that was told, or nothing."""
        return self._store.get("trouble").decode() if self._store.check(["trouble"]) else ""

    def elsewhere(self) -> str:
        """What a member was told in another process group: it will not come to this one any more."""
        for rank in self.ranks:
            if self._job.check([f"trouble of {rank}"]):
                return self._job.get(f"trouble of {rank}").decode()
        return ""

    def heard(self, story: str) -> None:
        """This rank knows the story."""
        self._job.set(f"trouble of {self.rank}", story)
        if self._store.add("heard", 1) == len(self.ranks):
            self._store.set("heard by all", "")

    def heard_by_all(self) -> bool:
        return self._store.check(["heard by all"])
