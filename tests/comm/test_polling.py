"""Waiting for collectives in slices of time."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, NoReturn

import pytest

from unshard.comm.interface import Works
from unshard.comm.order.waiting import PollingWork


class Order:
    """As much of an order as the wait asks for."""

    error = ""
    poll_interval = timedelta(seconds=1)
    looks = 0

    def compare_recent(self) -> None:
        self.looks += 1

    def raise_failed(self, error: RuntimeError, label: Any) -> NoReturn:
        raise ValueError("failed") from error


class Work:
    """Each wait does what the next entry says; an entry "late" completes right after the time is over."""

    def __init__(self, *waits: str) -> None:
        self.waits, self.completed = list(waits), False

    def wait(self, timeout: timedelta) -> None:
        what = self.waits.pop(0) if len(self.waits) > 1 else self.waits[0]
        self.completed = what != "time is over"
        if what != "done":
            raise RuntimeError(what)

    def is_completed(self) -> bool:
        return self.completed


@pytest.mark.parametrize(
    ("works", "looks"),
    [
        ([["done"]], 0),
        ([["time is over", "time is over", "done"]], 2),
        ([["late", "done"]], 0),
        ([["late", "done"], ["late", "done"]], 0),
        ([["late", "done"], ["time is over", "late", "done"]], 1),
    ],
)
def test_a_collective_that_completes_when_the_time_is_over(works: list[list[str]], looks: int) -> None:
    """It has not failed."""
    order: Any = Order()
    each: Any = [Work(*waits) for waits in works]
    PollingWork(each[0] if len(each) == 1 else Works(each), order, None, None).wait()
    assert order.looks == looks


@pytest.mark.parametrize("waits", [["broken"], ["time is over", "broken"], ["late", "broken"]])
def test_a_collective_that_fails(waits: list[str]) -> None:
    order: Any = Order()
    for work in (Work(*waits), Works([Work("done"), Work(*waits)])):
        with pytest.raises(ValueError, match="failed") as caught:
            PollingWork(work, order, None, None).wait()
        assert str(caught.value.__cause__) == "broken"
