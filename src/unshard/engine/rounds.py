"""In rounds, all ranks issue the same collectives in the same order, although they run different micro-batches.

A round is one pass over a fixed sequence of collectives. The sequence begins with the all-gathers of one forward. The
all-gathers and reductions of one backward follow. Before a rank runs a unit, it issues everything that comes earlier in
the sequence. If the rank skips a unit, it still all-gathers the unit, drops the result, and reduces zeros. If the rank
needs a unit whose place in this round has passed, it begins another round. So ranks need not agree on what they
compute, only on the number of rounds. Each round begins with a small message that says whether any rank has work.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from typing import NamedTuple

from .root import Root
from .states import ParamState, Phase
from .unit import Unit


class Entry(NamedTuple):
    """A place in the sequence: the all-gather of a unit, or the reduction of its gradients."""

    reduces: bool
    unit: Unit


def sequence(units: Sequence[Unit], late: Collection[Unit]) -> list[Entry]:
    """Return the collectives of one forward over `units` in this order, and of one backward in reverse.

    The reduction of a unit comes after the all-gather that overlaps with the unit's backward. The gradients of `late`
    units are complete only at the end of backward, so their reductions come last.
    """
    entries = [Entry(False, unit) for unit in units]
    due: list[Entry] = []
    for unit in reversed(units):
        if unit.options.unshard_in_backward:
            entries.append(Entry(False, unit))
        entries += due
        due = [Entry(True, unit)] if is_trained(unit) and unit not in late else []
    return entries + due + [Entry(True, unit) for unit in reversed(units) if is_trained(unit) and unit in late]


def is_trained(unit: Unit) -> bool:
    return any(param.sharded.requires_grad for param in unit.params)


class Rounds:
    """Makes followed units take part in rounds, by replacing two methods of each unit and two of the root.

    The replacements are attributes of the objects, so steps without rounds do not have to test a flag.
    """

    def __init__(
        self,
        root: Root,
        units: Sequence[Unit],
        late: Collection[Unit],
        planned: int,
        announce_work: Callable[[], object],
        before_reduction: Callable[[Unit], None],
    ):
        """The first `planned` rounds need no message from `announce_work`, because all ranks run them."""
        self._root, self._units = root, units
        self._entries = sequence(units, late)
        self._planned, self._announce_work, self._before_reduction = planned, announce_work, before_reduction
        self._next = len(self._entries)  # no round has begun
        self._ahead: Unit | None = None
        """The unit that was prefetched last. It is dropped if this rank needs another unit next."""
        self.count = 0
        self.ran: dict[Unit, None] = {}
        """The units that this rank has run, in the order of their first forward."""
        for unit in units:
            vars(unit).update(all_gather=partial(self._all_gather, unit), unshard=partial(self._unshard, unit))
        vars(root).update(after_backward=self._after_backward, end_backward=self._end_backward)

    def uninstall(self) -> None:
        for unit in self._units:
            del unit.all_gather, unit.unshard
        del self._root.after_backward, self._root.end_backward

    def run_empty(self) -> None:
        """Take part in a round for which this rank has no work."""
        self._begin()
        self.end()

    def run_planned(self) -> None:
        """End the current round, and take part in all other planned rounds, for which this rank has no work."""
        self.end()
        while self.count < self._planned:
            self.run_empty()

    def end(self) -> None:
        """Issue the rest of the current round."""
        self._issue_up_to(len(self._entries))

    def _begin(self) -> None:
        self._next = 0
        self.count += 1

    # -- what replaces methods of units and the root --------------------------------------------------------

    def _all_gather(self, unit: Unit) -> None:
        if unit.param_state is not ParamState.SHARDED:
            return
        self.ran.setdefault(unit)
        self._drop_ahead()
        entry = Entry(False, unit)
        if entry not in self._entries[self._next :]:
            self.end()
            if self.count >= self._planned:
                self._announce_work()
            self._begin()
        self._issue_up_to(self._entries.index(entry, self._next))
        self._next += 1
        Unit.all_gather(unit)

    def _unshard(self, unit: Unit) -> None:
        """Wait for the all-gather of `unit`. Before that, issue the next all-gather of the sequence."""
        if unit.param_state is not ParamState.UNSHARDED:
            unit.all_gather()
            self.ran.setdefault(unit)
            if self._ahead is unit:
                self._ahead = None
            self._drop_ahead()
            if self._next < len(self._entries) and not self._entries[self._next].reduces:
                ahead = self._entries[self._next].unit
                if ahead.param_state is ParamState.SHARDED:
                    self._next += 1
                    self._ahead = ahead
                    Unit.all_gather(ahead)
        Unit.unshard(unit)

    def _after_backward(self, unit: Unit, at_end: bool = False) -> None:
        root, entry = self._root, Entry(True, unit)
        direct = (at_end or unit.phase is Phase.BACKWARD) and entry in self._entries[self._next :]
        if direct:
            self._issue_up_to(self._entries.index(entry, self._next))
            self._before_reduction(unit)
            unit.options.change(synchronize=True)  # type: ignore[attr-defined]
        Root.after_backward(root, unit, at_end)
        if direct:
            unit.options.change(synchronize=False)  # type: ignore[attr-defined]
            if root.reductions.scattering and root.reductions.scattering[-1] is unit:
                self._next += 1

    def _end_backward(self) -> None:
        Root.end_backward(self._root)
        self.end()

    # -- issuing --------------------------------------------------------------------------------------------

    def _issue_up_to(self, position: int) -> None:
        """Issue the collectives before `position` in the sequence. This rank needs none of their results."""
        if self._next < position:
            self._drop_ahead()  # it may come up again
        while self._next < position:
            entry = self._entries[self._next]
            self._next += 1
            if entry.reduces:
                self.reduce(entry.unit)
            elif entry.unit.param_state is ParamState.SHARDED:
                Unit.all_gather(entry.unit)
                entry.unit.reshard()
            else:
                for group in entry.unit.param_groups:
                    group.all_gather_again()

    def reduce(self, unit: Unit) -> None:
        """Reduce the gradients that earlier backwards left in `unit`, and zeros for its other parameters."""
        self._before_reduction(unit)
        unit.options.change(synchronize=True)  # type: ignore[attr-defined]
        self._root.reductions.make_room(unit)
        for group in unit.param_groups:
            group.gradients.reduce(unit.options, False)
        self._root.reductions.scattering.append(unit)
        unit.options.change(synchronize=False)  # type: ignore[attr-defined]

    def _drop_ahead(self) -> None:
        ahead, self._ahead = self._ahead, None
        if ahead is not None and ahead.param_state is ParamState.GATHERING:
            ahead.reshard()


def merged(orders: Iterable[Sequence[int]], count: int) -> list[int]:
    """Merge `orders` into one order of all numbers below `count`. Longer orders take precedence."""
    result: list[int] = []
    for order in [*sorted(orders, key=len, reverse=True), range(count)]:
        at = 0
        for number in order:
            if number in result:
                at = result.index(number) + 1
            else:
                result.insert(at, number)
                at += 1
    return result
