"""Waiting for a collective that may never complete."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from ..errors import OrderError
from .abandoned import abandon
from .order import Order
from .waiter import WaitedWork

_MOMENT = timedelta(seconds=0.2)  # for what is under way when the order is lost already: most of it has completed


class PatientWork:
    """A collective of a backend that waits on the host. One call of its `wait` as long as nothing is wrong."""

    __slots__ = ("_group", "_order", "_work")

    def __init__(self, work: Any, order: Order, group: Any):
        self._work, self._order, self._group = work, order, group

    def wait(self) -> None:
        order, work = self._order, self._work
        while True:
            try:
                work.wait(_MOMENT if order.trouble else order.slice)
                return
            except RuntimeError as error:
                if work.is_completed():
                    order.failed()
                    raise
                self._overdue(error)

    def _overdue(self, error: RuntimeError) -> None:
        try:
            if self._order.trouble:
                raise OrderError(self._order.trouble)
            self._order.look()
        except OrderError:
            if isinstance(self._work, WaitedWork):
                self._work.give_up()
            abandon(self._work, self._group)
            raise
        except RuntimeError:
            pass  # the store cannot be reached; then there is nothing to learn, and the backend has its own timeout
