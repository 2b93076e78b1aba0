"""Process groups over which a wrapped model is sharded and replicated, and checks of tensor parallelism.

The arguments `process_group`, `device_mesh` and `sharding_strategy` determine these groups.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from ..comm.groups import group_of, is_group, ranks_of
from ..comm.interface import Transport
from ..comm.transports import SoloTransport, transport_for
from ..engine.api import FSDPState, ManagedParam, Options
from ..errors import ArgumentError, UnsupportedError
from ..torch_private import stack_level_of_program
from .api import ShardingStrategy

HYBRID_SHARDING_STRATEGIES = [ShardingStrategy.HYBRID_SHARD, ShardingStrategy._HYBRID_SHARD_ZERO2]
NO_RESHARD_AFTER_FORWARD_STRATEGIES = (ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy._HYBRID_SHARD_ZERO2)


@dataclass(frozen=True)
class Groups:
    """The process groups of a wrapped module. `own` is also the wrapper's attribute `process_group`."""

    strategy: ShardingStrategy
    own: Any
    replicas: Any = None
    mesh: DeviceMesh | None = None

    @property
    def shards(self) -> Any:
        """The process group over which the unit is sharded, or None if the unit is not sharded."""
        return None if self.strategy is ShardingStrategy.NO_SHARD else self.own

    def transports(self, device: torch.device) -> tuple[Transport, Transport]:
        """Return the transport for shards and the transport for replicas."""
        over_own = transport_for(self.own, device)
        if self.shards is None:
            return SoloTransport(), over_own
        return over_own, SoloTransport() if self.replicas is None else transport_for(self.replicas, device)

    def options(self) -> Options:
        reshards = self.shards is not None and self.strategy not in NO_RESHARD_AFTER_FORWARD_STRATEGIES
        # `None` reshards all units except the root. The root's modules hold its sharded parameters after forward, too.
        return Options(
            reshard_after_forward=None if reshards else False,
            show_sharded_after_forward=reshards,
            show_sharded_after_backward=True,
            divide_in_halves=True,
        )

    def arguments(self) -> dict[str, Any]:
        """Return keyword arguments for wrapping inner modules over the same process groups."""
        if self.mesh is not None:
            return {"device_mesh": self.mesh}
        return {"process_group": self.own if self.replicas is None else (self.own, self.replicas)}


def resolve_groups(process_group: Any, mesh: Any, strategy: Any, by_policy: bool) -> Groups:
    """Check the arguments, and return the process groups that they determine.

    `by_policy` is True if the call has an `auto_wrap_policy`. Without a policy, hybrid strategies need explicit groups.
    """
    if strategy is None:
        strategy = ShardingStrategy.FULL_SHARD
    if not isinstance(strategy, ShardingStrategy):
        raise ArgumentError(f"sharding_strategy must be an unshard.ShardingStrategy, got {strategy!r}.")
    if process_group is not None and mesh is not None:
        raise ArgumentError("Pass process_group or device_mesh, not both: each names the ranks that share the module.")
    make = _hybrid if strategy in HYBRID_SHARDING_STRATEGIES else _plain
    groups = make(process_group, mesh, strategy, by_policy)
    world = groups.own.size() * (1 if groups.replicas is None else groups.replicas.size())
    if world == 1 and strategy is not ShardingStrategy.NO_SHARD:
        warnings.warn(
            f"There is one rank, so nothing is sharded: {strategy.name} becomes NO_SHARD.",
            stacklevel=stack_level_of_program(),
        )
        return replace(groups, strategy=ShardingStrategy.NO_SHARD, replicas=None)
    if world > 1 and strategy is ShardingStrategy.NO_SHARD:
        warnings.warn(
            "NO_SHARD keeps the whole model on every rank and is deprecated; torch's DistributedDataParallel does the "
            "same.",
            FutureWarning,
            stacklevel=stack_level_of_program(),
        )
    return groups


def _plain(process_group: Any, mesh: Any, strategy: ShardingStrategy, by_policy: bool) -> Groups:
    if mesh is not None:
        if not isinstance(mesh, DeviceMesh) or mesh.ndim != 1:
            raise ArgumentError(f"{strategy.name} takes a device_mesh of one dimension, got {mesh!r}.")
        return Groups(strategy, mesh.get_group(), mesh=mesh)
    if process_group is None:
        process_group = _default_group()
    if not is_group(process_group):
        raise ArgumentError(f"{strategy.name} takes one process group, got {process_group!r}.")
    return Groups(strategy, process_group)


