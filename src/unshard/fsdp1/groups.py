"""Process groups of a wrapped module, and what its sharding strategy asks of the engine."""

from __future__ import annotations

import os
import warnings
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ..comm.groups import group_of, is_group
from ..comm.interface import Transport
from ..comm.transports import SoloTransport, transport_for
from ..engine.api import Options
from ..errors import ArgumentError
from .api import ShardingStrategy


@dataclass(frozen=True)
class StrategyTraits:
    """A sharding strategy as data: which ranks hold which parameters, and when a unit is resharded."""

    shards: bool
    replicates: bool
    reshards_after_forward: bool

    def options(self) -> Options:
        """The root is not resharded after forward, but where other units are, it exposes sharded parameters, too."""
        return Options(
            reshard_after_forward=None if self.reshards_after_forward else False,
            show_sharded_after_forward=self.reshards_after_forward,
            show_sharded_after_backward=True,
            divide_in_halves=True,
        )


STRATEGIES = {
    ShardingStrategy.FULL_SHARD: StrategyTraits(shards=True, replicates=False, reshards_after_forward=True),
    ShardingStrategy.SHARD_GRAD_OP: StrategyTraits(shards=True, replicates=False, reshards_after_forward=False),
    ShardingStrategy.NO_SHARD: StrategyTraits(shards=False, replicates=True, reshards_after_forward=False),
    ShardingStrategy.HYBRID_SHARD: StrategyTraits(shards=True, replicates=True, reshards_after_forward=True),
    ShardingStrategy._HYBRID_SHARD_ZERO2: StrategyTraits(shards=True, replicates=True, reshards_after_forward=False),
}


@dataclass(frozen=True)
class Groups:
    """The process groups of a wrapped module. `own` is the one that users see as `process_group`."""

    strategy: ShardingStrategy
    own: Any
    replicas: Any = None
    mesh: DeviceMesh | None = None

    @property
    def traits(self) -> StrategyTraits:
        return STRATEGIES[self.strategy]

    def transports(self, device: torch.device) -> tuple[Transport, Transport]:
        """Over the shards, and over the replicas."""
        over_own = transport_for(self.own, device)
        if not self.traits.shards:
            return SoloTransport(), over_own
        return over_own, SoloTransport() if self.replicas is None else transport_for(self.replicas, device)

    def arguments(self) -> dict[str, Any]:
        """The arguments with which a wrapped module inside uses the same groups."""
        if self.mesh is not None:
            return {"device_mesh": self.mesh}
        return {"process_group": self.own if self.replicas is None else (self.own, self.replicas)}


def resolve_groups(process_group: Any, mesh: Any, strategy: Any, by_policy: bool) -> Groups:
    """The groups that `process_group`, `device_mesh` and `sharding_strategy` ask for.

    `by_policy`: the call has an `auto_wrap_policy`, so that all wrapped modules get the same groups.
    """
    if strategy is None:
        strategy = ShardingStrategy.FULL_SHARD
    if not isinstance(strategy, ShardingStrategy):
        raise ArgumentError(f"sharding_strategy must be an unshard.ShardingStrategy, got {strategy!r}.")
    if process_group is not None and mesh is not None:
        raise ArgumentError("Pass process_group or device_mesh, not both: each names the ranks that share the module.")
    hybrid = STRATEGIES[strategy].shards and STRATEGIES[strategy].replicates
    found = _hybrid(process_group, mesh, strategy, by_policy) if hybrid else _plain(process_group, mesh, strategy)
    return _checked(found)


def _plain(process_group: Any, mesh: Any, strategy: ShardingStrategy) -> Groups:
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
    """Shards inside a node, replicas over the nodes."""
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


def _checked(groups: Groups) -> Groups:
    world = groups.own.size() * (1 if groups.replicas is None else groups.replicas.size())
    if world == 1 and groups.strategy is not ShardingStrategy.NO_SHARD:
        warnings.warn(
            f"There is one rank, so nothing is sharded: {groups.strategy.name} becomes NO_SHARD.", stacklevel=4
        )
        return replace(groups, strategy=ShardingStrategy.NO_SHARD, replicas=None)
    if world > 1 and groups.strategy is ShardingStrategy.NO_SHARD:
        warnings.warn(
            "NO_SHARD keeps the whole model on every rank and is deprecated; torch's DistributedDataParallel does the "
            "same.",
            FutureWarning,
            stacklevel=4,
        )
    return groups
