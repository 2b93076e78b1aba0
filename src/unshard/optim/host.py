"""The thread that steps optimizers on the host, with as many cores as this rank may use."""

from __future__ import annotations

import atexit
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import cache
from queue import SimpleQueue
from typing import Any

import torch

Task = tuple[Callable[[], Any], Future[Any]]


def submit(step: Callable[[], Any]) -> Future[Any]:
    """Run a step there, after those submitted before."""
    future: Future[Any] = Future()
    _tasks().put((step, future))
    return future


@cache
def _tasks() -> SimpleQueue[Task | None]:
    """What the thread has to do, which begins with the first call.

    No pool of `concurrent.futures`: that takes nothing any more when the main thread ends, and others may train on.
    """
    tasks: SimpleQueue[Task | None] = SimpleQueue()
    thread = threading.Thread(target=_work, args=(tasks,), name="unshard-host-step", daemon=True)
    thread.start()
    atexit.register(_end, tasks, thread)
    return tasks


def _end(tasks: SimpleQueue[Task | None], thread: threading.Thread) -> None:
    """When the program is over, and all its threads: a step under way must not meet an interpreter that is gone."""
    tasks.put(None)
    thread.join()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_tasks.cache_clear)  # the thread stays with the parent


def _work(tasks: SimpleQueue[Task | None]) -> None:
    _take_cores()
    while (task := tasks.get()) is not None:
        step, future = task
        try:
            future.set_result(step())
        except BaseException as error:
            future.set_exception(error)
        del task, step, future  # whoever waits for the next task does not keep tensors


def _take_cores() -> None:
    """The number of threads is a thread's own, and torch keeps the last one set for threads that are yet to start.

    Programs under torchrun start with one, which is right for a computation on a device and far too few for a step on
    the host. Other threads are to have what they would have had.
    """
    others = torch.get_num_threads()
    torch.set_num_threads(cores_here())
    restoring = threading.Thread(target=torch.set_num_threads, args=(others,))
    restoring.start()
    restoring.join()


def cores_here() -> int:
    """This rank's share of the cores, less the one that feeds the device."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    share = cores // max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    return max(1, share - 1)
