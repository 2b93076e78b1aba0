"""Where one parameter is sharded: over which mesh, along which dimension, and as which DTensor."""

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

from ..engine.api import (
    ManagedParam,
    ParamGroup,
    ParamLocation,
    ShardedParams,
    Unit,
    attributes_of,
    is_extended,
    is_packed,
    param_group_of,
    refuse_different_units,
    refuse_opaque,
)
from ..errors import ArgumentError, DimensionError, UnsupportedError
from ..layout.rows import RowSharding
from ..policies import MixedPrecisionPolicy
from ..torch_private import (
    concatenated_mesh,
    flattened_mesh,
    local_of,
    local_part,
    make_sharded_parameter,
    spec_of,
    strided_shard,
)
from .meshes import DataParallelMeshDims, DataParallelMeshInfo

_BOTTOM_UP = "If an outer module was sharded before this one, shard bottom-up instead: blocks first, the model last."


@dataclass(frozen=True)
class ShardPlacementResult:
    """What a `shard_placement_fn` may return: a dimension (None: the first), and the mesh to shard over."""

    placement: Shard | None
    mesh_info: DataParallelMeshInfo


ShardPlacementFn = Callable[[nn.Parameter], Shard | ShardPlacementResult | None]


@dataclass
class ParamToShard:
    """A parameter that a call of `fully_shard` shards, under all its names and in all modules that have it."""

    parameter: nn.Parameter
    names: list[str]
    locations: list[ParamLocation]
    mesh_info: DataParallelMeshInfo
    dim: int = 0

    @property
    def owner(self) -> ParamGroup | None:
        """The param group of another call that has sharded the parameter already: modules of both calls share it."""
        group = param_group_of(self.parameter)
        return None if group is None or group.param_of(self.parameter) is None else group

    @property
    def name(self) -> str:
        return self.names[0]

    def refuse_same_place(self) -> None:
        """Raise if the owner has the parameter from this very module, and not from another that is tied to it."""
        theirs = None if self.owner is None else self.owner.param_of(self.parameter)
        held = {(id(each.parameters), each.name) for each in theirs.locations} if theirs is not None else set()
        if any((id(each.parameters), each.name) in held for each in self.locations):
            unit = "" if self.owner is None else self.owner.unit_name
            raise UnsupportedError(f"Parameter {self.name!r} is sharded already, by unit {unit!r}. {_BOTTOM_UP}")

    @property
    def local(self) -> torch.Tensor:
        """The parameter as a plain tensor: of a tensor-parallel one, this rank's part."""
        return local_part(self.parameter.detach())

    def choose_placement(self, fn: ShardPlacementFn | None) -> None:
        """Set mesh and dimension as the user's function says; without one they are the call's mesh and dimension 0."""
        self._check_kind()
        chosen: Any = fn(self.parameter) if fn is not None else None
        if isinstance(chosen, ShardPlacementResult):
            self._set_mesh(chosen.mesh_info)
            chosen = chosen.placement
        if chosen is None:
            return
        if not isinstance(chosen, Shard):
            raise ArgumentError(
                "shard_placement_fn must return a Shard, a ShardPlacementResult or None, "
                f"got {chosen!r} for {self.name!r}."
            )
        ndim, shards = self.parameter.ndim, self.mesh_info.shard_mesh_size
        self.dim = chosen.dim + ndim if chosen.dim < 0 else chosen.dim
        if not 0 <= self.dim < ndim:
            raise DimensionError(f"shard_placement_fn chose {chosen} for {self.name!r}, which has {ndim} dimensions.")
        length = self.local.shape[self.dim]
        if self.dim and length % shards:
            raise UnsupportedError(
                f"Dimension {self.dim} of {self.name!r} has size {length}, which is not divisible by the {shards} "
                "shards. Only dimension 0 may be uneven: return None or Shard(0) for this parameter."
            )

    def _check_kind(self) -> None:
        parameter = self.parameter
        refuse_opaque(self.local, self.name, "Pass it in ignored_params: every rank then keeps all of it.")
        if parameter.ndim == 0:
            raise ArgumentError(
                f"Parameter {self.name!r} is a scalar and has no dimension to shard. Make it a tensor of one element: "
                "nn.Parameter(value.reshape(1))."
            )
        if not parameter.is_floating_point() and getattr(parameter, "CB", parameter) is None:
            raise UnsupportedError(
                f"The layer of {self.name!r}, a {type(parameter).__name__}, has moved its weights to its own state and "
                "would not compute with sharded ones. Shard it before its first forward, or pass the parameter in "
                "ignored_params."
            )
        if parameter.is_sparse:
            raise UnsupportedError(
                f"Parameter {self.name!r} is {parameter.dtype}, {parameter.layout}; it cannot be sharded. Pass it in "
                "ignored_params."
            )

    def _set_mesh(self, chosen: Any) -> None:
        usual, name = self.mesh_info, self.name
        if not isinstance(chosen, DataParallelMeshInfo):
            raise ArgumentError(f"mesh_info of {name!r} must be an FSDPMeshInfo or HSDPMeshInfo, got {chosen!r}.")
        if chosen.mesh.device_type != usual.mesh.device_type:
            raise ArgumentError(
                f"shard_placement_fn chose {chosen.mesh} for {name!r}, which is on other devices than {usual.mesh}."
            )
        if chosen.mesh.get_coordinate() is None:
            raise ArgumentError(f"shard_placement_fn chose {chosen.mesh} for {name!r}, which this rank is not part of.")
        self.mesh_info = chosen


