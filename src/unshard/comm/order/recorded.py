"""The collectives of a recorded step: every replay issues them again, and the ranks compare that."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ..interface import Label
from .check import Order, all_orders


class RecordedCollectives:
    """Labels by process group, in the order in which the recorded step would have issued their collectives.

    Nothing is compared while a step is recorded: a rank that fails in the middle would be behind the others for good.
    """

    def __init__(self) -> None:
        self._labels: list[tuple[Order, list[Label]]] = []

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Note the collectives that are issued in here."""
        self._labels = [(order, order.begin_noting()) for order in all_orders()]
        try:
            yield
        finally:
            for order, _ in self._labels:
                order.end_noting()

    def check(self) -> None:
        """To be called before a replay; raises if another rank issues other collectives."""
        for order, labels in self._labels:
            for label in labels:
                order.check(label)
