"""Calls that all ranks make outside of forward and backward: clipping, gradient scaling, state dicts, checkpoints.

The ranks compare a call as they compare collectives. If its collectives fail, the error names the ranks that did not
take part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from operator import attrgetter
from types import TracebackType
from typing import Any

from ...errors import UnshardError
from .check import known_orders
from .polling import PollingWork


class SharedCall:
    """One call, over process groups some of which units are sharded over. A context around its collectives.

    `what` completes "rank 0 wants to ...", and is a constant. `meet`: wait until all ranks have come, before
    collectives that are not issued by `run`.
    """

    def __init__(self, what: str, groups: Iterable[Any], meet: bool = False):
        # In the same order on all ranks, because a comparison may wait for them.
        self._orders = sorted(known_orders(groups), key=attrgetter("name"))
        self._labels = [order.meet(what) if meet else order.compare_call(what) for order in self._orders]

    def __enter__(self) -> SharedCall:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._orders and isinstance(error, RuntimeError) and not isinstance(error, UnshardError):
            self._orders[0].raise_failed(error, self._labels[0])

    def run(self, collective: Callable[[bool], Any]) -> None:
        """Wait for a collective, and look for errors of other ranks meanwhile. Called with the value of `async_op`."""
        with self:
            if self._orders and self._orders[0].waits_on_host:
                PollingWork(collective(True), self._orders[0], collective, self._labels[0]).wait()
            else:
                collective(False)
