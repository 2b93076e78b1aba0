"""Which rows of a test that runs on ranks belong to `make test`: a few of them. `make test-all` runs all."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import pytest

MOST_ROWS = 3


def leave_few_quick(items: Iterable[pytest.Item]) -> None:
    """Mark rows as slow until no test in tests/distributed has more than `MOST_ROWS` that are not."""
    tests: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if "distributed" in item.path.parts and not item.get_closest_marker("slow"):
            tests[item.nodeid.partition("[")[0]].append(item)
    for rows in tests.values():
        kept = few_of(rows, [_world_size(row) for row in rows])
        for row in rows:
            if row not in kept:
                row.add_marker(pytest.mark.slow)


def few_of(rows: Sequence[Any], sizes: Sequence[int]) -> list[Any]:
    """At most `MOST_ROWS`: the first row of each world size, and rows of the largest one from the first to the last."""
    if len(rows) <= MOST_ROWS:
        return list(rows)
    largest = max(sizes)
    kept = [rows[sizes.index(size)] for size in sorted(set(sizes)) if size != largest][: MOST_ROWS - 2]
    others = [row for row, size in zip(rows, sizes, strict=True) if size == largest]
    places = min(MOST_ROWS - len(kept), len(others))
    gaps = max(places - 1, 1)
    return [*kept, *(others[place * (len(others) - 1) // gaps] for place in range(places))]


def _world_size(item: pytest.Item) -> int:
    """0 if the test starts its ranks itself."""
    callspec = getattr(item, "callspec", None)
    return callspec.params.get("world_size", 0) if callspec else 0
