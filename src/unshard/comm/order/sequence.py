"""Predicts the next collective of a process group, and shares collectives with other ranks over the job's store."""

from __future__ import annotations

from collections import deque

from .requests import JobStore

MEMORY = 1 << 14  # keep at least this many numbers: several iterations of a large model
CANDIDATES = 32  # how many earlier occurrences to compare


class SequencePredictor:
    """Predicts the next number of a sequence. Each number stands for a label.

    The predictor finds the longest earlier run of numbers that equals the latest numbers, and predicts the number that
    followed this run. So it can predict any repeating sequence without knowing where a period begins or how long a
    period is. For example, a program may alternate between steps and evaluations, or between several models. Equal
    sequences lead to equal predictions.
    """

    def __init__(self, memory: int = MEMORY) -> None:
        self._memory = memory
        self._seen: list[int] = []
        # Indices form linked lists. A list object per number would stay in memory for every label of deleted models.
        self._latest: dict[int, int] = {}
        """The index of the latest occurrence of each number."""
        self._before: list[int] = []
        """Entry `i` is the index of the previous occurrence of the number at index `i`, or -1 if there is none."""
        self._dropped = 0
        self._next = -1  # index of an earlier occurrence of the expected number; -1 if no number is expected
        self.missed = -1
        """The latest wrong prediction. It is -1 if no number was predicted for the latest unexpected number."""

    @property
    def position(self) -> int:
        """The length of the sequence so far."""
        return self._dropped + len(self._seen)

    def knows(self, number: int) -> bool:
        return number in self._latest

    def last(self, count: int) -> list[tuple[int, int]]:
        """Return the latest `count` numbers as pairs of position and number, oldest first."""
        recent = self._seen[-count:]
        return list(enumerate(recent, self.position - len(recent)))

    @property
    def latest(self) -> int:
        return self._seen[-1] if self._seen else -1

    def step(self, number: int) -> bool:
        """Add the next number of the sequence. Return True if it was predicted."""
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
        """Return the index after the longest earlier run that equals the latest numbers, or -1 if there is no run."""
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
        """Return the length of the longest run that ends at `index` and equals the latest numbers."""
        seen, here, now = self._seen, index + 1, len(self._seen)
        # Comparing slices is far faster than a loop over numbers.
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
    """Counts the collectives that this rank has announced in a process group.

    Other threads may read this object at any time.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.predictor = SequencePredictor()
        self.texts: dict[int, str] = {}
        """Maps each compared label's number to a text with the label's number, its unit number and its description."""
        self.next_unlabelled = ""
        """A description of the next collective without a label."""
        self._unlabelled = 0
        self._last_unlabelled = 0, ""

    def count_unlabelled(self) -> None:
        """Count a collective that has no label and is not compared. Call this before issuing the collective."""
        self._unlabelled += 1
        self._last_unlabelled = self.predictor.position + self._unlabelled, self.next_unlabelled
        self.next_unlabelled = ""

    def recent(self, count: int) -> dict[int, str]:
        """Return the texts of up to `count` compared collectives, by their position (see `count_at`)."""
        return {self.count_at(at): self.texts.get(number, "") for at, number in self.predictor.last(count)}

    def count_at(self, position: int) -> int:
        """Return how many collectives a rank has announced at `position` of the compared ones.

        The count is exact if the collectives without a label came first, as those of `fully_shard` do.
        """
        return self._unlabelled + position + 1

    def last_announced(self) -> tuple[int, str]:
        """Return how many collectives this rank has announced, and a description of the latest one."""
        issued = self.predictor.position + self._unlabelled
        at, what = self._last_unlabelled
        if at == issued:
            return issued, what or ("issue a collective outside of a step" if issued else "")
        numbers = [number for _, number in self.predictor.last(1)]  # empty if a thread reads while a number is added
        return issued, shown(self.texts.get(numbers[0], " issue a collective") if numbers else "")


def shown(text: str, other: str = "") -> str:
    """Return the description in a label's `text`. Append the label's number if `other` has the same description.

    Two models may have units of the same name, so different labels can have equal descriptions.
    """
    number, _, plain = text.partition(" ")
    return f"{plain} (the one numbered {number})" if plain == other.partition(" ")[2] else plain


def is_of_unit(text: str) -> bool:
    """Return True if a label's `text` describes a collective of a unit, and not a call such as an optimizer step."""
    return not text.partition(" ")[0].endswith(".0")


def absent_keys(store: JobStore, keys: list[str]) -> list[str]:
    """Return the `keys` that `store` lacks, by bisection: if few are absent, this takes few requests."""
    if not keys or store.check(keys):
        return []
    half = len(keys) // 2
    return absent_keys(store, keys[:half]) + absent_keys(store, keys[half:]) if half else keys


# Keys that are more than this many positions old are deleted. Collectives prevent ranks from being that far apart.
KEPT = 1024


class OrderStore:
    """Reads and writes the keys of one process group in the job's store.

    For each compared position, a key says which collective the ranks issue. If the ranks differ, another key contains
    the error. `job` is the store with the keys of the whole job. `ranks` are the global ranks of the members.
    """

    def __init__(self, job: JobStore, name: str, ranks: list[int], rank: int):
        self.name, self.ranks, self.rank = name, ranks, rank
        self.job, self._store = job, job.prefixed(name)
        self._own_positions: deque[int] = deque()
        self._errors_read = 0

    def publish(self, position: int, text: str) -> tuple[int, str]:
        """Write that this rank issues the collective `text` at `position`.

        Return the rank that was the first to write at this position, and the text that it wrote.
        """
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
        """Write that this rank has joined at `position`. Return True if all other ranks have already joined."""
        if self._store.add(f"{position}/count", 1) < len(self.ranks):
            return False
        self._store.set(f"{position}/all", "")
        return True

    def all_joined(self, position: int) -> bool:
        return self._store.check([f"{position}/all"])

    def add_name(self, position: int) -> None:
        """Write that this rank is at `position`. `missing` returns the ranks that have not written this."""
        self._store.set(f"{position}/{self.rank}", "")

    def remove_name(self, position: int) -> None:
        self._store.delete_key(f"{position}/{self.rank}")

    def missing(self, position: int) -> list[int]:
        names = {f"{position}/{rank}": rank for rank in self.ranks}
        return [names[key] for key in absent_keys(self._store, list(names))]

    def publish_error(self, error: str) -> str:
        """Publish an error to the members of the process group, unless one is published. Return the published error."""
        return self._store.compare_set("error", "", error).decode()

    def error(self) -> str:
        """Return the error that a member has published, or an empty string."""
        return self._store.get("error").decode() if self._store.check(["error"]) else ""

    def error_elsewhere(self) -> str:
        """Return an error that one of the members has raised in any process group, or an empty string."""
        # All ranks of the job share one list of errors, so a look costs one request, however many ranks there are.
        while self.job.check([f"error {self._errors_read + 1}"]):
            rank, _, error = self.job.get(f"error {self._errors_read + 1}").decode().partition(" ")
            if int(rank) in self.ranks:
                return error
            self._errors_read += 1
        return ""

    def acknowledge(self, error: str) -> None:
        """Write that this rank raises `error`."""
        self.job.set(f"error {self.job.add('errors', 1)}", f"{self.rank} {error}")
        if self._store.add("acknowledged", 1) == len(self.ranks):
            self._store.set("acknowledged by all", "")

    def acknowledged_by_all(self) -> bool:
        return self._store.check(["acknowledged by all"])
