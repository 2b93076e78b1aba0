"""Waits for collectives that may never complete because another rank does not issue them.

`SharedCall` is for calls that all ranks make outside of forward and backward, such as clipping, gradient scaling, state
dicts and checkpoints. The ranks compare such a call like a collective.
"""

from __future__ import annotations

import atexit
import ctypes
import logging
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterable
from datetime import timedelta
from functools import cache
from operator import attrgetter
from queue import SimpleQueue
from types import TracebackType
from typing import Any

import torch.distributed as dist

from ...errors import OrderError, UnshardError
from ..interface import Works
from .announcing import announce_end
from .check import Label, Order, known_orders, largest_order

_SHORT_TIMEOUT = timedelta(seconds=0.2)  # after an `OrderError`, when most collectives in flight have completed


def wait_for(work: Any) -> None:
    """Wait for a collective of the whole job. While waiting, look for errors of other ranks."""
    order = largest_order()
    if order is not None and order.waits_on_host:
        PollingWork(work, order, work, None).wait()
    else:
        work.wait()


class SharedCall:
    """A call that all ranks make. Use it as a context manager around the collectives of the call.

    `what` is a constant that completes the sentence "rank 0 wants to ...". Units may be sharded over the process groups
    in `groups`. If `meet` is True, the constructor waits until all ranks have joined. Pass `meet=True` if you issue the
    collectives without `run`.
    """

    def __init__(self, what: str, groups: Iterable[Any], meet: bool = False):
        # In the same order on all ranks, because a comparison may wait for them.
        self._orders = sorted(known_orders(groups), key=attrgetter("name"))
        self._labels = [order.meet(what) if meet else order.compare_call(what) for order in self._orders]

    def __enter__(self) -> SharedCall:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: TracebackType | None) -> None:
        """If a collective failed in the backend, raise an error that names the ranks that did not join."""
        if self._orders and isinstance(error, RuntimeError) and not isinstance(error, UnshardError):
            self._orders[0].raise_failed(error, self._labels[0])

    def run(self, collective: Callable[[bool], Any]) -> None:
        """Call `collective(async_op)` and wait until it completes. While waiting, look for errors of other ranks."""
        with self:
            if self._orders and self._orders[0].waits_on_host:
                PollingWork(collective(True), self._orders[0], collective, self._labels[0]).wait()
            else:
                collective(False)


class PollingWork:
    """A collective in flight on a backend that waits on the host. A long `wait` looks for errors of other ranks."""

    __slots__ = ("_label", "_order", "_owner", "_work")

    def __init__(self, work: Any, order: Order, owner: object, label: Label | None):
        """`owner` stays alive while the collective runs, even if this rank has stopped waiting for the collective."""
        self._work, self._order, self._owner, self._label = work, order, owner, label

    def wait(self) -> None:
        order, work = self._order, self._work
        ended: object = None
        while True:
            try:
                work.wait(_SHORT_TIMEOUT if order.error else order.poll_interval)
                return
            except RuntimeError as error:
                waited_for = work.works[0] if isinstance(work, Works) and work.works else work
                if waited_for is ended:  # the work had ended before this wait, so the error is not a timeout
                    order.raise_failed(error, self._label)
                if work.is_completed():
                    ended = waited_for  # perhaps just after the timeout, so wait once more
                else:
                    self._look_for_errors()

    def _look_for_errors(self) -> None:
        try:
            if self._order.error:
                raise OrderError(self._order.error)
            self._order.compare_recent()
        except UnshardError:
            _give_up(self._work)
            leak(self._work, self._owner)
            raise
        except RuntimeError:
            pass  # the store cannot be reached, so rely on the timeout of the backend


def leak(*objects: object) -> None:
    """Never free `objects`, not even when the interpreter ends.

    A collective may still run after `wait` has raised an error, so its memory must not be freed. Its process group must
    not be freed either: freeing the group waits for the collective, so `destroy_process_group` or the end of the
    program would hang. This was seen with Gloo (torch 2.11 and 2.13). Python clears module-level lists when the
    program ends, so this function increments the reference count instead.
    """
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(objects))


# -- works that ignore their timeout -----------------------------------------------------------------------

# One thread per order, because a collective that never completes blocks its thread. The thread ends with the order.
_threads: weakref.WeakKeyDictionary[Order, SimpleQueue[ThreadWaitedWork | None]] = weakref.WeakKeyDictionary()
_given_up: list[ThreadWaitedWork] = []  # a thread may be blocked in each of these


def with_timeout(work: Any, order: Order) -> Any:
    """Return a work that waits for `work` in a background thread, because the backend ignores timeouts."""
    if isinstance(work, Works):
        return Works([with_timeout(each, order) for each in work.works])
    if not isinstance(work, dist.Work):
        return work
    works = _threads.get(order)
    if works is None:
        _register_at_exit()
        works = _threads[order] = SimpleQueue()
        # A daemon, because a collective that never completes may still block it when the program ends.
        threading.Thread(target=_run, args=(works,), name="unshard waits", daemon=True).start()
        weakref.finalize(order, works.put, None).atexit = False
    waited = ThreadWaitedWork(work)
    works.put(waited)
    return waited


def _give_up(work: Any) -> None:
    if isinstance(work, Works):
        for each in work.works:
            _give_up(each)
    elif isinstance(work, ThreadWaitedWork):
        work.give_up()


def _run(works: SimpleQueue[ThreadWaitedWork | None]) -> None:
    # `_run_one` is a separate function, so no variable keeps a work alive during the wait for the next one.
    while _run_one(works):
        pass


def _run_one(works: SimpleQueue[ThreadWaitedWork | None]) -> bool:
    work = works.get()
    if work is not None:
        work.run()
    return work is not None


class ThreadWaitedWork:
    """A work whose `wait` has a timeout, because a background thread waits for the collective.

    This is needed for Gloo's own reduce-scatter, which ignores its timeout.
    """

    __slots__ = ("_error", "_under_way", "_work")

    def __init__(self, work: Any):
        self._work = work
        self._error: Exception | None = None
        self._under_way = threading.Lock()
        self._under_way.acquire()

    def run(self) -> None:
        """Wait for the collective and drop the reference to it. The background thread calls this method."""
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
        self._under_way.release()  # so that a second wait returns at once
        if self._error is not None:
            raise self._error

    def give_up(self) -> None:
        """Stop waiting for this work. The background thread may stay blocked in its collective forever."""
        if not self.is_completed():
            _given_up.append(self)

    def is_completed(self) -> bool:
        return not self._under_way.locked()


@cache
def _register_at_exit() -> None:
    atexit.register(_exit_if_blocked)


def _exit_if_blocked() -> None:
    """End the program with exit code 1 if a thread is blocked in a collective.

    If another rank ends at the same moment, its connection closes, and the blocked thread returns from C++. If Python
    is then shutting down, it ends this thread by force, and the process aborts with SIGABRT.
    """
    if _given_up:
        announce_end()
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)
