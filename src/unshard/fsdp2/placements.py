"""Decides how parameters are sharded: over which ranks, along which dimension, and as which DTensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from ..comm.groups import group_of
from ..comm.interface import Transport
from ..comm.transports import SoloTransport, transport_for
from ..engine.api import ManagedParam, ParamGroup, ParamLocation, Slicing, param_group_of, refuse_opaque
from ..errors import ArgumentError, ArgumentTypeError, DimensionError, UnnamedMeshError, UnsupportedError
from ..torch_private import concatenated_mesh, flattened_mesh, local_part, strided_shard

_BOTTOM_UP = "If an outer module was sharded before this one, shard bottom-up instead: blocks first, the model last."


_TORCH_FSDP = (
    "If PyTorch's fully_shard was applied to this module or to one around it, apply unshard's to all of them instead: "
    "`from unshard import fully_shard`."
)


# -- the arguments `mesh` and `dp_mesh_dims` ------------------------------------------------------------------


@dataclass(eq=False)
class DataParallelMeshInfo:
    """A mesh, with the dimension that shards parameters and the dimension that replicates them."""

    mesh: DeviceMesh
    shard_mesh_dim: int | None = None
    replicate_mesh_dim: int | None = None
    spmd_mesh: DeviceMesh | None = None
    """The mesh of all parallelisms, if `dp_mesh_dims` is set. Parameters are then already DTensors on this mesh."""

    needs: ClassVar[dict[str, str]] = {}
    """Maps each field that must not be None to a verb for error messages, which says what the dimension does."""

    def __post_init__(self) -> None:
        for field, verb in self.needs.items():
            if getattr(self, field) is None:
                raise ArgumentError(f"{type(self).__name__} needs {field}, the dimension of {self.mesh} that {verb}.")
        for dim in (self.shard_mesh_dim, self.replicate_mesh_dim):
            if dim is not None and not 0 <= dim < self.mesh.ndim:
                raise ArgumentError(
                    f"{type(self).__name__} names dimension {dim} of {self.mesh}, which has only {self.mesh.ndim}."
                )

    @property
    def shard_mesh_size(self) -> int:
        return 1 if self.shard_mesh_dim is None else self.mesh.size(self.shard_mesh_dim)

    @property
    def replicate_mesh_size(self) -> int:
        return 1 if self.replicate_mesh_dim is None else self.mesh.size(self.replicate_mesh_dim)

    @property
    def shard_process_group(self) -> Any:
        return None if self.shard_mesh_dim is None else self.mesh.get_group(self.shard_mesh_dim)

    @property
    def replicate_process_group(self) -> Any:
        return None if self.replicate_mesh_dim is None else self.mesh.get_group(self.replicate_mesh_dim)

    @property
    def shard_mesh(self) -> DeviceMesh | None:
        """The dimension that shards, as a one-dimensional mesh. None if no dimension shards."""
        if self.shard_mesh_dim is None:
            return None
        if self.mesh.ndim == 1:
            return self.mesh
        if self.mesh.mesh_dim_names is None:
            raise UnnamedMeshError(f"A mesh of several dimensions needs names: {self.mesh}.")
        return self.mesh[self.mesh.mesh_dim_names[self.shard_mesh_dim]]

    def transports(self, device: torch.device) -> tuple[Transport, Transport]:
        """Return the transport over the shards and the transport over the replicas."""
        shards, replicas = (
            SoloTransport() if group is None else transport_for(group, device)
            for group in (self.shard_process_group, self.replicate_process_group)
        )
        return shards, replicas

    def slices_after_forward(self, size: int, device: torch.device) -> Slicing:
        """Return the transport and the mesh of the `size` ranks whose slices form a unit after forward."""
        table = self.mesh.mesh.reshape(-1, size)
        row, column = (table == dist.get_rank()).nonzero()[0].tolist()
        neighbors = group_of(table[row].tolist(), "slices")
        copies = group_of(table[:, column].tolist(), "copies of slices")
        # Unusual names, because torch's caches confuse meshes of equal shape, ranks and names.
        names = ("slice_copies", "slices")
        mesh = DeviceMesh.from_group([copies, neighbors], self.mesh.device_type, table, mesh_dim_names=names)
        return Slicing(transport_for(neighbors, device, separate=False), mesh)


class FSDPMeshInfo(DataParallelMeshInfo):
    """A `mesh` whose dimension number `shard_mesh_dim` shards parameters.

    `replicate_mesh_dim` is None. `spmd_mesh` is the mesh of all parallelisms, if `dp_mesh_dims` is set.

    Example::

        experts = FSDPMeshInfo(mesh["expert"], shard_mesh_dim=0)
    """

    needs = {"shard_mesh_dim": "shards"}


class DDPMeshInfo(DataParallelMeshInfo):
    """A `mesh` whose dimension number `replicate_mesh_dim` replicates parameters.

    `shard_mesh_dim` is None. `spmd_mesh` is the mesh of all parallelisms, if `dp_mesh_dims` is set.

    Example::

        replicas = DDPMeshInfo(mesh["replicate"], replicate_mesh_dim=0)
    """

    needs = {"replicate_mesh_dim": "replicates"}


class HSDPMeshInfo(FSDPMeshInfo, DDPMeshInfo):
    """A `mesh` that shards over dimension `shard_mesh_dim` and replicates over dimension `replicate_mesh_dim`.

    `spmd_mesh` is the mesh of all parallelisms, if `dp_mesh_dims` is set.

    Example::

        info = HSDPMeshInfo(mesh, shard_mesh_dim=1, replicate_mesh_dim=0)
    """

    needs = FSDPMeshInfo.needs | DDPMeshInfo.needs


@dataclass(frozen=True)
class DataParallelMeshDims:
    """Names of the data-parallel dimensions of a mesh, which may also have dimensions of other parallelisms.

    If `shard` or `replicate` has several names, these dimensions act as one.

    Example::

        fully_shard(model, mesh=mesh, dp_mesh_dims=DataParallelMeshDims(shard="dp"))
    """

    shard: str | tuple[str, ...] | None = None
    replicate: str | tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        if not self.shard_names and not self.replicate_names:
            raise ArgumentError("DataParallelMeshDims needs the name of a dimension that shards or replicates.")

    @property
    def shard_names(self) -> tuple[str, ...]:
        """Names of the dimensions that shard."""
        return _as_names(self.shard)

    @property
    def replicate_names(self) -> tuple[str, ...]:
        """Names of the dimensions that replicate."""
        return _as_names(self.replicate)


def resolve_mesh_info(mesh: Any, dims: DataParallelMeshDims | None) -> DataParallelMeshInfo:
    """Check the arguments `mesh` and `dp_mesh_dims`. Return the mesh and its data-parallel dimensions."""
    if dims is not None:
        return _resolve_spmd(mesh, dims)
    if mesh is None:
        if not dist.is_initialized():
            dist.init_process_group()
        # Without the check, a CUDA build of torch returns CUDA on a machine without GPU.
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        mesh = init_device_mesh(accelerator.type if accelerator else "cpu", (dist.get_world_size(),))
        return FSDPMeshInfo(mesh, 0)
    _require_mesh(mesh)
    if mesh.ndim not in (1, 2):
        raise ArgumentError(
            f"fully_shard takes a mesh of one or two dimensions, got {mesh.ndim}: {mesh}. Pass its data-parallel "
            "dimensions: mesh[name] or mesh[replicate_name, shard_name]."
        )
    if mesh.ndim == 2 and mesh.mesh_dim_names is None:
        raise UnnamedMeshError(
            f"A mesh of two dimensions needs names, the first for replicas, the second for shards: {mesh}. Pass "
            'mesh_dim_names=("replicate", "shard") to init_device_mesh.'
        )
    return FSDPMeshInfo(mesh, 0) if mesh.ndim == 1 else HSDPMeshInfo(mesh, 1, 0)


def _require_mesh(mesh: Any) -> None:
    if not isinstance(mesh, DeviceMesh):
        raise ArgumentTypeError(f"mesh must be a DeviceMesh, got {type(mesh).__name__}.")
    if mesh.get_coordinate() is None:
        raise ArgumentError(f"Rank {dist.get_rank()} is not part of {mesh}; call fully_shard only on its ranks.")


def _resolve_spmd(mesh: Any, dims: DataParallelMeshDims) -> DataParallelMeshInfo:
    if not isinstance(dims, DataParallelMeshDims):
        raise ArgumentTypeError(f"dp_mesh_dims must be an unshard.DataParallelMeshDims, got {type(dims).__name__}.")
    _require_mesh(mesh)
    names = mesh.mesh_dim_names
    if names is None:
        raise ArgumentError(
            f"dp_mesh_dims names dimensions, but {mesh} has no names. Pass mesh_dim_names to init_device_mesh."
        )
    for name in dims.shard_names + dims.replicate_names:
        if name not in names:
            raise ArgumentError(f"dp_mesh_dims names {name!r}, but the mesh has the dimensions {', '.join(names)}.")
    shard = _flattened(mesh, dims.shard_names)
    replicate = _flattened(mesh, dims.replicate_names)
    if shard is None:
        assert replicate is not None
        return DDPMeshInfo(replicate, None, 0, spmd_mesh=mesh)
    if replicate is None:
        return FSDPMeshInfo(shard, 0, spmd_mesh=mesh)
    return HSDPMeshInfo(concatenated_mesh([replicate, shard]), 1, 0, spmd_mesh=mesh)


def _flattened(mesh: DeviceMesh, names: Sequence[str]) -> DeviceMesh | None:
    if not names:
        return None
    return mesh[names[0]] if len(names) == 1 else flattened_mesh(mesh[tuple(names)], "_".join(names))


def _as_names(value: str | tuple[str, ...] | None) -> tuple[str, ...]:
    if value is None:
        return ()
    return (value,) if isinstance(value, str) else tuple(value)


# -- the placement of each parameter --------------------------------------------------------------------------


@dataclass(frozen=True)
class ShardPlacementResult:
    """The dimension and the mesh that `shard_placement_fn` chooses for a parameter.

    A `placement` of None means dimension 0. `mesh_info` is an `FSDPMeshInfo` or another mesh info.

    Example::

        fully_shard(moe, shard_placement_fn=lambda p: ShardPlacementResult(Shard(0), experts) if p in own else None)
    """

    placement: Shard | None
    mesh_info: DataParallelMeshInfo


ShardPlacementFn = Callable[[nn.Parameter], Shard | ShardPlacementResult | None]


@dataclass
class ParamToShard:
    """A parameter that a call of `fully_shard` shards, with all of its names and locations."""

    parameter: nn.Parameter
    names: list[str]
    locations: list[ParamLocation]
    mesh_info: DataParallelMeshInfo
    dim: int = 0

    @property
    def owner(self) -> tuple[ParamGroup, ManagedParam] | None:
        """The param group and the `ManagedParam` of the parameter if an earlier call has sharded it, otherwise None.

        In the first case, the parameter is tied: modules of both calls use it.
        """
        group = param_group_of(self.parameter)
        theirs = None if group is None else group.param_of(self.parameter)
        return None if group is None or theirs is None else (group, theirs)

    @property
    def name(self) -> str:
        return self.names[0]

    def refuse_same_place(self, group: ParamGroup, theirs: ManagedParam) -> None:
        """Raise an error if an earlier call has sharded the parameter in the same module.

        Two calls can share a tied parameter only if different modules hold it.
        """
        held = {(id(each.parameters), each.name) for each in theirs.locations}
        if any((id(each.parameters), each.name) in held for each in self.locations):
            raise UnsupportedError(
                f"Parameter {self.name!r} is sharded already, by unit {group.unit_name!r}. {_BOTTOM_UP}"
            )

    @property
    def local(self) -> torch.Tensor:
        """The parameter as a plain tensor. For a tensor-parallel parameter, this is the local tensor."""
        return local_part(self.parameter.detach())

    def choose_placement(self, fn: ShardPlacementFn | None) -> None:
        """Set the mesh and the dimension that the user's `fn` returns.

        The defaults are the mesh of the `fully_shard` call and dimension 0.
        """
        self._check_kind()
        chosen: Any = fn(self.parameter) if fn is not None else None
        if isinstance(chosen, ShardPlacementResult):
            self.mesh_info = self._checked_mesh(chosen.mesh_info)
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

    def _checked_mesh(self, chosen: Any) -> DataParallelMeshInfo:
        usual, name = self.mesh_info, self.name
        if not isinstance(chosen, DataParallelMeshInfo):
            raise ArgumentError(f"mesh_info of {name!r} must be an FSDPMeshInfo or HSDPMeshInfo, got {chosen!r}.")
        if chosen.mesh.device_type != usual.mesh.device_type:
            raise ArgumentError(
                f"shard_placement_fn chose {chosen.mesh} for {name!r}, which is on other devices than {usual.mesh}."
            )
        if chosen.mesh.get_coordinate() is None:
            raise ArgumentError(f"shard_placement_fn chose {chosen.mesh} for {name!r}, which this rank is not part of.")
        return chosen


def mesh_and_placements(
    param: ParamToShard, dims: DataParallelMeshDims | None
) -> tuple[DeviceMesh, tuple[Placement, ...]]:
    """Return the mesh and the placements of the sharded parameter."""
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
    """Return the placement of `param` on the mesh dimension that shards it.

    `later` contains the mesh dimensions that follow. They may shard the same dimension of the parameter.
    """
    placements = param.parameter.placements  # type: ignore[attr-defined]
    factor = prod(mesh.size(i) for i in later if placements[i].is_shard(param.dim))
    return strided_shard(param.dim, factor) if factor > 1 else Shard(param.dim)


def _check_tp_mesh(name: str, mesh: DeviceMesh, tp_mesh: DeviceMesh) -> None:
    where = f"Parameter {name!r} is already a DTensor on {tp_mesh}"
    if tp_mesh.device_type != mesh.device_type:
        raise ArgumentError(f"{where}, which is on other devices than {mesh}.")
    if tp_mesh.mesh_dim_names is None or mesh.mesh_dim_names is None:
        raise UnsupportedError(
            f"{where}. {_TORCH_FSDP} {_BOTTOM_UP} If it is tensor parallel, take both meshes from one: "
            'init_device_mesh(..., mesh_dim_names=("dp", "tp")), then mesh["tp"] and mesh["dp"].'
        )
    shared = set(tp_mesh.mesh_dim_names) & set(mesh.mesh_dim_names)
    if shared:
        dims = ", ".join(sorted(shared))
        raise UnsupportedError(f"{where}, so it is already distributed over {dims}. {_TORCH_FSDP} {_BOTTOM_UP}")
    if tp_mesh.ndim > 2:
        raise UnsupportedError(f"{where}; at most two dimensions beside data parallelism are supported.")


def _placements_on_spmd_mesh(
    param: ParamToShard, dims: DataParallelMeshDims
) -> tuple[DeviceMesh, tuple[Placement, ...]]:
    """Implement `mesh_and_placements` for `dp_mesh_dims`. Only placements on data-parallel dimensions change."""
    name, parameter, mesh = param.name, param.parameter, param.mesh_info.spmd_mesh
    if mesh is None:
        raise UnsupportedError(
            f"shard_placement_fn chose another mesh for {name!r}, which cannot be combined with dp_mesh_dims."
        )
    if not isinstance(parameter, DTensor):
        raise ArgumentError(
            f"With dp_mesh_dims, every parameter must be a DTensor on {mesh}, but {name!r} is a plain tensor. Use "
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
    # Several dimensions that shard become one, in the position of the first.
    first = min(map(names.index, dims.shard_names))
    kept = [i for i in range(len(names)) if i == first or names[i] not in dims.shard_names]
    shard = _shard(param, mesh, [i for i in kept if i > first])
    placements = tuple(shard if i == first else parameter.placements[i] for i in kept)
    if len(kept) == len(names):
        return mesh, placements
    flat = flattened_mesh(mesh[dims.shard_names], "_".join(dims.shard_names))
    return concatenated_mesh([flat if i == first else mesh[names[i]] for i in kept]), placements
