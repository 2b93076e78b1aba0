"""Waiting for a collective that may never complete, because another rank does not issue it."""

from __future__ import annotations

import atexit
import ctypes
import logging
import os
import sys
import threading
from datetime import timedelta
from functools import cache
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from ...errors import OrderError, UnshardError
from ..interface import Label, Works
from .announcements import announce_end

if TYPE_CHECKING:
    from .check import Order

_SHORT_TIMEOUT = timedelta(seconds=0.2)  # once the order is broken: most collectives in flight have completed


class PollingWork:
    """A collective of a backend that waits on the host. One call of its `wait` as long as nothing is wrong."""

    __slots__ = ("_label", "_order", "_transport", "_work")

    def __init__(self, work: Any, order: Order, transport: object, label: Label | None):
        self._work, self._order, self._transport, self._label = work, order, transport, label

    def wait(self) -> None:
        order, work = self._order, self._work
        ended: object = None
        while True:
            try:
                work.wait(_SHORT_TIMEOUT if order.error else order.poll_interval)
                return
            except RuntimeError as error:
                waited_for = work.works[0] if isinstance(work, Works) and work.works else work
                if waited_for is ended:  # before the wait, so that the error is its own
                    order.raise_failed(error, self._label)
                if work.is_completed():
                    ended = waited_for  # perhaps just after the time was over: the next wait tells
                else:
                    self._look_for_errors()

    def _look_for_errors(self) -> None:
        try:
            if self._order.error:
                raise OrderError(self._order.error)
            self._order.compare_recent()
        except UnshardError:
            _give_up(self._work)
            leak(self._work, self._transport)
            raise
        except RuntimeError:
            pass  # the store cannot be reached; then nothing can be found out, and the backend has its own timeout


def leak(*objects: object) -> None:
    """Never free these, not even when the interpreter ends.

    A collective that is given up may go on at any time, so its memory has to stay. And a process group is not destroyed
    before its collectives are done: `destroy_process_group`, or the end of the program, would wait for it (seen with
    Gloo, torch 2.11 and 2.13). A list in a module would be emptied at the end of the program, hence a reference that
    nobody holds.
    """
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(objects))


def with_timeout(work: Any, thread: WaitThread) -> Any:
    """The same work, for a backend whose own works ignore a timeout: a thread waits for these."""
    if isinstance(work, Works):
        return Works([with_timeout(each, thread) for each in work.works])
    return thread.watch(work) if isinstance(work, dist.Work) else work


def _give_up(work: Any) -> None:
    if isinstance(work, Works):
        for each in work.works:
            _give_up(each)
    elif isinstance(work, ThreadWaitedWork):
        work.give_up()


class WaitThread:
    """Waits, one after the other, for works whose own wait cannot be given up. The thread ends with this object.

    A daemon, because a collective that never completes may block it when the program ends.
    """

    def __init__(self) -> None:
        _register_at_exit()
        self._works: SimpleQueue[ThreadWaitedWork | None] = SimpleQueue()
        threading.Thread(target=_run, args=(self._works,), name="unshard waits", daemon=True).start()

    def watch(self, work: Any) -> ThreadWaitedWork:
        waited = ThreadWaitedWork(work)
        self._works.put(waited)
        return waited

    def __del__(self) -> None:
        self._works.put(None)


def _run(works: SimpleQueue[ThreadWaitedWork | None]) -> None:
    while _run_one(works):
        pass


def _run_one(works: SimpleQueue[ThreadWaitedWork | None]) -> bool:
    """A function of its own, so that nothing of the last work is held while there is no next one."""
    work = works.get()
    if work is not None:
        work.run()
    return work is not None


class ThreadWaitedWork:
    """A work that takes a timeout, because a thread waits for it: Gloo's own reduce-scatter ignores its timeout."""

    __slots__ = ("_error", "_under_way", "_work")

    def __init__(self, work: Any):
        self._work = work
        self._error: Exception | None = None
        self._under_way = threading.Lock()
        self._under_way.acquire()

    def run(self) -> None:
        """In the thread."""
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
        """Nobody waits any more. The collective may block the thread for good."""
        if not self.is_completed():
            _Blocked.threads += 1

    def is_completed(self) -> bool:
        return not self._under_way.locked()


class _Blocked:
    threads = 0


@cache
def _register_at_exit() -> None:
    atexit.register(_exit_if_blocked)


def _exit_if_blocked() -> None:
    """End a program that has a thread blocked in a collective, as failed, which it has.

    A thread that returns from C++ while the interpreter shuts down is ended by force, and takes the process with it
    (SIGABRT): when the other rank ends at the same moment, its connection closes and the thread returns.
    """
    if _Blocked.threads:
        announce_end()
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)