def make_managed_param(
    param: ParamToShard,
    dims: DataParallelMeshDims | None,
    rank: int,
    device: torch.device,
    policy: MixedPrecisionPolicy,
) -> ManagedParam:
    """The engine's record of a parameter, with its sharded parameter. The unit copies the values into its shard."""
    parameter, local = param.parameter, param.local
    mesh, placements = _mesh_and_placements(param, dims)
    sharding = RowSharding(tuple(local.shape), param.mesh_info.shard_mesh_size, param.dim)
    shard = local.narrow(param.dim, *sharding.rows(rank)).contiguous()
    if is_extended(shard, param.name):
        shard = shard.clone()  # the engine keeps this tensor; a view would keep the memory of the unsharded parameter
    if not shard.is_meta:
        shard = shard.to(device)
    sharded = make_sharded_parameter(shard, mesh, placements, parameter.shape, parameter.requires_grad)
    own_policy = policy.for_parameter(param.names)
    if is_packed(parameter):
        own_policy = own_policy.without_casts
    managed = ManagedParam(
        param.name, param.locations, sharding, weakref.ref(parameter), sharded, local_of(sharded), own_policy
    )
    managed.attributes = attributes_of(parameter)
    if isinstance(parameter, DTensor):
        managed.tp_spec = spec_of(parameter)
        if dims is not None:
            index = managed.tp_spec.mesh.mesh_dim_names.index  # type: ignore[union-attr]
            managed.partial_dims = frozenset(map(index, dims.shard_names + dims.replicate_names))
    return managed


def borrow(param: ParamToShard, unit: Unit, policy: MixedPrecisionPolicy, dims: DataParallelMeshDims | None) -> None:
    """Let the modules of `unit` hold a parameter that another unit has sharded."""
    group = param.owner
    theirs = None if group is None else group.param_of(param.parameter)
    assert group is not None and theirs is not None
    mesh = None  # unknown where modules were tied to a sharded parameter already
    if param.parameter is not theirs.sharded:
        mesh, _ = _mesh_and_placements(param, dims)
    own_policy = policy.for_parameter(param.names)
    refuse_different_units(group, theirs, unit, param.name, own_policy, ShardedParams.kind, mesh)
    group.lend(theirs, param.locations, unit)


