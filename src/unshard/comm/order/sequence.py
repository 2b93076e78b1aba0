"""The sequence of collectives of one process group: its prediction on this rank, and its keys in the job's store."""

from __future__ import annotations

from collections import deque
from typing import Any

import torch.distributed as dist

MEMORY = 1 << 14  # keep at least this many numbers: several iterations of a large model
CANDIDATES = 32  # earlier occurrences to compare; the one with the longest equal history wins


class SequencePredictor:
    """Predicts the next number: the one that followed the longest earlier run equal to the latest numbers.

    This predicts a repeating sequence of any period without knowing where a period begins: steps, evaluations between
    steps, several models in turn. Equal sequences give equal predictions.
    """

    def __init__(self, memory: int = MEMORY) -> None:
        self._memory = memory
        self._seen: list[int] = []
        # Linked indices instead of a list per number, which would leave an object for every label of deleted models.
        self._latest: dict[int, int] = {}
        """Index of the latest occurrence of each number."""
        self._before: list[int] = []
        """For each index, the previous index of the same number, or -1."""
        self._dropped = 0
        self._next = -1  # index of an earlier occurrence of the expected number; -1 if no number is expected
        self.missed = -1
        """The number that was expected at the latest miss."""

    @property
    def position(self) -> int:
        """Number of entries so far."""
        return self._dropped + len(self._seen)

    def knows(self, number: int) -> bool:
        return number in self._latest

    def last(self, count: int) -> list[tuple[int, int]]:
        """Positions and numbers of the latest `count` entries."""
        recent = self._seen[-count:]
        return list(enumerate(recent, self.position - len(recent)))

    @property
    def latest(self) -> int:
        return self._seen[-1] if self._seen else -1

    def step(self, number: int) -> bool:
        """Add the next number; return True if it was expected."""
        seen, expected = self._seen, self._next
        matches = expected >= 0 and seen[expected] == number
        self._before.append(self._latest.get(number, -1))
        self._latest[number] = len(seen)
        seen.append(number)
        if matches:
            self._next = expected + 1
        else:
            self.missed = seen[expected] if expected >= 0 else -1
            self._next = self._most_similar()
        if len(seen) > 2 * self._memory:
            self._forget()
        return matches

    def _most_similar(self) -> int:
        """Find the earlier occurrence of the latest number with the longest equal history; return the next index."""
        longest, best, index = 0, -1, self._before[-1]
        for _ in range(CANDIDATES):
            if index < 0:
                break
            length = self._common(index)
            if length > longest:
                longest, best = length, index + 1
            index = self._before[index]
        return best

    def _common(self, index: int) -> int:
        """Count the numbers up to `index` that equal the latest ones. Compares slices: far faster than a loop."""
        seen, here, now = self._seen, index + 1, len(self._seen)
        low, high = 1, 2
        while high <= here and seen[here - high : here - low] == seen[now - high : now - low]:
            low, high = high, 2 * high
        high = min(high, here + 1)
        while high - low > 1:
            middle = (low + high) // 2
            if seen[here - middle : here - low] == seen[now - middle : now - low]:
                low = middle
            else:
                high = middle
        return low

    def _forget(self) -> None:
        cut = len(self._seen) - self._memory
        del self._seen[:cut]
        self._dropped += cut
        self._latest, self._before = {}, []
        for index, number in enumerate(self._seen):
            self._before.append(self._latest.get(number, -1))
            self._latest[number] = index
        self._next -= cut
        if self._next < 0:
            self._next = self._most_similar()


class Progress:
    """Collectives that this rank has announced in a process group. Another thread may read this object at any time."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.predictor = SequencePredictor()
        self.texts: dict[int, str] = {}
        """Number, unit and description of each label that was compared, by the label's number."""
        self.next_unlabelled = ""
        """Describes the next collective without a label."""
        self._unlabelled = 0
        self._last_unlabelled = 0, ""

    def count_unlabelled(self) -> None:
        """Count a collective without a label, which is not compared. Call this before issuing the collective."""
        self._unlabelled += 1
        self._last_unlabelled = self.predictor.position + self._unlabelled, self.next_unlabelled
        self.next_unlabelled = ""

    def last_announced(self) -> tuple[int, str]:
        """Return the number of collectives that this rank has announced, and what the last of them does."""
        issued = self.predictor.position + self._unlabelled
        at, what = self._last_unlabelled
        if at == issued:
            return issued, what or ("issue a collective outside of a step" if issued else "")
        numbers = [number for _, number in self.predictor.last(1)]  # empty if a thread reads while a number is added
        return issued, shown(self.texts.get(numbers[0], " issue a collective") if numbers else "")


def shown(text: str, other: str = "") -> str:
    """Return the description in a label's text, with its number if `other` has the same description.

    Descriptions can be equal, because two models may have units of the same name.
    """
    number, _, plain = text.partition(" ")
    return f"{plain} (the one numbered {number})" if plain == other.partition(" ")[2] else plain


# Keys this many positions back are deleted: collectives keep ranks from being that far apart.
KEPT = 1024


class OrderStore:
    """The keys of a process group in the job's store: what ranks issue at each position, and the error if they differ.

    `job`: the store with the keys of the whole job. `ranks`: the global ranks of the members.
    """

    def __init__(self, job: Any, name: str, ranks: list[int], rank: int):
        self.name, self.ranks, self.rank = name, ranks, rank
        self.job, self._store = job, dist.PrefixStore(name, job)
        self._own_positions: deque[int] = deque()

    def publish(self, position: int, text: str) -> tuple[int, str]:
        """Write what this rank issues at `position`; return the rank that wrote first, and its text."""
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
        """Write that this rank has come to `position`; return True if it is the last rank to come."""
        if self._store.add(f"{position}/count", 1) < len(self.ranks):
            return False
        self._store.set(f"{position}/all", "")
        return True

    def all_joined(self, position: int) -> bool:
        return self._store.check([f"{position}/all"])

    def add_name(self, position: int) -> None:
        """Write this rank's name at `position`, so that `missing` can tell which ranks have not joined."""
        self._store.set(f"{position}/{self.rank}", "")

    def remove_name(self, position: int) -> None:
        self._store.delete_key(f"{position}/{self.rank}")

    def missing(self, position: int) -> list[int]:
        return [rank for rank in self.ranks if not self._store.check([f"{position}/{rank}"])]

    def publish_error(self, error: str) -> str:
        """Publish an error to the members; return the error that was published first."""
        return self._store.compare_set("error", "", error).decode()

    def error(self) -> str:
        """Return the error that a member has published, or an empty string."""
        return self._store.get("error").decode() if self._store.check(["error"]) else ""

    def error_elsewhere(self) -> str:
        """Return an error that a member raised in any process group, or an empty string."""
        for rank in self.ranks:
            if self.job.check([f"error of {rank}"]):
                return self.job.get(f"error of {rank}").decode()
        return ""

    def acknowledge(self, error: str) -> None:
        """Write that this rank raises `error`."""
        self.job.set(f"error of {self.rank}", error)
        if self._store.add("acknowledged", 1) == len(self.ranks):
            self._store.set("acknowledged by all", "")

    def acknowledged_by_all(self) -> bool:
        return self._store.check(["acknowledged by all"])
