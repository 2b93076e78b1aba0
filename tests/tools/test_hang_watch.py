"""When a rank counts as silent: a loaded machine is not a dead one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from unshard.tools import hang_watch
from unshard.tools.hang_watch import JobWatch


class Clock:
    now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.mark.parametrize(("every", "limit"), [(2 / 3, 5.0), (5.0, 15.5)])
def test_silent_ranks(every: float, limit: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank is silent after three missed announcements, and after five seconds at least."""
    clock = Clock()
    monkeypatch.setattr(hang_watch, "time", clock)
    announcer: Any = SimpleNamespace(rank=0, size=3)
    watch = JobWatch(announcer, 2.0, print, print, dict)
    slow, fast = ({"count": 1, "facts": {"every": every}} for _ in range(2))
    records = {1: slow, 2: fast}
    assert watch._silent(records) == {}
    clock.now += limit
    fast["count"] = 2
    assert watch._silent(records) == {}
    clock.now += 0.1
    assert watch._silent(records) == {1: pytest.approx(limit + 0.1)}
    slow["count"] = 2
    assert watch._silent(records) == {}
    clock.now += limit + 0.1
    assert sorted(watch._silent({**records, 2: {**fast, "ended": "has ended"}})) == [1]
