"""Process groups made for this library, each once per set of ranks, and the ranks of meshes."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ..errors import ArgumentError
from ..torch_private import root_mesh

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
        made[key] = dist.new_group(list(ranks), use_local_synchronization=True, group_desc=f"unshard {purpose}")
    return made[key]


# Equal meshes have equal ranks, so the cache cannot be wrong; it holds integers, so it keeps no group alive.
_ranks: weakref.WeakKeyDictionary[DeviceMesh, frozenset[int]] = weakref.WeakKeyDictionary()


def ranks_of(mesh: DeviceMesh) -> frozenset[int]:
    ranks = _ranks.get(mesh)
    if ranks is None:
        ranks = _ranks[mesh] = frozenset(mesh.mesh.flatten().tolist())
    return ranks


def device_of(mesh: DeviceMesh) -> torch.device:
    """Where this rank computes for the mesh."""
    if mesh.device_type == "cpu":
        return torch.device("cpu")
    return torch.device(mesh.device_type, torch.accelerator.current_device_index())


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
