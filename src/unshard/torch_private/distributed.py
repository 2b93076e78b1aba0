"""Private APIs of process groups, their backends and stores, and device meshes."""

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

# Methods of a process group that the functions of `torch.distributed` call, after checks in Python. Since 2.13, these
# functions call the method with the first name. Torch 2.13 also has the second name. Torch 2.11 and 2.12 have only the
# second name. A group written in Python may have either.
ALL_GATHER = ("all_gather_single", "_allgather_base")
ALL_GATHER_COALESCED = ("all_gather_single_coalesced", "allgather_into_tensor_coalesced")
REDUCE_SCATTER = ("reduce_scatter_single", "_reduce_scatter_base")
REDUCE_SCATTER_COALESCED = ("reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced")
ALL_TO_ALL = ("all_to_all_single", "alltoall_base")


def low_precision_of(hook: Any) -> torch.dtype | None:
    """Return the dtype that a compressing communication hook of torch's FSDP sends. Return None for any other hook.

    This function does not import these hooks. If their module has not been imported, `hook` is not one of them.
    """
    module: Any = sys.modules.get("torch.distributed.algorithms._comm_hooks.default_hooks")
    if module is None:
        return None
    if hook is module.fp16_compress_hook:
        return torch.float16
    return torch.bfloat16 if hook is module.bf16_compress_hook else None


# -- backends and stores -----------------------------------------------------------------------------------


def backend_allocator(group: Any, device: torch.device) -> Any:
    """Return the memory allocator that the backend of `group` provides for `device`, or None if it provides none."""
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

    The public `dist.get_backend` returns only the backend of the group's default device.
    """
    backend = backend_of(group, device)
    try:
        return str((group if backend is None else backend).name()).lower()
    except Exception:  # a class written in Python need not have a name
        return "unknown"


def served_device_types(group: Any) -> list[str]:
    """Return the device types for which `group` has backends. Return an empty list if they are unknown."""
    return [device.type for device in getattr(group, "_device_types", ())]


def job_store() -> dist.Store:
    """Return a new connection to the store of the default process group.

    On a shared connection, other users of the store would wait for our requests.
    """
    return dist.distributed_c10d._get_default_store().clone()  # type: ignore[attr-defined]


def call_before_destruction(callback: Callable[[], None]) -> None:
    """Call `callback` once, at the start of `destroy_process_group()`, which ends the job on this rank.

    Torch keeps a list of `torchcomms` and finalizes them before it destroys the process groups. This function adds an
    object to the list, and the object's `finalize` is `callback`.
    """
    dist.distributed_c10d._world.comms.append(SimpleNamespace(finalize=callback))


def number_of_groups() -> int:
    """Return how many process groups this rank is in.

    Up to 2.13, torch uses this number in the name of a group that `new_group(use_local_synchronization=True)` creates.
    Only the group's own ranks make that call.
    """
    return len(dist.distributed_c10d._world.pg_names)


_OWN_NUMBERS = 1 << 32  # above any number that torch itself gives out
_own_groups: weakref.WeakKeyDictionary[Any, Counter[tuple[int, ...]]] = weakref.WeakKeyDictionary()  # by default group


@contextmanager
def own_group_name(ranks: Sequence[int]) -> Iterator[None]:
    """Return a context manager in which the name of a new process group of `ranks` contains a number of our own.

    Normally, the name contains the value of torch's counter, which must be equal on all ranks. Since 2.14, torch also
    counts groups that only their own ranks create. Such groups would make the counters of the ranks differ, and the
    next `new_group` of the whole job would wait forever. Our number depends only on `ranks` and on how many groups of
    these ranks we have named. Torch's counter does not change. Torch 2.11 to 2.13 count only groups of the whole job.
    """
    world, made = dist.distributed_c10d._world, _own_groups.setdefault(dist.group.WORLD, Counter())
    before, world.group_count = world.group_count, _OWN_NUMBERS + made[tuple(ranks)]
    made[tuple(ranks)] += 1
    try:
        yield
    finally:
        world.group_count = before


def nccl_options(group: Any, device: torch.device) -> Any:
    """Return a copy of the options of the group's NCCL backend.

    Return None if the backend is wrapped, as in torch's debug mode.
    """
    options = getattr(backend_of(group, device), "options", None)
    return copy.deepcopy(options) if isinstance(options, dist.ProcessGroupNCCL.Options) else None


def group_timeout(group: Any, device: torch.device) -> timedelta:
    """Return the timeout of the group's collectives on `device`, or PyTorch's default timeout if it is unknown."""
    try:
        return group._get_backend(device).options._timeout
    except (AttributeError, RuntimeError):
        return dist.distributed_c10d.default_pg_timeout


# -- meshes ------------------------------------------------------------------------------------------------

# Equal meshes are one object while any parameter uses it, because comparing equal meshes of all parameters would take
# milliseconds in every step. The key keeps the meshes and their root meshes alive, so no id is reused.
_concatenated: weakref.WeakValueDictionary[Any, DeviceMesh] = weakref.WeakValueDictionary()


def concatenated_mesh(meshes: list[DeviceMesh]) -> DeviceMesh:
    """Return a mesh with the dimensions of all `meshes`, which must be slices of the same mesh."""
    if len(meshes) == 1:
        return meshes[0]
    key = tuple((id(root_mesh(mesh)), mesh) for mesh in meshes)
    mesh = _concatenated.get(key)
    if mesh is None:
        mesh = _concatenated[key] = DeviceMesh._concatenate(meshes)
    return mesh


def dtensor_extensions(device: torch.device) -> Any:
    """Return an object like the one that torch's FSDP1 attaches to a module whose mesh is a slice of another.

    Programs check only the class of this object. The class is imported on demand, because its module imports torch's
    FSDP1.
    """
    module: Any = importlib.import_module("torch.distributed.tensor.parallel.fsdp")
    return module.DTensorExtensions(getattr(torch, device.type))


def flattened_mesh(mesh: DeviceMesh, name: str) -> DeviceMesh:
    """Return `mesh` with all dimensions flattened into one dimension named `name`."""
    return mesh._flatten(name)


def root_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """Return the mesh that `mesh` is a slice of, or `mesh` itself if it is not a slice."""
    return mesh._get_root_mesh()
