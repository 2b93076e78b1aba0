"""Objects of one kind that are still in use, for code that knows a parameter and not who manages it."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterator
from typing import Generic, TypeVar

_Kind = TypeVar("_Kind")


class Living(Generic[_Kind]):
    """Oldest first, so that sums over them are added in the same order in every run. Keeps nothing alive."""

    def __init__(self) -> None:
        self._each: weakref.WeakValueDictionary[int, _Kind] = weakref.WeakValueDictionary()
        self._numbers = itertools.count()

    def add(self, one: _Kind) -> None:
        self._each[next(self._numbers)] = one

    def __iter__(self) -> Iterator[_Kind]:
        return iter(list(self._each.values()))
