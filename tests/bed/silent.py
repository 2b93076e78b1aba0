"""A job whose collectives do nothing at all, for counting what the caller does around them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist


class _Done(dist._Work):
    def wait(self, timeout: object = None) -> bool:
        return True


class Silent(dist.ProcessGroup):
    """Outputs keep what they hold: Gloo and the loop-back group run tensor operations of their own, this does not."""

    def _done(self, *tensors: Any) -> _Done:
        return _Done()

    def getBackendName(self) -> str:
        return "silent"

    def setGroupName(self, name: str) -> None:
        self._name = name

    def getGroupName(self) -> str:
        return getattr(self, "_name", "")

    _allgather_base = allgather_into_tensor_coalesced = _done
    _reduce_scatter_base = reduce_scatter_tensor_coalesced = _done
    allreduce = broadcast = barrier = allgather = _done


def _create(store: object, rank: int, size: int, timeout: object) -> Silent:
    return Silent(rank, size)


@contextlib.contextmanager
def job(world: int) -> Iterator[None]:
    if "silent" not in dist.Backend.backend_list:
        dist.Backend.register_backend("silent", _create, devices=["cpu", "cuda"])
    dist.init_process_group("silent", store=dist.HashStore(), rank=0, world_size=world)
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        dist.destroy_process_group()
