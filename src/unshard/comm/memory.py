"""Memory for the buffers of collectives that the backend itself hands out."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch

from ..errors import UnsupportedError
from ..torch_private import backend_allocator, symmetric_memory_pool


class CudaPool:
    """A CUDA memory pool; tensors that are allocated inside it stay there when they are emptied and filled again."""

    def __init__(self, pool: Any, device: torch.device):
        self._pool, self._device = pool, device

    def allocating(self) -> AbstractContextManager[None]:
        return torch.cuda.use_mem_pool(self._pool, self._device)


def pool_of_group(group: Any, device: torch.device) -> CudaPool | None:
    """The backend's own memory, if it has any: NCCL registers it once and copies less."""
    allocator = backend_allocator(group, device)
    return None if allocator is None else CudaPool(torch.cuda.MemPool(allocator), device)


def symmetric_pool(device: torch.device, backend: str) -> CudaPool:
    """Memory at the same address on all ranks."""
    if device.type != "cuda":
        raise UnsupportedError(f"Symmetric memory needs a CUDA device, and this module is on {device}.")
    return CudaPool(symmetric_memory_pool(device, backend), device)
