"""Exchanges what the ranks have seen through the job's store. A rank without findings sends nothing in a step."""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import asdict
from datetime import timedelta

import torch.distributed as dist

from ..errors import listed
from ..torch_private import job_store
from .nonfinite import Reports, Seen

_log = logging.getLogger("unshard")
_MOST_REPORTS = 1000  # of one rank: a training run with NaN weights would write one in every step
_SETTLED = 2  # other ranks have read their values of a step once this rank has read those of two steps later
_ABSENT = "these ranks have no watch: {}. Findings do not tell what they saw. Call watch() on all ranks of the model."
PATIENCE = timedelta(seconds=10)


class Exchange:
    """Sends this rank's reports to all ranks and reads theirs, without collectives."""

    def __init__(self, ranks: Iterable[int] = ()) -> None:
        """`ranks` are the ranks of the model. All of them create an exchange."""
        self.rank, self.world, self.reports = 0, 1, Reports()
        self._store, self._is_partial = None, False
        self._read = self._sent = 0
        if dist.is_initialized() and dist.get_world_size() > 1:
            self.rank, self.world = dist.get_rank(), dist.get_world_size()
            self._ranks = {*ranks, self.rank}
            self._job = dist.PrefixStore("unshard watch", job_store())
            own = f"watches of {self.rank}"
            self._number = self._job.add(own, 1)
            if self._job.check(["incomplete"]):
                # This rank took no part in some watches. The others have counted them.
                behind = int(self._job.get("incomplete")) + 1 - self._number
                self._number = self._job.add(own, max(0, behind))
            self._store = dist.PrefixStore(f"{self._number}", self._job)
            self._say("started")

    def report(self, step: int, seen: list[Seen]) -> None:
        self._add(self.rank, step, seen)
        if self._store is not None and self._sent < _MOST_REPORTS:
            self._sent += 1
            with suppress(RuntimeError):  # the store cannot be reached: the job is ending
                number = self._store.add("reports", 1)
                self._store.set(f"report {number}", json.dumps([self.rank, step, [asdict(each) for each in seen]]))

    def read(self) -> None:
        """Read new reports of other ranks. One request if there are none."""
        if self._store is None:
            return
        with suppress(RuntimeError):
            count = self._store.add("reports", 0)
            while self._read < count:
                key = f"report {self._read + 1}"
                self._store.wait([key], PATIENCE)  # its writer has only counted it so far
                rank, step, seen = json.loads(self._store.get(key))
                self._read += 1
                if rank != self.rank:
                    self._add(rank, step, [Seen(**each) for each in seen])

    def _add(self, rank: int, step: int, seen: list[Seen]) -> None:
        known = self.reports.setdefault(step, {}).setdefault(rank, [])
        known += [each for each in seen if each not in known]

    def due(self, last_read: int) -> float:
        """Return the last step whose reports should have arrived, if this rank has read its values of `last_read`."""
        return math.inf if self._store is None else last_read - _SETTLED

    def complete(self, last_read: int) -> float:
        """Read new reports. Return the last step about which all ranks have certainly reported."""
        ended = self._have_ended()  # before the reports are read
        self.read()
        if self._is_partial or (not ended and self.without("started")):
            return 0
        return math.inf if ended else self.due(last_read)

    # -- who takes part ------------------------------------------------------------------------------------------

    def without(self, what: str) -> list[int]:
        """Return the ranks of the model that have not "started" or "ended". One request if there are none."""
        with suppress(RuntimeError):
            if self._store is not None and not self._store.check([f"{what} {rank}" for rank in self._ranks]):
                return [rank for rank in sorted(self._ranks) if not self._store.check([f"{what} {rank}"])]
        return []

    def leave_out_absent(self) -> list[int]:
        """Return the ranks of the model that have not started, and expect nothing of them from now on."""
        absent = self.without("started")
        if absent:
            self._is_partial = True
            self._ranks -= set(absent)
            if self.rank == min(self._ranks):
                _log.warning("watch: %s", _ABSENT.format(listed(absent)))
            with suppress(RuntimeError):
                self._job.set("incomplete", str(self._number))
        return absent

    def _say(self, what: str) -> None:
        assert self._store is not None
        self._store.set(f"{what} {self.rank}", "")
        self._store.add(what, 1)

    def _have_ended(self) -> bool:
        """Return True if all ranks have ended: those of the model, and others that have started."""
        if self._store is None:
            return True
        with suppress(RuntimeError):
            return not self.without("ended") and self._store.add("ended", 0) >= self._store.add("started", 0)
        return False

    def end(self, patience: timedelta = PATIENCE) -> bool:
        """Say that this rank reports no more, and wait for the others. Return False if any did not end."""
        if self._store is None:
            return True
        with suppress(RuntimeError):
            self._say("ended")
        return _until(self._have_ended, patience)


def _until(met: Callable[[], bool], patience: timedelta) -> bool:
    limit, pause = time.monotonic() + patience.total_seconds(), 0.001
    while not met():
        if time.monotonic() > limit:
            return False
        time.sleep(pause)
        pause = min(2 * pause, 0.1)
    return True
