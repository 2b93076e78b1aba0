"""Process groups: collectives without Python's checks, and what their backends can tell."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllgatherOptions as AllgatherOptions
from torch._C._distributed_c10d import AllreduceOptions as AllreduceOptions
from torch._C._distributed_c10d import ReduceScatterOptions as ReduceScatterOptions


def gather_one(group: Any, output: torch.Tensor, input: torch.Tensor, options: AllgatherOptions) -> Any:
    """The group's own all-gather of one tensor; renamed `all_gather_single` in 2.13, which keeps this name."""
    return group._allgather_base(output, input, options)


def reduce_scatter_one(group: Any, output: torch.Tensor, input: torch.Tensor, options: ReduceScatterOptions) -> Any:
    """The group's own reduce-scatter of one tensor; renamed in 2.13, which keeps this name."""
    return group._reduce_scatter_base(output, input, options)


def reduce_scatter_into(output: torch.Tensor, input: torch.Tensor, group: Any) -> None:
    """The function of `torch.distributed`, which 2.13 renames, and warns where the older name is used."""
    function: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    function(output, input, group=group)


_REDUCE_SCATTERS = {
    name: getattr(dist, name) for name in ("reduce_scatter_single", "reduce_scatter_tensor") if hasattr(dist, name)
}


def replaced_reduce_scatter() -> Callable[..., object] | None:
    """What a program has put in the place of `torch.distributed`'s reduce-scatter, if it has. 2.13 has two names."""
    for name, original in _REDUCE_SCATTERS.items():
        if (now := getattr(dist, name)) is not original:
            return now
    return None


def backend_allocator(group: Any, device: torch.device) -> Any:
    """What the backend allocates its own memory with, or None. All versions."""
    if device.type != "cuda":
        return None
    backend = group._get_backend(device)
    return backend.mem_allocator if backend.supports_tensor_alloc(device) else None


def symmetric_memory_pool(device: torch.device, backend: str) -> Any:
    """Torch's pool of symmetric memory; the module has no public name yet. All versions."""
    from torch.distributed import _symmetric_memory

    _symmetric_memory.set_backend(backend)  # type: ignore[arg-type]
    return _symmetric_memory.get_mem_pool(device)


def backend_name(group: Any, device: torch.device) -> str:
    """Name of the backend that serves `device` in `group`; for a group written in Python, its own name.

    `dist.get_backend` answers for the group's default device only. All versions.
    """
    try:
        return group._get_backend(device).name().lower()
    except (RuntimeError, AttributeError):
        return group.name().lower()


def served_device_types(group: Any) -> list[str]:
    """The types of device whose tensors `group` can send; there is no public way. All versions."""
    return [device.type for device in group._device_types]


def job_store() -> dist.Store:
    """The store through which the ranks of the job found each other, over a connection of its own. All versions.

    There is no public way to it, and a connection that others use too would make them wait for us.
    """
    return dist.distributed_c10d._get_default_store().clone()  # type: ignore[attr-defined]


def group_timeout(group: Any, device: torch.device) -> timedelta:
    """How long a collective of `group` may take before its backend fails it; there is no public way. All versions."""
    return group._get_backend(device).options._timeout
