"""A thread that waits for collectives whose own wait cannot be given up."""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
from datetime import timedelta
from functools import cache
from queue import SimpleQueue
from typing import Any


class Waiter:
    """Waits, one after the other, for the works it is given. The thread ends with the waiter.

    A daemon, for it may be stuck in a collective that never completes when the program ends.
    """

    def __init__(self) -> None:
        _watch_exit()
        self._works: SimpleQueue[WaitedWork | None] = SimpleQueue()
        threading.Thread(target=_serve, args=(self._works,), name="unshard waits", daemon=True).start()

    def watch(self, work: Any) -> WaitedWork:
        waited = WaitedWork(work)
        self._works.put(waited)
        return waited

    def __del__(self) -> None:
        self._works.put(None)


def _serve(works: SimpleQueue[WaitedWork | None]) -> None:
    while _serve_one(works):
        pass


def _serve_one(works: SimpleQueue[WaitedWork | None]) -> bool:
    """A function of its own, so that nothing of the last work is held while there is no next one."""
    work = works.get()
    if work is not None:
        work.run()
    return work is not None


class WaitedWork:
    """A work that can be waited for in slices: Gloo's reduce-scatter takes a timeout and pays no attention to it."""

    __slots__ = ("_error", "_under_way", "_work")

    def __init__(self, work: Any):
        self._work = work
        self._error: Exception | None = None
        self._under_way = threading.Lock()
        self._under_way.acquire()

    def run(self) -> None:
        """In the waiter's thread."""
        try:
            self._work.wait()
        except Exception as error:
            self._error = error
        finally:
            self._work = None
            self._under_way.release()

    def wait(self, timeout: timedelta) -> None:
        if not self._under_way.acquire(timeout=timeout.total_seconds()):
            raise RuntimeError("timed out")
        self._under_way.release()  # it may be waited for again
        if self._error is not None:
            raise self._error

    def give_up(self) -> None:
        """Nobody waits any more. The waiter's thread may be stuck in the collective for good."""
        if not self.is_completed():
            _Stuck.threads += 1

    def is_completed(self) -> bool:
        return not self._under_way.locked()


class _Stuck:
    threads = 0


@cache
def _watch_exit() -> None:
    atexit.register(_end_if_stuck)


def _end_if_stuck() -> None:
    """End a program that has a thread stuck in a collective, as failed, which it has.

    A thread that comes back from C++ while the interpreter shuts down is ended by force, and takes the process with it
    (SIGABRT): when the other rank ends at the same moment, its connection closes and the thread comes back.
    """
    if _Stuck.threads:
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)
