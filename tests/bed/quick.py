"""Which rows of a test that runs on ranks belong to `make test`: one or two of them. `make test-all` runs all."""

from __future__ import annotations

import zlib
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import pytest

MOST_RANKS = 3  # that the rows of one test have together; a row of more ranks is alone
OWN_RANKS = 3  # if a test starts its ranks itself


def leave_few_quick(items: Iterable[pytest.Item]) -> None:
    """Mark rows of tests in tests/distributed as slow until the others have few ranks."""
    tests: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if "distributed" in item.path.parts and not item.get_closest_marker("slow"):
            tests[item.nodeid.partition("[")[0]].append(item)
    for name, rows in tests.items():
        kept = few_of(rows, [_world_size(row) for row in rows], zlib.crc32(name.encode()))
        for row in rows:
            if row not in kept:
                row.add_marker(pytest.mark.slow)


def few_of(rows: Sequence[Any], sizes: Sequence[int], seed: int) -> list[Any]:
    """A row of each world size, from the largest down, as long as they have at most `MOST_RANKS` ranks together.

    `seed` chooses among rows of one size: over all tests, each value of a common parameter is a quick one somewhere.
    """
    kept: list[Any] = []
    ranks = 0
    for size in sorted(set(sizes), reverse=True):
        if not kept or ranks + size <= MOST_RANKS:
            choice = [row for row, each in zip(rows, sizes, strict=True) if each == size]
            kept.append(choice[seed % len(choice)])
            ranks += size
    return kept


def _world_size(item: pytest.Item) -> int:
    callspec = getattr(item, "callspec", None)
    return callspec.params.get("world_size", OWN_RANKS) if callspec else OWN_RANKS
