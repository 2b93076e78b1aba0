"""Over which ranks the wrapper shards and replicates, and what its strategies mean to the engine."""

from __future__ import annotations

import os
import warnings
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ..comm.groups import group_of
from ..comm.interface import Transport
from ..comm.process_group import transport_for
from ..comm.solo import SoloTransport
from ..engine.options import Options
from ..errors import ArgumentError
from .wrapper_api import ShardingStrategy


@dataclass(frozen=True)
class Meaning:
    """A strategy as data: whether parameters are cut and replicated, and how long a unit stays whole."""

    cuts: bool
    replicates: bool
    frees_after_forward: bool

    def options(self) -> Options:
        """The root is never freed after forward; where others are, it shows its sharded parameters all the same."""
        return Options(
            reshard_after_forward=None if self.frees_after_forward else False,
            hide_after_forward=self.frees_after_forward,
            hide_after_backward=True,
            divide_in_halves=True,
        )


MEANING = {
    ShardingStrategy.FULL_SHARD: Meaning(cuts=True, replicates=False, frees_after_forward=True),
    ShardingStrategy.SHARD_GRAD_OP: Meaning(cuts=True, replicates=False, frees_after_forward=False),
    ShardingStrategy.NO_SHARD: Meaning(cuts=False, replicates=True, frees_after_forward=False),
    ShardingStrategy.HYBRID_SHARD: Meaning(cuts=True, replicates=True, frees_after_forward=True),
    ShardingStrategy._HYBRID_SHARD_ZERO2: Meaning(cuts=True, replicates=True, frees_after_forward=False),
}


@dataclass(frozen=True)
class Groups:
    """The process groups of a wrapped module. `own` is the one that users see as `process_group`."""

    strategy: ShardingStrategy
    own: Any
    replicas: Any = None
    mesh: DeviceMesh | None = None

    @property
    def meaning(self) -> Meaning:
        return MEANING[self.strategy]

    def transports(self, device: torch.device) -> tuple[Transport, Transport]:
        """Over the shards, and over the replicas."""
        over_own = transport_for(self.own, device)
        if not self.meaning.cuts:
            return SoloTransport(), over_own
        return over_own, SoloTransport() if self.replicas is None else transport_for(self.replicas, device)

    def arguments(self) -> dict[str, Any]:
        """What modules inside are given, so that they use the same groups."""
        if self.mesh is not None:
            return {"device_mesh": self.mesh}
        return {"process_group": self.own if self.replicas is None else (self.own, self.replicas)}


def resolve_groups(process_group: Any, mesh: Any, strategy: Any, by_policy: bool) -> Groups:
    """What the arguments `process_group`, `device_mesh` and `sharding_strategy` say."""
    if strategy is None:
        strategy = ShardingStrategy.FULL_SHARD
    if not isinstance(strategy, ShardingStrategy):
        raise ArgumentError(f"sharding_strategy must be an unshard.ShardingStrategy, got {strategy!r}.")
    if process_group is not None and mesh is not None:
        raise ArgumentError("Pass process_group or device_mesh, not both: each says which ranks share the module.")
    hybrid = MEANING[strategy].cuts and MEANING[strategy].replicates
    found = _hybrid(process_group, mesh, strategy, by_policy) if hybrid else _plain(process_group, mesh, strategy)
    return _checked(found)


def _plain(process_group: Any, mesh: Any, strategy: ShardingStrategy) -> Groups:
    if mesh is not None:
        if not isinstance(mesh, DeviceMesh) or mesh.ndim != 1:
            raise ArgumentError(f"{strategy.name} takes a device_mesh of one dimension, got {mesh!r}.")
        return Groups(strategy, mesh.get_group(), mesh=mesh)
    if process_group is None:
        process_group = _default_group()
    if isinstance(process_group, tuple) or not isinstance(process_group, dist.ProcessGroup):
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
                f"{strategy.name} without auto_wrap_policy needs to be told which ranks shard and which replicate: "
                "pass process_group=(shard_group, replicate_group) or a device_mesh of two dimensions to every call."
            )
        return Groups(strategy, *_by_node())
    pair = tuple(process_group) if isinstance(process_group, tuple | list) else ()
    if len(pair) != 2 or not all(isinstance(each, dist.ProcessGroup) for each in pair):
        raise ArgumentError(
            f"{strategy.name} takes process_group=(shard_group, replicate_group), got {process_group!r}."
        )
    return Groups(strategy, *pair)


def _by_node() -> tuple[Any, Any]:
    """Shards inside a node, replicas over the nodes."""
    _default_group()
    rank, world = dist.get_rank(), dist.get_world_size()
    here = torch.accelerator.device_count() if torch.accelerator.is_available() else _ranks_per_node(world)
    here = min(here, world)
    if world % here:
        raise ArgumentError(f"{world} ranks cannot be dealt to nodes of {here} devices. Pass the groups yourself.")
    first = rank - rank % here
    inside = group_of(range(first, first + here), "shards of a node")
    return inside, group_of(range(rank % here, world, here), "replicas over nodes")


def _ranks_per_node(world: int) -> int:
    return int(os.environ.get("LOCAL_WORLD_SIZE", world))


def _default_group() -> Any:
    if not dist.is_initialized():
        dist.init_process_group()
    return dist.group.WORLD


def _checked(groups: Groups) -> Groups:
    world = groups.own.size() * (1 if groups.replicas is None else groups.replicas.size())
    if world == 1 and groups.strategy is not ShardingStrategy.NO_SHARD:
        warnings.warn(f"There is one rank, so nothing is cut: {groups.strategy.name} becomes NO_SHARD.", stacklevel=4)
        return replace(groups, strategy=ShardingStrategy.NO_SHARD, replicas=None)
    if world > 1 and groups.strategy is ShardingStrategy.NO_SHARD:
        warnings.warn(
            "NO_SHARD keeps the whole model on every rank and is deprecated; torch's DistributedDataParallel does the "
            "same.",
            FutureWarning,
            stacklevel=4,
        )
    return groups
