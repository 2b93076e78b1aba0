"""Process groups made for this library, each once, and the ranks of meshes."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ..errors import ArgumentError
from ..torch_private import (
    AllreduceOptions,
    backend_of,
    group_timeout,
    nccl_options,
    number_of_groups,
    own_group_name,
    root_mesh,
    served_device_types,
)

# By default group, so that groups of a job that was torn down are not found again.
_MADE: weakref.WeakKeyDictionary[Any, dict[tuple[str, tuple[int, ...]], Any]] = weakref.WeakKeyDictionary()


def is_group(value: Any) -> bool:
    """Whether it has ranks; it need not be of torch's class, as long as nothing is sent that it has no method for."""
    return callable(getattr(value, "rank", None)) and callable(getattr(value, "size", None))


def group_of(ranks: Sequence[int], purpose: str) -> Any:
    """The group of these ranks for a purpose; only they have to call, all in the same order."""
    made = _MADE.setdefault(dist.group.WORLD, {})
    key = purpose, tuple(ranks)
    if key not in made:
        with own_group_name(ranks):
            made[key] = dist.new_group(list(ranks), use_local_synchronization=True, group_desc=f"unshard {purpose}")
    return made[key]


# By the group that they are like, and its backend: a group may have one for the host and one for devices.
_LIKE: weakref.WeakKeyDictionary[Any, dict[str, Any]] = weakref.WeakKeyDictionary()


def group_like(group: Any, backend: str, device: torch.device, meet: Callable[[], None]) -> Any:
    """A second group of the same ranks, whose collectives do not wait for those of `group`; made once.

    All ranks make it together; `meet` is called before, and raises if they do not come. It has the timeout of `group`
    and, with NCCL, its options. Where torch cannot make one, it is `group` itself.
    """
    made = _LIKE.setdefault(group, {})
    if backend not in made:
        meet()
        # None and not the group: a weak dictionary would keep a key that is its own value.
        made[backend] = _make_group_like(group, backend, device)
    return made[backend] or group


def _make_group_like(group: Any, backend: str, device: torch.device) -> Any:
    nccl, whole = backend == "nccl", group.size() == dist.get_world_size()
    timeout, description = group_timeout(group, device), "unshard reduce-scatters"
    ranks = dist.get_process_group_ranks(group)
    if nccl and dist.group.WORLD.bound_device_id is not None:  # type: ignore[union-attr]
        # Torch makes groups by splitting communicators then. `new_group` splits that of the whole job, for which all
        # ranks of the job have to call; `split_group` crashes with that one if it is not the first of the process
        # (torch 2.11; pull request 192109 of pytorch mends it).
        if not backend_of(group, device).supports_splitting:  # in torch's debug mode
            return None
        if not whole:
            with own_group_name(ranks):
                return dist.split_group(group, [list(range(group.size()))], timeout, group_desc=description)
    # Until 2.13, torch names a group of some ranks by how many groups a rank is in. With different names the ranks
    # would wait for each other.
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
            device_id=device if nccl else None,  # makes the communicator at once
        )


def _same_on_all_ranks(number: int, group: Any, device: torch.device) -> bool:
    pair, options = torch.tensor([number, -number], device=device), AllreduceOptions()
    options.reduceOp = dist.ReduceOp(dist.ReduceOp.MAX)
    backend_of(group, device).allreduce([pair], options).wait()
    largest, least = pair.tolist()
    return largest == -least


# Equal meshes have equal ranks, so the cache cannot be wrong; it holds integers, so it keeps no group alive.
_ranks: weakref.WeakKeyDictionary[DeviceMesh, frozenset[int]] = weakref.WeakKeyDictionary()


def ranks_of(mesh: DeviceMesh) -> frozenset[int]:
    ranks = _ranks.get(mesh)
    if ranks is None:
        ranks = _ranks[mesh] = frozenset(mesh.mesh.flatten().tolist())
    return ranks


def device_of(mesh: DeviceMesh) -> torch.device:
    """The device on which this rank computes for `mesh`."""
    return current_device(mesh.device_type)


def current_device(kind: str) -> torch.device:
    """The host, or the current device of the accelerator, whose type is `kind`."""
    return torch.device("cpu") if kind == "cpu" else torch.device(kind, torch.accelerator.current_device_index())


def staging_device(group: Any, tensors: Sequence[torch.Tensor]) -> torch.device:
    """A device that `group` can send from, for the values of `tensors`: their own if possible.

    NCCL does not send from the host. A group that is written in Python may not tell which devices it serves.
    """
    served = served_device_types(group)
    for tensor in tensors:
        if tensor.device.type in served or not served:
            return tensor.device
    # Gloo names CUDA as well, also on machines without it, so the host comes first.
    return current_device("cpu" if "cpu" in served or not served else served[0])


def widest_of(meshes: Sequence[DeviceMesh]) -> DeviceMesh:
    """The mesh of the most ranks; of equals one with a group of its own, else the first."""
    return max(meshes, key=lambda mesh: (mesh.size(), mesh.ndim == 1))


def covering_group(meshes: Sequence[DeviceMesh]) -> Any:
    """The process group of all ranks of these meshes, which all contain this rank.

    All ranks of it have to call together: it may have to be made.
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
            f"On rank {dist.get_rank()} the parameters lie on meshes of the ranks {listed}. None of these covers the "
            "others, and they are not slices of one mesh, so it is unknown which ranks have to agree. Pass "
            "process_group= a group that contains them all."
        )
    return _world_or_group_of(ranks_of(root))


def _world_or_group_of(ranks: frozenset[int]) -> Any:
    return dist.group.WORLD if len(ranks) == dist.get_world_size() else group_of(sorted(ranks), "gradients")
