"""Where one parameter goes: over which ranks it is cut, along which dimension, and what its faces look like."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from ..engine.extension import is_extended
from ..engine.faces import Home, Slot
from ..errors import ArgumentError, DimensionError, UnsupportedError
from ..layout.rows import Cut
from ..policies import MixedPrecisionPolicy
from ..torch_private import concatenated_mesh, flattened_mesh, local_of, make_sharded_parameter, spec_of, strided_shard
from .meshes import DataParallelMeshDims, DataParallelMeshInfo


@dataclass(frozen=True)
class ShardPlacementResult:
    """What a `shard_placement_fn` may return: a dimension (None: the first), and over which mesh."""

    placement: Shard | None
    mesh_info: DataParallelMeshInfo


Choose = Callable[[nn.Parameter], Shard | ShardPlacementResult | None]


@dataclass(frozen=True)
class Destination:
    """Over which ranks a parameter is cut, and along which dimension."""

    info: DataParallelMeshInfo
    dim: int


def check_parameter(name: str, parameter: nn.Parameter) -> None:
    if parameter.ndim == 0:
        raise ArgumentError(
            f"Parameter {name!r} is a scalar and has no dimension to cut. Make it a tensor of one element: "
            "nn.Parameter(value.reshape(1))."
        )
    if parameter.is_complex() or parameter.is_sparse:
        raise UnsupportedError(f"Parameter {name!r} is {parameter.dtype}, {parameter.layout}; it cannot be sharded.")


def destination(name: str, parameter: nn.Parameter, info: DataParallelMeshInfo, choose: Choose | None) -> Destination:
    """Where the user sends a parameter; by default its first dimension is cut over the call's mesh."""
    chosen: Any = choose(parameter) if choose is not None else None
    if isinstance(chosen, ShardPlacementResult):
        chosen, info = chosen.placement, _other_mesh(name, info, chosen.mesh_info)
    if chosen is None:
        return Destination(info, 0)
    if not isinstance(chosen, Shard):
        raise ArgumentError(
            f"shard_placement_fn must return a Shard, a ShardPlacementResult or None, got {chosen!r} for {name!r}."
        )
    dim = chosen.dim + parameter.ndim if chosen.dim < 0 else chosen.dim
    if not 0 <= dim < parameter.ndim:
        raise DimensionError(f"shard_placement_fn chose {chosen} for {name!r}, which has {parameter.ndim} dimensions.")
    length = _local(parameter).shape[dim]
    if dim and length % info.shard_mesh_size:
        raise UnsupportedError(
            f"Dimension {dim} of {name!r} has size {length}, which {info.shard_mesh_size} shards do not divide. Only "
            "dimension 0 may be uneven: return None or Shard(0) for this parameter."
        )
    return Destination(info, dim)


def _other_mesh(name: str, usual: DataParallelMeshInfo, other: Any) -> DataParallelMeshInfo:
    if not isinstance(other, DataParallelMeshInfo):
        raise ArgumentError(f"mesh_info of {name!r} must be an FSDPMeshInfo or HSDPMeshInfo, got {other!r}.")
    if other.mesh.device_type != usual.mesh.device_type:
        raise ArgumentError(f"{name!r} is sent to {other.mesh}, which is on other devices than {usual.mesh}.")
    if other.mesh.get_coordinate() is None:
        raise ArgumentError(f"{name!r} is sent to {other.mesh}, which this rank is not part of.")
    return other


def slot_for(
    parameter: nn.Parameter,
    names: list[tuple[str, Home]],
    to: Destination,
    dims: DataParallelMeshDims | None,
    rank: int,
    device: torch.device,
    policy: MixedPrecisionPolicy,
) -> Slot:
    """The parameter's place in the unit, its rank's rows as sharded face. The unit copies them into its shard."""
    name = names[0][0]
    mesh, placements = _face_of(name, parameter, to, dims)
    whole = _local(parameter)
    cut = Cut(tuple(whole.shape), to.info.shard_mesh_size, to.dim)
    local = whole.narrow(to.dim, *cut.rows(rank)).contiguous()
    if is_extended(local, name):
        local = local.clone()  # it keeps its memory, which must not be the whole parameter's
    if not local.is_meta:
        local = local.to(device)
    sharded = make_sharded_parameter(local, mesh, placements, parameter.shape, parameter.requires_grad)
    own = policy.for_parameter(each for each, _ in names)
    slot = Slot(name, [home for _, home in names], cut, weakref.ref(parameter), sharded, local_of(sharded), own)
    if isinstance(parameter, DTensor):
        slot.whole_spec = spec_of(parameter)
        if dims is not None:
            index = slot.whole_spec.mesh.mesh_dim_names.index  # type: ignore[union-attr]
            slot.partial_dims = frozenset(map(index, dims.shard_names + dims.replicate_names))
    return slot


