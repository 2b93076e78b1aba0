"""Over which ranks parameters are sharded and replicated: the arguments `mesh` and `dp_mesh_dims`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ..comm.groups import group_of
from ..comm.interface import Transport
from ..comm.transports import SoloTransport, transport_for
from ..engine.api import Slicing
from ..errors import ArgumentError, ArgumentTypeError, UnnamedMeshError
from ..torch_private import concatenated_mesh, flattened_mesh


@dataclass(eq=False)
class DataParallelMeshInfo:
    """A mesh and which of its dimensions shard and replicate parameters."""

    mesh: DeviceMesh
    shard_mesh_dim: int | None = None
    replicate_mesh_dim: int | None = None
    spmd_mesh: DeviceMesh | None = None
    """The mesh of all parallelisms, on which parameters are DTensors already; see `DataParallelMeshDims`."""

    def __post_init__(self) -> None:
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
        """The mesh dimension that shards, as a mesh of one dimension."""
        if self.shard_mesh_dim is None:
            return None
        if self.mesh.ndim == 1:
            return self.mesh
        if self.mesh.mesh_dim_names is None:
            raise UnnamedMeshError(f"A mesh of several dimensions needs names: {self.mesh}.")
        return self.mesh[self.mesh.mesh_dim_names[self.shard_mesh_dim]]

    def transports(self, device: torch.device) -> tuple[Transport, Transport]:
        """The transports of the ranks that shard and of the ranks that replicate."""
        shards, replicas = self.shard_process_group, self.replicate_process_group
        return (
            SoloTransport() if shards is None else transport_for(shards, device),
            SoloTransport() if replicas is None else transport_for(replicas, device),
        )

    def slices_after_forward(self, size: int, device: torch.device) -> Slicing:
        """Groups of `size` neighbours, whose ranks keep slices between forward and backward."""
        table = self.mesh.mesh.reshape(-1, size)
        row, column = (table == dist.get_rank()).nonzero()[0].tolist()
        neighbours = group_of(table[row].tolist(), "slices")
        copies = group_of(table[:, column].tolist(), "copies of slices")
        # Unusual names: torch's caches do not distinguish meshes of equal shape, ranks and names.
        names = ("slice_copies", "slices")
        mesh = DeviceMesh.from_group([copies, neighbours], self.mesh.device_type, table, mesh_dim_names=names)
        return Slicing(transport_for(neighbours, device, separate=False), mesh)


class FSDPMeshInfo(DataParallelMeshInfo):
    """A mesh that shards."""

    def __post_init__(self) -> None:
        if self.shard_mesh_dim is None:
            raise ArgumentError(
                f"{type(self).__name__} needs shard_mesh_dim, the dimension of {self.mesh} that shards."
            )
        super().__post_init__()


class DDPMeshInfo(DataParallelMeshInfo):
    """A mesh that replicates."""

    def __post_init__(self) -> None:
        if self.replicate_mesh_dim is None:
            raise ArgumentError(
                f"{type(self).__name__} needs replicate_mesh_dim, the dimension of {self.mesh} that replicates."
            )
        super().__post_init__()


class HSDPMeshInfo(FSDPMeshInfo, DDPMeshInfo):
    """A mesh that shards over one dimension and replicates over another."""


@dataclass(frozen=True)
class DataParallelMeshDims:
    """Which dimensions of a mesh of all parallelisms are data parallel, by name; several names act as one."""

    shard: str | tuple[str, ...] | None = None
    replicate: str | tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        if not self.shard_names and not self.replicate_names:
            raise ArgumentError(
                "DataParallelMeshDims needs the name of a dimension that shards or replicates, or both."
            )

    @property
    def shard_names(self) -> tuple[str, ...]:
        return _as_names(self.shard)

    @property
    def replicate_names(self) -> tuple[str, ...]:
        return _as_names(self.replicate)


def resolve_mesh_info(mesh: Any, dims: DataParallelMeshDims | None) -> DataParallelMeshInfo:
    """The mesh and its dimensions that shard and replicate, from the arguments `mesh` and `dp_mesh_dims`."""
    if dims is not None:
        return _resolve_spmd(mesh, dims)
    if mesh is None:
        mesh = _default_mesh()
    else:
        _check_mesh(mesh)
    if mesh.ndim == 1:
        return FSDPMeshInfo(mesh, 0)
    return HSDPMeshInfo(mesh, 1, 0)


def _default_mesh() -> DeviceMesh:
    if not dist.is_initialized():
        dist.init_process_group()
    # Without the check, a CUDA build of torch names CUDA on a machine without GPU.
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return init_device_mesh(accelerator.type if accelerator else "cpu", (dist.get_world_size(),))


def _check_mesh(mesh: Any) -> None:
    _require_mesh(mesh)
    if mesh.ndim not in (1, 2):
        raise ArgumentError(
            f"fully_shard takes a mesh of one or two dimensions, got {mesh.ndim}: {mesh}. Pass the data-parallel part "
            "of it, mesh[name] or mesh[replicate_name, shard_name]."
        )
    if mesh.ndim == 2 and mesh.mesh_dim_names is None:
        raise UnnamedMeshError(
            f"A mesh of two dimensions needs names, the first for replicas, the second for shards: {mesh}. Pass "
            'mesh_dim_names=("replicate", "shard") to init_device_mesh.'
        )


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
    """The named dimensions as a mesh of one dimension."""
    if not names:
        return None
    return mesh[names[0]] if len(names) == 1 else flattened_mesh(mesh[tuple(names)], "_".join(names))


def _as_names(value: str | tuple[str, ...] | None) -> tuple[str, ...]:
    if value is None:
        return ()
    return (value,) if isinstance(value, str) else tuple(value)
