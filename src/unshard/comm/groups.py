"""Creates process groups, and finds the ranks, devices and memory pools that collectives use."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ..errors import ArgumentError, UnsupportedError
from ..torch_private import (
    AllreduceOptions,
    backend_allocator,
    backend_of,
    group_timeout,
    nccl_options,
    number_of_groups,
    own_group_name,
    root_mesh,
    served_device_types,
    symmetric_memory_pool,
)

# Keyed by default process group, so a new job in the same process does not find groups of the previous job.
_MADE: weakref.WeakKeyDictionary[Any, dict[tuple[str, tuple[int, ...]], Any]] = weakref.WeakKeyDictionary()


def is_group(value: Any) -> bool:
    """Return True if `value` has the methods of a process group, even if it is not an instance of torch's class."""
    return callable(getattr(value, "rank", None)) and callable(getattr(value, "size", None))


def group_of(ranks: Sequence[int], purpose: str) -> Any:
    """Return the process group of `ranks` for `purpose`. The first call creates the group.

    All `ranks`, and no other ranks, must make the first call. If they create several groups, all of them must create
    the groups in the same order.
    """
    made = _MADE.setdefault(dist.group.WORLD, {})
    key = purpose, tuple(ranks)
    if key not in made:
        with own_group_name(ranks):
            made[key] = dist.new_group(list(ranks), use_local_synchronization=True, group_desc=f"unshard {purpose}")
    return made[key]


# Keyed by original group and backend: a group may have one backend for the host and one for devices.
_LIKE: weakref.WeakKeyDictionary[Any, dict[str, Any]] = weakref.WeakKeyDictionary()


def group_like(group: Any, backend: str, device: torch.device, meet: Callable[[], None]) -> Any:
    """Return a second process group with the ranks of `group`. The two groups' collectives do not wait for each other.

    The first call runs `meet` and then creates the second group, so all ranks must make that call together. `meet`
    raises an error if a rank does not join. The second group has the timeout of `group` and, with NCCL, the same
    options. If torch cannot create a second group, this function returns `group` itself.
    """
    made = _LIKE.setdefault(group, {})
    if backend not in made:
        meet()
        # `_make_group_like` returns None instead of `group`: a value that is its own weak key would never be freed.
        made[backend] = _make_group_like(group, backend, device)
    return made[backend] or group


def _make_group_like(group: Any, backend: str, device: torch.device) -> Any:
    nccl, whole = backend == "nccl", group.size() == dist.get_world_size()
    timeout, description = group_timeout(group, device), "unshard reduce-scatters"
    ranks = dist.get_process_group_ranks(group)
    if nccl and dist.group.WORLD.bound_device_id is not None:  # type: ignore[union-attr]
        # Torch then makes groups by splitting communicators. `new_group` splits the communicator of the whole job, so
        # all ranks of the job would have to call. `split_group` crashes with that communicator if it is not the first
        # of the process (torch 2.11; fixed by pytorch pull request 192109).
        if not backend_of(group, device).supports_splitting:  # in torch's debug mode
            return None
        if not whole:
            with own_group_name(ranks):
                return dist.split_group(group, [list(range(group.size()))], timeout, group_desc=description)
    # Until 2.13, torch derives the name of a group of some ranks from the number of groups that the calling rank is in.
    # If the names differed, the ranks would wait for each other forever.
    if not whole and not _same_on_all_ranks(number_of_groups(), group, device):
        return None
    with own_group_name(ranks):
        return dist.new_group(
            None if whole else ranks,
            timeout,
            backend if backend in ("nccl", "gloo") else None,
            nccl_options(group, device) if nccl else None,
            use_local_synchronization=not whole,
            group_desc=description,
            device_id=device if nccl else None,  # creates the communicator immediately
        )


def _same_on_all_ranks(number: int, group: Any, device: torch.device) -> bool:
    pair, options = torch.tensor([number, -number], device=device), AllreduceOptions()
    options.reduceOp = dist.ReduceOp(dist.ReduceOp.MAX)
    backend_of(group, device).allreduce([pair], options).wait()
    largest, least = pair.tolist()
    return largest == -least


