"""The order in which the units of a root run, and the reductions that are in flight."""

from __future__ import annotations

from collections import deque

from .sharded_grad import LISTENERS, listeners
from .unit import Unit


class ForwardOrder:
    """Records the order in which units run in a forward, and predicts that the next forward has the same order.

    Units are given as numbers. If a forward deviates from the recorded order, no unit is predicted for the rest of this
    forward. Every forward replaces the record.
    """

    def __init__(self) -> None:
        self._learned: list[int] = []
        self._seen: list[int] = []
        self._on_track = False

    def begin(self) -> None:
        self._seen = []
        self._on_track = True

    def visit(self, unit: int) -> int | None:
        """Record that `unit` runs now. Return the unit that is predicted to run next, or None."""
        position = len(self._seen)
        self._seen.append(unit)
        self._on_track = self._on_track and position < len(self._learned) and self._learned[position] == unit
        if self._on_track and position + 1 < len(self._learned):
            return self._learned[position + 1]
        return None

    def first(self, count: int) -> list[int]:
        """Return the first `count` units that are predicted to run in the next forward."""
        return self._learned[:count]

    def end(self) -> None:
        self._learned, self._seen = self._seen, []


class BackwardOrder(deque[int]):
    """The numbers of the units that have run forward and are waiting for backward, in the order of their forwards.

    Set `maxlen` to bound the queue, because some units never get a backward.
    """

    def drop_to(self, length: int) -> None:
        while len(self) > length:
            self.pop()

    def visit(self, unit: int) -> int | None:
        """Record that the backward of `unit` begins. Return the unit whose backward is expected next, or None."""
        if unit not in self:
            return None
        while self.pop() != unit:
            pass
        return self[-1] if self else None


class Reductions:
    """The units whose gradients are being reduced, first over the ranks that shard and then over the replicas."""

    def __init__(self, units: list[Unit]):
        self._root_unit = units[0]
        self._most = max(unit.options.reduce_buffers for unit in units)
        """The maximum number of reduce-scatter inputs that may be in memory at the same time."""
        self.scattering: deque[Unit] = deque()
        self._all_reducing: deque[Unit] = deque()
        self.repeated: set[Unit] = set()
        """Units that have run more than once since the last backward. Their gradients may arrive in several parts."""

    def make_room(self, unit: Unit) -> None:
        """Finish earlier reductions until the reduction of `unit` can start.

        The earlier reductions have run in parallel with the backward of `unit`.
        """
        if self._all_reducing:
            self._finish(self._all_reducing)
        while len(self.scattering) >= self._most or unit in self.scattering:
            oldest = self.scattering.popleft()
            done = True
            for group in oldest.param_groups:
                done = group.gradients.advance() and done
            if not done:
                self._all_reducing.append(oldest)
            elif LISTENERS:
                self._tell_listeners(oldest)
        if unit in self._all_reducing:
            self._finish(self._all_reducing)

    def finish_unit(self, unit: Unit) -> None:
        """Wait for the reduction of `unit`, if one is in flight. Call this method before unsharding the unit again."""
        for units in (self.scattering, self._all_reducing):
            if unit in units:
                units.remove(unit)
                self._finish(deque([unit]))

    def finish(self) -> None:
        self._finish(self._all_reducing)
        self._finish(self.scattering)

    def _finish(self, units: deque[Unit]) -> None:
        while units:
            unit = units.popleft()
            done = False
            while not done:
                done = True
                for group in unit.param_groups:
                    done = group.gradients.advance() and done
            if LISTENERS:
                self._tell_listeners(unit)

    def _tell_listeners(self, unit: Unit) -> None:
        # Gradients are complete only if the unit ran once, and if no other unit uses its parameters.
        if self._root_unit.options.last_backward and unit not in self.repeated and not unit.lends:
            ready = [each for group in unit.param_groups for each in group.gradients.sharded_grads()]
            for listener in listeners():
                listener.gradients_ready(ready)

    def clear(self) -> None:
        self.scattering.clear()
        self._all_reducing.clear()
        self.repeated.clear()
