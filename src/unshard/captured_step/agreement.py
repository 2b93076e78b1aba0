"""The ranks of a job decide together, through the job's store, whether they record a step."""

from __future__ import annotations

import time
import weakref
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from ..comm.order.store import keys_of_job

PATIENCE = 10.0  # seconds that a rank waits for the others to come to record
_YES, _NO = b"yes", b"no"

_made: weakref.WeakKeyDictionary[Any, dict[str, int]] = weakref.WeakKeyDictionary()
"""How many were made for each set of ranks, by default group."""


class Agreement:
    """Decisions by name. One is "yes" if all ranks say so in time, else "no"; it is the same on all ranks.

    The ranks make theirs in the same order: the n-th of one decides with the n-th of the others.
    """

    def __init__(self, ranks: Sequence[int]):
        """`ranks`: those that decide; none where this process decides alone."""
        self._size = len(ranks)
        self._store: dist.Store | None = None
        if self._size > 1:
            listed = ",".join(map(str, ranks))
            made = _made.setdefault(dist.group.WORLD, {})
            made[listed] = made.get(listed, 0) + 1
            self._store = dist.PrefixStore(f"capture {made[listed]} {listed}", keys_of_job())

    def decide(self, name: str, wanted: bool, patience: float | None = None) -> bool:
        """`patience`: seconds to wait for ranks that do not come."""
        store = self._store
        if store is None:
            return wanted
        if not wanted:
            return self._settle(store, name, _NO)
        if store.add(f"{name} count", 1) == self._size:
            return self._settle(store, name, _YES)
        deadline, pause = time.monotonic() + (PATIENCE if patience is None else patience), 0.0005
        while not store.check([name]):
            if time.monotonic() > deadline:
                return self._settle(store, name, _NO)
            time.sleep(pause)
            pause = min(2 * pause, 0.05)
        return store.get(name) == _YES

    @staticmethod
    def _settle(store: dist.Store, name: str, decision: bytes) -> bool:
        """Write the decision unless there is one, which then holds."""
        return store.compare_set(name, "", decision.decode()) == _YES