# Equal meshes have equal ranks, so the cache is never stale. It holds integers, so it keeps no group alive.
_ranks: weakref.WeakKeyDictionary[DeviceMesh, frozenset[int]] = weakref.WeakKeyDictionary()


def ranks_of(mesh: DeviceMesh) -> frozenset[int]:
    ranks = _ranks.get(mesh)
    if ranks is None:
        ranks = _ranks[mesh] = frozenset(mesh.mesh.flatten().tolist())
    return ranks


def device_of(mesh: DeviceMesh) -> torch.device:
    """Return the device that this rank uses for the device type of `mesh`."""
    return current_device(mesh.device_type)


def current_device(kind: str) -> torch.device:
    """Return the device that this rank uses for device type `kind`: the CPU or the current accelerator."""
    return torch.device("cpu") if kind == "cpu" else torch.device(kind, torch.accelerator.current_device_index())


def staging_device(group: Any, tensors: Sequence[torch.Tensor]) -> torch.device:
    """Return a device from which `group` can send the values of `tensors`.

    This is the device of one of the tensors if `group` can send from that device. NCCL, for example, cannot send from
    the CPU. If a group written in Python lists no devices, this function assumes that the group supports all devices.
    """
    served = served_device_types(group)
    for tensor in tensors:
        if tensor.device.type in served or not served:
            return tensor.device
    # Gloo lists CUDA even on machines without CUDA, so the CPU comes first.
    return current_device("cpu" if "cpu" in served or not served else served[0])


def widest_of(meshes: Sequence[DeviceMesh]) -> DeviceMesh:
    """Return the mesh with the most ranks.

    Among meshes with equally many ranks, a one-dimensional mesh is preferred, because it has a process group.
    """
    return max(meshes, key=lambda mesh: (mesh.size(), mesh.ndim == 1))


def covering_group(meshes: Sequence[DeviceMesh]) -> Any:
    """Return a process group that contains the ranks of all `meshes`. Each mesh must contain this rank.

    All ranks of the group must call this function together, because it may have to create the group.
    """
    widest = widest_of(meshes)
    if len(meshes) == 1 or all(ranks_of(mesh) <= ranks_of(widest) for mesh in meshes):
        if widest.ndim == 1:
            return widest.get_group()
        return _world_or_group_of(ranks_of(widest))
    root = root_mesh(widest)
    if any(root_mesh(mesh) is not root for mesh in meshes):
        listed = ", ".join(str(sorted(ranks_of(mesh))) for mesh in meshes)
        raise ArgumentError(
            f"The parameters on rank {dist.get_rank()} are on meshes of the ranks {listed}. None of these covers the "
            "others, and they are not slices of one mesh, so it is unknown which ranks have to agree. Pass "
            "process_group= a group that contains them all."
        )
    return _world_or_group_of(ranks_of(root))


def _world_or_group_of(ranks: frozenset[int]) -> Any:
    return dist.group.WORLD if len(ranks) == dist.get_world_size() else group_of(sorted(ranks), "gradients")


# -- memory of backends ------------------------------------------------------------------------------------


class Pool:
    """A pool of CUDA memory. A transport sends tensors in this pool faster than other tensors.

    A tensor that was allocated in the pool stays in the pool when its storage is resized.
    """

    def __init__(self, pool: Any, device: torch.device):
        self._pool, self._device = pool, device

    def allocating(self) -> AbstractContextManager[None]:
        """Return a context manager that makes CUDA allocations use the pool."""
        return torch.cuda.use_mem_pool(self._pool, self._device)


def pool_of_group(group: Any, device: torch.device) -> Pool | None:
    """Return a pool of memory from the backend's own allocator, or None if the backend has no allocator.

    NCCL registers such memory once, and then needs fewer copies to send it.
    """
    allocator = backend_allocator(group, device)
    return None if allocator is None else Pool(torch.cuda.MemPool(allocator), device)


def symmetric_pool(device: torch.device, backend: str) -> Pool:
    """Return a pool of torch's symmetric memory on `device`. The memory comes from `backend`, such as NCCL."""
    if device.type != "cuda":
        raise UnsupportedError(f"Symmetric memory needs a CUDA device, but this module is on {device}.")
    return Pool(symmetric_memory_pool(device, backend), device)
