"""Ranks that are threads of this process, with torch's process group for that."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.testing._internal.distributed import multi_threaded_pg as threaded

Group = threaded.ProcessLocalGroup


def run_threads(size: int, body: Callable[[int], Any], timeout: float = 300.0) -> list[Any]:
    """`body(rank)` in a thread for each rank of a job; what they return. The first exception is raised here."""
    isolate = torch._C._distributed_c10d._set_thread_isolation_mode
    store, results, errors = dist.HashStore(), [None] * size, []

    def run(rank: int) -> None:
        dist.init_process_group("threaded", rank=rank, world_size=size, store=store)
        try:
            results[rank] = body(rank)
        except BaseException as error:
            errors.append(error)
            Group.exception_handle(error)  # the other ranks give up
        finally:
            dist.destroy_process_group()

    isolate(True)
    threaded._install_threaded_pg()
    try:
        threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(size)]
        for each in threads:
            each.start()
        for each in threads:
            each.join(timeout)
        if any(each.is_alive() for each in threads):
            Group.exception_handle(TimeoutError())
            errors.append(TimeoutError("a rank waits for a collective that another one does not issue"))
    finally:
        Group.reset()
        threaded._uninstall_threaded_pg()
        isolate(False)
    if errors:
        raise errors[0]
    return results