def _mesh_and_placements(
    param: ParamToShard, dims: DataParallelMeshDims | None
) -> tuple[DeviceMesh, tuple[Placement, ...]]:
    """Mesh and placements of the sharded parameter."""
    if dims is not None:
        return _placements_on_spmd_mesh(param, dims)
    info, parameter = param.mesh_info, param.parameter
    placements: list[Placement] = [Replicate()] * info.mesh.ndim
    if not isinstance(parameter, DTensor):
        if info.shard_mesh_dim is not None:
            placements[info.shard_mesh_dim] = Shard(param.dim)
        return info.mesh, tuple(placements)
    tp_mesh = parameter.device_mesh
    _check_tp_mesh(param.name, info.mesh, tp_mesh)
    if info.shard_mesh_dim is not None:
        placements[info.shard_mesh_dim] = _shard(param, tp_mesh, range(tp_mesh.ndim))
    return concatenated_mesh([info.mesh, tp_mesh]), (*placements, *parameter.placements)


def _shard(param: ParamToShard, mesh: DeviceMesh, later: Any) -> Placement:
    """The placement on a mesh dimension before those in `later`, of which some may have sharded the same dimension."""
    placements = param.parameter.placements  # type: ignore[attr-defined]
    factor = prod(mesh.size(i) for i in later if placements[i].is_shard(param.dim))
    return strided_shard(param.dim, factor) if factor > 1 else Shard(param.dim)


def _check_tp_mesh(name: str, mesh: DeviceMesh, tp_mesh: DeviceMesh) -> None:
    where = f"Parameter {name!r} is already a DTensor on {tp_mesh}"
    if tp_mesh.device_type != mesh.device_type:
        raise ArgumentError(f"{where}, which is on other devices than {mesh}.")
    if tp_mesh.mesh_dim_names is None or mesh.mesh_dim_names is None:
        raise UnsupportedError(
            f"{where}. {_BOTTOM_UP} If it is tensor parallel, take both meshes from one: init_device_mesh(..., "
            'mesh_dim_names=("dp", "tp")), then mesh["tp"] and mesh["dp"].'
        )
    shared = set(tp_mesh.mesh_dim_names) & set(mesh.mesh_dim_names)
    if shared:
        raise UnsupportedError(f"{where}, so it is already distributed over {', '.join(sorted(shared))}. {_BOTTOM_UP}")
    if tp_mesh.ndim > 2:
        raise UnsupportedError(f"{where}; at most two dimensions beside data parallelism are supported.")


def _placements_on_spmd_mesh(
    param: ParamToShard, dims: DataParallelMeshDims
) -> tuple[DeviceMesh, tuple[Placement, ...]]:
    """The same for a DTensor on the mesh of all parallelisms: only data-parallel placements change."""
    name, parameter, mesh = param.name, param.parameter, param.mesh_info.spmd_mesh
    if mesh is None:
        raise UnsupportedError(
            f"shard_placement_fn chose another mesh for {name!r}, which cannot be combined with dp_mesh_dims."
        )
    if not isinstance(parameter, DTensor):
        raise ArgumentError(
            f"With dp_mesh_dims every parameter must be a DTensor on {mesh}, and {name!r} is a plain tensor. Use "
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
                f"{name!r} has the placement {placement} on the data-parallel dimension {each!r}, expected "
                f"Replicate(). {_BOTTOM_UP}"
            )
    if not dims.shard_names:
        return mesh, parameter.placements
    # Several dimensions that shard become one, at the position of the first.
    first = min(map(names.index, dims.shard_names))
    kept = [i for i in range(len(names)) if i == first or names[i] not in dims.shard_names]
    shard = _shard(param, mesh, [i for i in kept if i > first])
    placements = tuple(shard if i == first else parameter.placements[i] for i in kept)
    if len(kept) == len(names):
        return mesh, placements
    flat = flattened_mesh(mesh[dims.shard_names], "_".join(dims.shard_names))
    return concatenated_mesh([flat if i == first else mesh[names[i]] for i in kept]), placements
