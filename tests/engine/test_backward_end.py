"""A backward that an exception left, reported by the destructor of what would have been called at its end."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from unshard.engine.root import BackwardEnd


class Left:
    """A root whose units cannot be returned to rest: a rank that they wait for is gone."""

    resets = 0

    def fail_backward(self, error: BaseException | None) -> None:
        self.resets += 1
        raise RuntimeError("Connection closed by peer")


def test_a_failure_after_a_failure_is_not_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error that left the backward is the user's; a traceback of the destructor would come before it."""
    told: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", told.append)
    root: Any = Left()
    end = BackwardEnd(root)
    del end
    assert root.resets == 1 and not told
