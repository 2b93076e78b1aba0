"""The order in which units run, and which one is expected next. Units are numbers here."""

from __future__ import annotations

from collections import deque


class ForwardOrder:
    """Records the order of one forward and expects the same of the next.

    Once a forward differs from the recorded order, nothing is expected any more, and its own order is recorded instead.
    """

    def __init__(self) -> None:
        self._learned: list[int] = []
        self._seen: list[int] = []
        self._on_track = False

    def begin(self) -> None:
        self._seen = []
        self._on_track = True

    def visit(self, unit: int) -> int | None:
        """Note that `unit` runs now; returns the unit expected after it."""
        position = len(self._seen)
        self._seen.append(unit)
        self._on_track = self._on_track and position < len(self._learned) and self._learned[position] == unit
        if self._on_track and position + 1 < len(self._learned):
            return self._learned[position + 1]
        return None

    def first(self, count: int) -> list[int]:
        """The units that the next forward begins with."""
        return self._learned[:count]

    def end(self) -> None:
        self._learned, self._seen = self._seen, []


class BackwardOrder:
    """The units of the forwards that still wait for their backward, last used on top."""

    def __init__(self, limit: int):
        # Bounded: a program may run forwards forever without a backward.
        self._stack: deque[int] = deque(maxlen=limit)

    def __len__(self) -> int:
        return len(self._stack)

    def awaits(self, unit: int) -> bool:
        """Whether a backward will come to `unit`."""
        return unit in self._stack

    def push(self, unit: int) -> None:
        self._stack.append(unit)

    def drop_to(self, length: int) -> None:
        while len(self._stack) > length:
            self._stack.pop()

    def visit(self, unit: int) -> int | None:
        """Note that the backward of `unit` begins; returns the unit expected after it."""
        if unit not in self._stack:
            return None
        while self._stack.pop() != unit:
            pass
        return self._stack[-1] if self._stack else None

    def clear(self) -> None:
        self._stack.clear()
