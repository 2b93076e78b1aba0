"""Finds out which ranks wait for which, from what the ranks have announced."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..comm.order.peers import STEP

Record = dict[str, Any]
"""What a rank has announced (see `Announcer.announce`), or an empty dict."""
_WAITS = ("in a collective", "in torch.distributed", "saving", "loading")
"""A rank that is doing this waits for all others, also for those at the same position."""
_EVERY = 5.0  # seconds between announcements of a rank that explains no hangs


def place_in(record: Record, group: str) -> tuple[int, str]:
    """Return how many collectives a rank has announced in a process group, and the latest one."""
    issued, last, _ = record.get("groups", {}).get(group, (-1, "", 0.0))
    return issued, last


def issued_by(record: Record) -> int:
    """Return how many collectives a rank has announced in all of its process groups."""
    return sum(issued for issued, _, _ in record.get("groups", {}).values())


def stalled(record: Record) -> float:
    """Return for how many seconds a rank has announced no new collective."""
    return record.get("written", math.inf) - max(
        (since for _, _, since in record.get("groups", {}).values()), default=0
    )


def every(record: Record) -> float:
    return record.get("facts", {}).get("every", _EVERY)


def has_raised(record: Record) -> bool:
    """Return True if an exception has left forward or backward and no collective has followed."""
    after = record.get("raised_after", {})
    return bool(record.get("raised")) and all(
        issued <= after.get(group, -1) for group, (issued, _, _) in record.get("groups", {}).items()
    )


@dataclass
class Waits:
    """Which ranks wait for which. `groups` maps process groups to their ranks."""

    groups: dict[str, list[int]] = field(default_factory=dict)
    edges: dict[int, dict[int, str]] = field(default_factory=dict)
    """The ranks that each rank waits for, with the process group."""
    missing: list[int] = field(default_factory=list)
    """The ranks that others wait for, and that wait for nobody themselves."""
    circular: bool = False
    """True if all ranks in `missing` wait for each other."""

    @property
    def waiting(self) -> list[int]:
        return sorted(set(self.edges) - set(self.missing))


def find_waits(
    records: Mapping[int, Record], own_groups: Mapping[str, list[int]], seconds: float, silent: Collection[int] = ()
) -> Waits:
    """Return which ranks wait for which. A rank waits only if it has announced nothing for half of `seconds`.

    `own_groups` are process groups whose ranks are known. The ranks in `silent` have stopped announcing.
    """
    groups = {name: set(ranks) for name, ranks in own_groups.items()}
    for rank, record in records.items():
        for name in record.get("groups", {}):
            groups.setdefault(name, set()).add(rank)
    waits = Waits({name: sorted(ranks) for name, ranks in groups.items()})
    idle = {
        rank: record
        for rank, record in records.items()
        if not record.get("ended") and rank not in silent and stalled(record) >= seconds / 2
    }
    # Sorted, because comparing every rank with every other one takes seconds in a job of 1,024 ranks.
    places = {
        group: sorted((place_in(records.get(other, {}), group)[0], other) for other in ranks)
        for group, ranks in groups.items()
    }
    for rank, record in idle.items():
        waits_now = record.get("facts", {}).get("doing", "").startswith(_WAITS)
        for group, (issued, last, _) in record.get("groups", {}).items():
            needed = issued - (last == STEP)  # an optimizer step waits for nobody
            behind = [other for _, other in places[group][: bisect_left(places[group], (needed, -1))]]
            if waits_now:
                gone = groups[group].intersection(silent)
                behind += [other for other in gone if place_in(records.get(other, {}), group)[0] <= issued]
            if behind:
                waits.edges.setdefault(rank, {}).update(dict.fromkeys(behind, group))
    targets = {other for others in waits.edges.values() for other in others}

    def is_cause(rank: int) -> bool:
        record = records.get(rank, {})
        return rank not in waits.edges or rank in silent or bool(record.get("ended")) or has_raised(record)

    waits.missing = sorted(filter(is_cause, targets))
    if targets and not waits.missing:
        waits.missing, waits.circular = sorted(targets), True
    if not targets:
        _find_different(waits, idle)
    return waits


def _find_different(waits: Waits, idle: Mapping[int, Record]) -> None:
    """Find ranks at equal positions that want different collectives, and blame the smaller set of ranks."""
    for group in waits.groups:
        sets: dict[tuple[int, str], list[int]] = {}
        for rank, record in idle.items():
            if group in record.get("groups", {}):
                sets.setdefault(place_in(record, group), []).append(rank)
        if len(sets) > 1 and len({issued for issued, _ in sets}) == 1:
            *fewer, most = sorted(sets.values(), key=lambda ranks: (len(ranks), -ranks[0]))
            waits.missing = sorted(rank for ranks in fewer for rank in ranks)
            waits.edges = {rank: dict.fromkeys(waits.missing, group) for rank in most}
            return


def will_not_come(
    waits: Waits, records: Mapping[int, Record], seconds: float, silent: Collection[int] = ()
) -> list[int]:
    """Return the missing ranks that have ended, or have issued nothing for about `seconds`."""
    return [rank for rank in waits.missing if rank in silent or _is_stuck(records.get(rank, {}), seconds)]


def _is_stuck(record: Record, seconds: float) -> bool:
    return bool(record.get("ended")) or stalled(record) >= seconds - 1.5 * every(record)


def some_of(ranks: Iterable[int], count: int) -> list[int]:
    return sorted(ranks)[:count]
