"""Process groups and device meshes: collectives without Python's checks, backends, stores, meshes made of others."""

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

# Methods of a process group that the functions of `torch.distributed` call, after checks in Python. The first name is
# the one since 2.13, which these functions call then; 2.13 keeps the second one, and 2.11 and 2.12 have that alone. A
# group that is written in Python may have either.
ALL_GATHER = ("all_gather_single", "_allgather_base")
ALL_GATHER_COALESCED = ("all_gather_single_coalesced", "allgather_into_tensor_coalesced")
REDUCE_SCATTER = ("reduce_scatter_single", "_reduce_scatter_base")
REDUCE_SCATTER_COALESCED = ("reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced")
ALL_TO_ALL = ("all_to_all_single", "alltoall_base")


def reduce_scatter_into(output: torch.Tensor, input: torch.Tensor, group: Any) -> None:
    """`torch.distributed`'s function, which 2.13 renames: it warns of the older name."""
    function: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    function(output, input, group=group)


def low_precision_of(hook: Any) -> torch.dtype | None:
    """The dtype of one of torch's compressing communication hooks of FSDP; None for other functions.

    Their module has no public name, and is not imported unless the program has imported it. All versions.
    """
    module: Any = sys.modules.get("torch.distributed.algorithms._comm_hooks.default_hooks")
    if module is None:
        return None
    if hook is module.fp16_compress_hook:
        return torch.float16
    return torch.bfloat16 if hook is module.bf16_compress_hook else None


# -- backends and stores -----------------------------------------------------------------------------------


def backend_allocator(group: Any, device: torch.device) -> Any:
    """The backend's allocator of its own memory, or None; there is no public way. All versions."""
    if device.type != "cuda":
        return None
    backend = backend_of(group, device)
    return backend.mem_allocator if backend is not None and backend.supports_tensor_alloc(device) else None


def symmetric_memory_pool(device: torch.device, backend: str) -> Any:
    """Torch's pool of symmetric memory; its module has no public name. All versions."""
    from torch.distributed import _symmetric_memory

    _symmetric_memory.set_backend(backend)  # type: ignore[arg-type]
    return _symmetric_memory.get_mem_pool(device)


def backend_of(group: Any, device: torch.device) -> Any:
    """The backend of `group` for `device`, or None: groups that are written in Python mostly have none.

    There is no public way. All versions.
    """
    try:
        return group._get_backend(device)
    except (RuntimeError, AttributeError, NotImplementedError):
        return None


def backend_name(group: Any, device: torch.device) -> str:
    """Name of the backend of `group` for `device`; the group's own name if the group is written in Python.

    `dist.get_backend` answers for the group's default device only. All versions.
    """
    backend = backend_of(group, device)
    try:
        return str((group if backend is None else backend).name()).lower()
    except Exception:  # of a class that somebody has written, which need not have a name
        return "unknown"


def served_device_types(group: Any) -> list[str]:
    """The device types that `group` has a backend for; empty if it does not say. No public way. All versions."""
    return [device.type for device in getattr(group, "_device_types", ())]


def job_store() -> dist.Store:
    """The store of the default process group, on a connection of its own: on a shared one, others would wait for us.

    There is no public way to the store. All versions.
    """
    return dist.distributed_c10d._get_default_store().clone()  # type: ignore[attr-defined]


def call_before_destruction(callback: Callable[[], None]) -> None:
    """Call `callback`, once, at the beginning of `destroy_process_group()`, which ends the job on this rank.

    Torch finalizes its `torchcomms` there, before the process groups; there is no public way. All versions.
    """
    dist.distributed_c10d._world.comms.append(SimpleNamespace(finalize=callback))


def number_of_groups() -> int:
    """How many process groups this rank is in; there is no public way. All versions.

    Until 2.13, torch names a group for which only its ranks call by this number.
    """
    return len(dist.distributed_c10d._world.pg_names)


_OWN_NUMBERS = 1 << 32  # above any number that torch itself gives out
_own_groups: weakref.WeakKeyDictionary[Any, Counter[tuple[int, ...]]] = weakref.WeakKeyDictionary()  # by default group


@contextmanager
def own_group_name(ranks: Sequence[int]) -> Iterator[None]:
    """Name the process group of these ranks that is made inside by a number of our own.

    Torch names groups by a counter that all ranks must agree on. Since 2.14 it also counts groups for which only their
    ranks call. Other ranks then have another count, and the next `new_group` of the whole job waits forever. Our
    numbers depend on the ranks of the group alone, and torch's counter stays as it was. There is no public way. All
    versions; 2.11 to 2.13 use the counter for groups of the whole job only.
    """
    world, made = dist.distributed_c10d._world, _own_groups.setdefault(dist.group.WORLD, Counter())
    before, world.group_count = world.group_count, _OWN_NUMBERS + made[tuple(ranks)]
    made[tuple(ranks)] += 1
    try:
        yield
    finally:
        world.group_count = before


def nccl_options(group: Any, device: torch.device) -> Any:
    """A copy of the options that the NCCL backend of `group` was made with; None if it is wrapped, as in debug mode.

    There is no public way. All versions.
    """
    options = getattr(backend_of(group, device), "options", None)
    return copy.deepcopy(options) if isinstance(options, dist.ProcessGroupNCCL.Options) else None


def group_timeout(group: Any, device: torch.device) -> timedelta:
    """The timeout of the collectives of `group` on `device`; there is no public way. All versions.

    That of PyTorch's default for a backend that does not tell.
    """
    try:
        return group._get_backend(device).options._timeout
    except (AttributeError, RuntimeError):
        return dist.distributed_c10d.default_pg_timeout


# -- meshes ------------------------------------------------------------------------------------------------

# Equal meshes are one object while any parameter uses it: comparing as many equal meshes as there are parameters takes
# milliseconds in every step. The key holds the meshes and these hold their roots, so no id is reused meanwhile.
_concatenated: weakref.WeakValueDictionary[Any, DeviceMesh] = weakref.WeakValueDictionary()


def concatenated_mesh(meshes: list[DeviceMesh]) -> DeviceMesh:
    """One mesh with the dimensions of all `meshes`, which are slices of one mesh; no public way. All versions."""
    if len(meshes) == 1:
        return meshes[0]
    key = tuple((id(root_mesh(mesh)), mesh) for mesh in meshes)
    mesh = _concatenated.get(key)
    if mesh is None:
        mesh = _concatenated[key] = DeviceMesh._concatenate(meshes)
    return mesh


def dtensor_extensions(device: torch.device) -> Any:
    """The object that torch's FSDP1 gives a module on a slice of a mesh; programs ask only for its class.

    Its module imports torch's FSDP1, hence only when somebody asks. All versions.
    """
    module: Any = importlib.import_module("torch.distributed.tensor.parallel.fsdp")
    return module.DTensorExtensions(getattr(torch, device.type))


def flattened_mesh(mesh: DeviceMesh, name: str) -> DeviceMesh:
    """All dimensions of `mesh` as one dimension called `name`; no public way. All versions."""
    return mesh._flatten(name)


def root_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """The mesh that `mesh` is a slice of, or itself; no public way. All versions."""
    return mesh._get_root_mesh()