def _local(parameter: nn.Parameter) -> torch.Tensor:
    tensor = parameter.detach()
    return local_of(tensor) if isinstance(tensor, DTensor) else tensor


def _face_of(
    name: str, parameter: nn.Parameter, to: Destination, dims: DataParallelMeshDims | None
) -> tuple[DeviceMesh, tuple[Placement, ...]]:
    """Mesh and placements of the sharded face."""
    info = to.info
    if dims is not None:
        return _on_all_parallelisms(name, parameter, to, dims)
    own: list[Placement] = [Replicate()] * info.mesh.ndim
    if not isinstance(parameter, DTensor):
        if info.shard_mesh_dim is not None:
            own[info.shard_mesh_dim] = Shard(to.dim)
        return info.mesh, tuple(own)
    other = parameter.device_mesh
    _check_disjoint(name, info.mesh, other)
    if info.shard_mesh_dim is not None:
        own[info.shard_mesh_dim] = _shard_before(to.dim, parameter.placements, other)
    return concatenated_mesh([info.mesh, other]), (*own, *parameter.placements)


def _check_disjoint(name: str, mesh: DeviceMesh, other: DeviceMesh) -> None:
    where = f"Parameter {name!r} is already a DTensor on {other}"
    if other.device_type != mesh.device_type:
        raise ArgumentError(f"{where}, which is on other devices than {mesh}.")
    if other.mesh_dim_names is None or mesh.mesh_dim_names is None:
        raise UnsupportedError(
            f"{where}. If an outer module was sharded before this one, shard bottom-up instead: blocks first, the "
            "whole model last. If it is tensor parallel, take both meshes from one: init_device_mesh(..., "
            'mesh_dim_names=("dp", "tp")), then mesh["tp"] and mesh["dp"].'
        )
    shared = set(other.mesh_dim_names) & set(mesh.mesh_dim_names)
    if shared:
        raise UnsupportedError(
            f"{where}, so it is distributed over {', '.join(sorted(shared))} already. If an outer module was sharded "
            "before this one, shard bottom-up instead: blocks first, the whole model last."
        )
    if other.ndim > 2:
        raise UnsupportedError(f"{where}; at most two dimensions beside data parallelism are supported.")


def _shard_before(dim: int, placements: tuple[Placement, ...], mesh: DeviceMesh) -> Placement:
    """A cut over ranks that come before those of `mesh`, where `placements` may have cut the same dimension first."""
    factor = prod(mesh.size(i) for i, placement in enumerate(placements) if placement.is_shard(dim))
    return strided_shard(dim, factor) if factor > 1 else Shard(dim)


def _on_all_parallelisms(
    name: str, parameter: nn.Parameter, to: Destination, dims: DataParallelMeshDims
) -> tuple[DeviceMesh, tuple[Placement, ...]]:
    """The parameter is a DTensor on the mesh of all parallelisms; only the data-parallel dimensions change."""
    mesh = to.info.spmd_mesh
    if mesh is None:
        raise UnsupportedError(f"{name!r} is sent to another mesh, which cannot be combined with dp_mesh_dims.")
    if not isinstance(parameter, DTensor):
        raise ArgumentError(
            f"With dp_mesh_dims every parameter is a DTensor on the whole mesh, and {name!r} is a plain tensor. Use "
            "distribute_tensor or distribute_module first."
        )
    if parameter.device_mesh is not mesh and parameter.device_mesh != mesh:
        raise ArgumentError(f"{name!r} is a DTensor on {parameter.device_mesh}, expected one on {mesh}.")
    names = mesh.mesh_dim_names
    assert names is not None
    for each in dims.shard_names + dims.replicate_names:
        placement = parameter.placements[names.index(each)]
        if not placement.is_replicate():
            raise ArgumentError(
                f"{name!r} has the placement {placement} on {each!r}, expected Replicate(): data-parallel dimensions "
                "are for fully_shard to cut. If an outer module was sharded before this one, shard bottom-up instead."
            )
    if not dims.shard_names:
        return mesh, parameter.placements
    first = min(map(names.index, dims.shard_names))
    later = [i for i in range(len(names)) if i > first and names[i] not in dims.shard_names]
    factor = prod(mesh.size(i) for i in later if parameter.placements[i].is_shard(to.dim))
    new: Placement = strided_shard(to.dim, factor) if factor > 1 else Shard(to.dim)
    kept = [i for i in range(len(names)) if i == first or names[i] not in dims.shard_names]
    placements = tuple(new if i == first else parameter.placements[i] for i in kept)
    if len(kept) == len(names):
        return mesh, placements
    flat = flattened_mesh(mesh[dims.shard_names], "_".join(dims.shard_names))
    return concatenated_mesh([flat if i == first else mesh[names[i]] for i in kept]), placements
