"""The ranks of a job decide together, through the job's store, whether they record a step."""

from __future__ import annotations

import time
import weakref
from collections.abc import Sequence
from enum import Enum
from typing import Any

import torch.distributed as dist

from ..comm.order.peers import keys_of_job

PATIENCE = 60.0  # seconds that a rank waits for the others: the step would wait for them as well
KEPT = 64  # calls whose keys stay in the store; ranks are never that far apart

_made: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
"""How many numbers were given, by default group."""
_made_before = [0]
"""The same, where there is no process group yet."""


class Answer(Enum):
    YES = "yes"
    NO = "no"
    """A rank does not want to."""
    REFUSED = "refused"
    """A rank cannot, now or later."""
    LATE = "late"
    """A rank did not come in time."""


def next_number() -> int:
    """Of a captured step: the n-th of one rank decides with the n-th of the others."""
    if not dist.is_initialized():
        _made_before[0] += 1
        return -_made_before[0]
    _made[dist.group.WORLD] = _made.get(dist.group.WORLD, 0) + 1
    return _made[dist.group.WORLD]


class Agreement:
    """Decisions about the calls of one captured step. The answer is the same on all ranks."""

    def __init__(self, ranks: Sequence[int], number: int):
        """`ranks`: those that decide; none where this process decides alone."""
        self._size, self._cleans = len(ranks), bool(ranks) and dist.get_rank() == ranks[0]
        self._store: dist.Store | None = None
        if self._size > 1:
            self._store = dist.PrefixStore(f"capture {number} {','.join(map(str, ranks))}", keys_of_job())

    def decide(self, call: int, about: str, wanted: bool, patience: float | None = None) -> Answer:
        """`call`: the number of the call; `patience`: seconds to wait for ranks that do not come."""
        store, name = self._store, f"{call} {about}"
        if store is None:
            return Answer.YES if wanted else Answer.NO
        self._clean(store, call, about)
        if not wanted:
            return self._settle(store, name, Answer.NO)
        if store.add(f"{name} count", 1) == self._size:
            return self._settle(store, name, Answer.YES)
        deadline, pause = time.monotonic() + (PATIENCE if patience is None else patience), 0.0005
        while not store.check([name]):
            if time.monotonic() > deadline:
                return self._settle(store, name, Answer.LATE)
            time.sleep(pause)
            pause = min(2 * pause, 0.05)
        return Answer(store.get(name).decode())

    def refuse(self, call: int, about: str) -> None:
        """Answer the other ranks, so that they do not wait for this one."""
        if self._store is not None:
            self._clean(self._store, call, about)
            self._settle(self._store, f"{call} {about}", Answer.REFUSED)

    def _clean(self, store: dist.Store, call: int, about: str) -> None:
        if self._cleans and call > KEPT:
            store.delete_key(f"{call - KEPT} {about}")
            store.delete_key(f"{call - KEPT} {about} count")

    @staticmethod
    def _settle(store: dist.Store, name: str, answer: Answer) -> Answer:
        """Write the answer unless there is one, which then holds."""
        return Answer(store.compare_set(name, "", answer.value).decode())
