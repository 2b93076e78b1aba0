"""The thread that steps optimizers on the host, with as many cores as this rank may use."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from typing import Any

import torch


def submit(step: Callable[[], Any]) -> Future[Any]:
    """Run a step there, after those submitted before."""
    return _thread().submit(step)


@cache
def _thread() -> ThreadPoolExecutor:
    # The number of threads is a thread's own: programs under torchrun start with one, which is right for a computation
    # on a device and far too few for a step on the host.
    return ThreadPoolExecutor(1, "unshard-host-step", initializer=lambda: torch.set_num_threads(cores_here()))


def cores_here() -> int:
    """This rank's share of the cores, less the one that feeds the device."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    share = cores // max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    return max(1, share - 1)
