"""Process groups and device meshes: names of collectives, backends, stores, groups, and concatenated meshes."""

from __future__ import annotations

import copy
import importlib
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllgatherOptions as AllgatherOptions
from torch._C._distributed_c10d import AllreduceOptions as AllreduceOptions
from torch._C._distributed_c10d import ReduceScatterOptions as ReduceScatterOptions
from torch.distributed.device_mesh import DeviceMesh

# -- collectives -------------------------------------------------------------------------------------------

# Methods of a process group that the functions of `torch.distributed` call, after checks in Python. Since 2.13 these
# functions call the first name; 2.13 keeps the second, and 2.11 and 2.12 have only the second. A group written in
# Python may have either.
ALL_GATHER = ("all_gather_single", "_allgather_base")
ALL_GATHER_COALESCED = ("all_gather_single_coalesced", "allgather_into_tensor_coalesced")
REDUCE_SCATTER = ("reduce_scatter_single", "_reduce_scatter_base")
REDUCE_SCATTER_COALESCED = ("reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced")
ALL_TO_ALL = ("all_to_all_single", "alltoall_base")


def low_precision_of(hook: Any) -> torch.dtype | None:
    """Return the dtype that `hook` sends if it is one of torch's compressing communication hooks for FSDP, else None.

    The hooks' module is looked up, not imported: if nothing has imported it, `hook` is not one of its hooks.
    """
    module: Any = sys.modules.get("torch.distributed.algorithms._comm_hooks.default_hooks")
    if module is None:
        return None
    if hook is module.fp16_compress_hook:
        return torch.float16
    return torch.bfloat16 if hook is module.bf16_compress_hook else None


# -- backends and stores -----------------------------------------------------------------------------------


def backend_allocator(group: Any, device: torch.device) -> Any:
    """Return the allocator of the backend's own memory, or None if the backend has none."""
    if device.type != "cuda":
        return None
    backend = backend_of(group, device)
    return backend.mem_allocator if backend is not None and backend.supports_tensor_alloc(device) else None


def symmetric_memory_pool(device: torch.device, backend: str) -> Any:
    """Select `backend` for torch's symmetric memory, and return its memory pool on `device`."""
    from torch.distributed import _symmetric_memory

    _symmetric_memory.set_backend(backend)  # type: ignore[arg-type]
    return _symmetric_memory.get_mem_pool(device)


def backend_of(group: Any, device: torch.device) -> Any:
    """Return the backend of `group` for `device`, or None. Most groups written in Python have no backend."""
    try:
        return group._get_backend(device)
    except (RuntimeError, AttributeError, NotImplementedError):
        return None


def backend_name(group: Any, device: torch.device) -> str:
    """Return the name of the backend of `group` for `device`, or the group's own name if there is no backend.

    `dist.get_backend` knows only the backend of the group's default device.
    """
    backend = backend_of(group, device)
    try:
        return str((group if backend is None else backend).name()).lower()
    except Exception:  # a class written in Python need not have a name
        return "unknown"


def served_device_types(group: Any) -> list[str]:
    """Return the device types for which `group` has backends. The list is empty if they are unknown."""
    return [device.type for device in getattr(group, "_device_types", ())]


def job_store() -> dist.Store:
    """Return the default process group's store, over a separate connection, so that nobody waits for our requests."""
    return dist.distributed_c10d._get_default_store().clone()  # type: ignore[attr-defined]


def call_before_destruction(callback: Callable[[], None]) -> None:
    """Call `callback` once, at the start of `destroy_process_group()`, which ends the job on this rank.

    Torch then finalizes its `torchcomms`, before it destroys the process groups.
    """
    dist.distributed_c10d._world.comms.append(SimpleNamespace(finalize=callback))


def number_of_groups() -> int:
    """Return how many process groups this rank is in.

    Up to 2.13, torch uses this number in the name of a group that only its own ranks create.
    """
    return len(dist.distributed_c10d._world.pg_names)


_OWN_NUMBERS = 1 << 32  # above any number that torch itself gives out
_own_groups: weakref.WeakKeyDictionary[Any, Counter[tuple[int, ...]]] = weakref.WeakKeyDictionary()  # by default group


@contextmanager
def own_group_name(ranks: Sequence[int]) -> Iterator[None]:
    """Inside this context, give a new process group of `ranks` a name with one of our numbers.

    Torch names groups by a counter that all ranks must agree on. Since 2.14, the counter includes groups that only
    their own ranks create. Other ranks then have a different count, and the next `new_group` of the whole job waits
    forever. Our numbers depend only on the ranks of the group, and torch's counter does not change. Torch 2.11 to 2.13
    use the counter only for groups of the whole job.
    """
    world, made = dist.distributed_c10d._world, _own_groups.setdefault(dist.group.WORLD, Counter())
    before, world.group_count = world.group_count, _OWN_NUMBERS + made[tuple(ranks)]
    made[tuple(ranks)] += 1
    try:
        yield
    finally:
        world.group_count = before


def nccl_options(group: Any, device: torch.device) -> Any:
    """Return a copy of the options of the group's NCCL backend, or None if it is wrapped, as in debug mode."""
    options = getattr(backend_of(group, device), "options", None)
    return copy.deepcopy(options) if isinstance(options, dist.ProcessGroupNCCL.Options) else None


def group_timeout(group: Any, device: torch.device) -> timedelta:
    """Return the timeout of collectives of `group` on `device`, or PyTorch's default if it is unknown."""
    try:
        return group._get_backend(device).options._timeout
    except (AttributeError, RuntimeError):
        return dist.distributed_c10d.default_pg_timeout


# -- meshes ------------------------------------------------------------------------------------------------

# Equal meshes are one object while any parameter uses it: comparing equal meshes of all parameters takes milliseconds
# in every step. The key holds the meshes, and these hold their roots, so no id is reused.
_concatenated: weakref.WeakValueDictionary[Any, DeviceMesh] = weakref.WeakValueDictionary()


def concatenated_mesh(meshes: list[DeviceMesh]) -> DeviceMesh:
    """Return a mesh with the dimensions of all `meshes`, which are slices of one mesh."""
    if len(meshes) == 1:
        return meshes[0]
    key = tuple((id(root_mesh(mesh)), mesh) for mesh in meshes)
    mesh = _concatenated.get(key)
    if mesh is None:
        mesh = _concatenated[key] = DeviceMesh._concatenate(meshes)
    return mesh


def dtensor_extensions(device: torch.device) -> Any:
    """Return an instance of the class that torch's FSDP1 attaches to a module on a slice of a mesh.

    Programs only check the class. It is imported on demand, because its module imports torch's FSDP1.
    """
    module: Any = importlib.import_module("torch.distributed.tensor.parallel.fsdp")
    return module.DTensorExtensions(getattr(torch, device.type))


def flattened_mesh(mesh: DeviceMesh, name: str) -> DeviceMesh:
    """Return `mesh` with all dimensions flattened into one dimension named `name`."""
    return mesh._flatten(name)


def root_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """Return the mesh that `mesh` is a slice of, or `mesh` itself."""
    return mesh._get_root_mesh()