def _hybrid(process_group: Any, mesh: Any, strategy: ShardingStrategy, by_policy: bool) -> Groups:
    if mesh is not None:
        if not isinstance(mesh, DeviceMesh) or mesh.ndim != 2:
            raise ArgumentError(
                f"{strategy.name} takes a device_mesh of two dimensions, the first for replicas, the second for "
                f"shards; got {mesh!r}."
            )
        return Groups(strategy, mesh.get_group(1), mesh.get_group(0), mesh)
    if process_group is None:
        if not by_policy:
            raise ArgumentError(
                f"{strategy.name} without auto_wrap_policy needs to know which ranks shard and which replicate: "
                "pass process_group=(shard_group, replicate_group) or a device_mesh of two dimensions to every call."
            )
        return Groups(strategy, *_groups_by_node())
    pair = tuple(process_group) if isinstance(process_group, tuple | list) else ()
    if len(pair) != 2 or not all(map(is_group, pair)):
        raise ArgumentError(
            f"{strategy.name} takes process_group=(shard_group, replicate_group), got {process_group!r}."
        )
    return Groups(strategy, *pair)


def _groups_by_node() -> tuple[Any, Any]:
    _default_group()
    rank, world = dist.get_rank(), dist.get_world_size()
    if torch.accelerator.is_available():
        per_node = torch.accelerator.device_count()
    else:
        per_node = int(os.environ.get("LOCAL_WORLD_SIZE", world))
    per_node = min(per_node, world)
    if world % per_node:
        raise ArgumentError(
            f"{world} ranks cannot be divided into nodes of {per_node} devices. Pass "
            "process_group=(shard_group, replicate_group) or a device_mesh of two dimensions."
        )
    first = rank - rank % per_node
    inside = group_of(range(first, first + per_node), "shards of a node")
    return inside, group_of(range(rank % per_node, world, per_node), "replicas over nodes")


def _default_group() -> Any:
    if not dist.is_initialized():
        dist.init_process_group()
    return dist.group.WORLD


# -- tensor parallelism ------------------------------------------------------------------------------------------


def check_tensor_parallel(where: str, parameter: DTensor, groups: Groups) -> None:
    """Raise if a flat unit cannot shard the DTensor `parameter`. `where` names the parameter in error messages.

    A flat unit shards the local tensor of a tensor-parallel parameter. The unsharded parameter is again a DTensor,
    which `ManagedParam.tp_spec` describes.
    """
    mesh = parameter.device_mesh
    for placement in parameter.placements:
        if type(placement) not in (Shard, Replicate):
            raise UnsupportedError(
                f"{where} is a DTensor with the placement {placement}; tensor-parallel parameters have Shard or "
                "Replicate. Redistribute it first."
            )
    for group in (groups.own, groups.replicas):
        shared = ranks_of(mesh) & set(dist.get_process_group_ranks(group)) if group is not None else set()
        if len(shared) > 1:
            raise UnsupportedError(
                f"{where} is already a DTensor over the ranks {sorted(ranks_of(mesh))}, and the module is to be "
                f"sharded or replicated over {sorted(shared)} of them. Take both meshes from one: mesh = "
                'init_device_mesh(..., mesh_dim_names=("dp", "tp")), parallelize_module(module, mesh["tp"], ...), '
                'device_mesh=mesh["dp"].'
            )


def data_parallel_mesh(mesh: Any, strategy: Any, module: nn.Module, states: Iterable[FSDPState]) -> Any:
    """Return the data-parallel dimensions of `mesh`, without a last dimension for tensor parallelism.

    If the strategy is not hybrid, the second of two dimensions is always dropped. If the strategy is hybrid, the third
    of three dimensions is dropped if parameters are tensor parallel on that dimension. Any other mesh is returned
    unchanged, and `resolve_groups` checks it. `states` are the states of the units inside `module`.
    """
    hybrid = strategy in HYBRID_SHARDING_STRATEGIES
    if not isinstance(mesh, DeviceMesh) or mesh.ndim != (3 if hybrid else 2):
        return mesh
    names = mesh.mesh_dim_names
    meshes = {each.device_mesh for each in module.parameters() if isinstance(each, DTensor)}
    specs = [param.tp_spec for state in states for param in state.unit.params]
    meshes |= {spec.mesh for spec in specs if spec is not None}
    is_parallel = names is not None and mesh[names[-1]] in meshes
    if hybrid:
        return mesh[names[:-1]] if names is not None and is_parallel else mesh
    if not is_parallel and mesh.size(1) > 1:
        first, last = (0, 1) if names is None else map(repr, names)
        warnings.warn(
            f"device_mesh has two dimensions: this {type(module).__name__} is sharded over {first}, as in PyTorch, and "
            f"nothing is averaged over {last}, because no parameter is tensor parallel there. Give the ranks of {last} "
            "the same data. For shards and replicas pass sharding_strategy=ShardingStrategy.HYBRID_SHARD.",
            stacklevel=stack_level_of_program(),
        )
    return DeviceMesh.from_group(mesh.get_group(0), mesh.device_type) if names is None else mesh[names[0]]


def tensor_parallel_groups(params: Iterable[ManagedParam]) -> list[Any]:
    """Return the distinct process groups over which `params` are tensor parallel."""
    meshes = {id(param.tp_spec.mesh): param.tp_spec.mesh for param in params if param.tp_spec is not None}
    return list(dict.fromkeys(group for mesh in meshes.values() for group in mesh.get_all_groups()))
