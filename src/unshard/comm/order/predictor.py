"""Predicts the next number of a sequence. Pure: what the numbers stand for is not known here."""

from __future__ import annotations

MEMORY = 1 << 14  # numbers that are kept at least: several iterations of a large model
CANDIDATES = 32  # earlier occurrences among which the one with the longest equal history is taken


class SequencePredictor:
    """Expects the number that followed the last time the latest numbers were the same; more equal numbers count more.

    So a sequence that repeats itself, with whatever period, is predicted without knowing where a period begins: steps,
    steps with other steps in between, several models in turn. Equal sequences give equal predictions.
    """

    def __init__(self, memory: int = MEMORY) -> None:
        self._memory = memory
        self._seen: list[int] = []
        # A list of places per number would leave an object for each label of each model that ever was.
        self._latest: dict[int, int] = {}
        """The latest place of each number."""
        self._before: list[int] = []
        """For each place, the one before it with the same number, or -1."""
        self._dropped = 0
        self._next = -1  # the place of the expected number, always one that has been seen; -1: none is expected
        self.missed = -1
        """The number that was expected when another one came last."""

    @property
    def position(self) -> int:
        """How many numbers there have been."""
        return self._dropped + len(self._seen)

    def knows(self, number: int) -> bool:
        return number in self._latest

    def last(self, count: int) -> list[tuple[int, int]]:
        """Positions and numbers of the latest."""
        recent = self._seen[-count:]
        return list(enumerate(recent, self.position - len(recent)))

    @property
    def latest(self) -> int:
        return self._seen[-1] if self._seen else -1

    def step(self, number: int) -> bool:
        """Add the next number; returns whether it was expected."""
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
        """The place after the earlier occurrence of the latest number with the longest equal history."""
        longest, best, place = 0, -1, self._before[-1]
        for _ in range(CANDIDATES):
            if place < 0:
                break
            length = self._common(place)
            if length > longest:
                longest, best = length, place + 1
            place = self._before[place]
        return best

    def _common(self, place: int) -> int:
        """How many numbers up to `place` equal the latest ones. Slices are compared: a loop would be far slower."""
        seen, here, now = self._seen, place + 1, len(self._seen)
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
        for place, number in enumerate(self._seen):
            self._before.append(self._latest.get(number, -1))
            self._latest[number] = place
        self._next -= cut
        if self._next < 0:
            self._next = self._most_similar()
