"""Arguments of `FullyShardedDataParallel` and of the legacy call, and their checks.

Names, fields, defaults and the order of enum values match PyTorch's FSDP1.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto
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
from ..errors import ArgumentError, PolicyError, UnsupportedError
from ..policies import MixedPrecisionPolicy, OffloadPolicy
from ..torch_private import BATCH_NORM_BASE, stack_level_of_program

__all__ = [
    "BackwardPrefetch",
    "CPUOffload",
    "FullOptimStateDictConfig",
    "FullStateDictConfig",
    "LocalOptimStateDictConfig",
    "LocalStateDictConfig",
    "MixedPrecision",
    "OptimStateDictConfig",
    "ShardedOptimStateDictConfig",
    "ShardedStateDictConfig",
    "ShardingStrategy",
    "StateDictConfig",
    "StateDictSettings",
    "StateDictType",
]


class ShardingStrategy(Enum):
    """Which tensors are sharded over the ranks, and when a unit is resharded."""

    FULL_SHARD = auto()
    """Parameters, gradients and optimizer state; a unit is unsharded only while it computes."""
    SHARD_GRAD_OP = auto()
    """Like FULL_SHARD, but parameters stay unsharded from forward to the end of backward."""
    NO_SHARD = auto()
    """Nothing: every rank holds the whole model, and gradients are all-reduced."""
    HYBRID_SHARD = auto()
    """FULL_SHARD inside a group of ranks, with replicas over the groups."""
    _HYBRID_SHARD_ZERO2 = auto()
    """SHARD_GRAD_OP inside a group of ranks, with replicas over the groups."""


class BackwardPrefetch(Enum):
    """When backward all-gathers the next unit: before or after it computes the gradients of this one."""

    BACKWARD_PRE = auto()
    BACKWARD_POST = auto()


@dataclass
class MixedPrecision:
    """The dtypes of a wrapped module; ``None`` keeps the stored dtype.

    ``param_dtype``: all-gathers and compute. ``reduce_dtype``: reduction of gradients, by default ``param_dtype``.
    ``buffer_dtype``: the first forward casts floating-point buffers to it. ``keep_low_precision_grads`` leaves
    gradients in the compute dtype. ``cast_root_forward_inputs`` casts floating-point inputs of the root,
    ``cast_forward_inputs`` those of other wrapped modules. With an ``auto_wrap_policy``, instances of
    ``_module_classes_to_ignore`` compute in full precision.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    buffer_dtype: torch.dtype | None = None
    keep_low_precision_grads: bool = False
    cast_forward_inputs: bool = False
    cast_root_forward_inputs: bool = True
    _module_classes_to_ignore: Sequence[type[nn.Module]] = (BATCH_NORM_BASE,)


@dataclass
class CPUOffload:
    """``offload_params``: keep sharded parameters and gradients in host memory."""

    offload_params: bool = False


class StateDictType(Enum):
    """Contents of `state_dict()` of a wrapped module."""

    FULL_STATE_DICT = auto()
    """Unsharded parameters with the names and shapes of the module before it was wrapped."""
    LOCAL_STATE_DICT = auto()
    """This rank's shards of the flat parameters."""
    SHARDED_STATE_DICT = auto()
    """Names and shapes of FULL_STATE_DICT; each tensor is a ShardedTensor or DTensor."""


@dataclass
class StateDictConfig:
    """``offload_to_cpu``: copy the tensors to host memory."""

    offload_to_cpu: bool = False


@dataclass
class FullStateDictConfig(StateDictConfig):
    """``rank0_only``: other ranks get an empty state dict."""

    rank0_only: bool = False


@dataclass
class LocalStateDictConfig(StateDictConfig):
    pass


@dataclass
class ShardedStateDictConfig(StateDictConfig):
    """``_use_dtensor`` is true for modules that were wrapped with a ``device_mesh``."""

    _use_dtensor: bool = False


@dataclass
class OptimStateDictConfig:
    """Like ``StateDictConfig``, for optimizer state, which is copied to host memory by default."""

    offload_to_cpu: bool = True


@dataclass
class FullOptimStateDictConfig(OptimStateDictConfig):
    rank0_only: bool = False


@dataclass
class LocalOptimStateDictConfig(OptimStateDictConfig):
    offload_to_cpu: bool = False


@dataclass
class ShardedOptimStateDictConfig(OptimStateDictConfig):
    _use_dtensor: bool = False


@dataclass
class StateDictSettings:
    state_dict_type: StateDictType
    state_dict_config: StateDictConfig
    optim_state_dict_config: OptimStateDictConfig


CONFIGS: dict[StateDictType, tuple[type[StateDictConfig], type[OptimStateDictConfig]]] = {
    StateDictType.FULL_STATE_DICT: (FullStateDictConfig, FullOptimStateDictConfig),
    StateDictType.LOCAL_STATE_DICT: (LocalStateDictConfig, LocalOptimStateDictConfig),
    StateDictType.SHARDED_STATE_DICT: (ShardedStateDictConfig, ShardedOptimStateDictConfig),
}


def default_settings(
    state_dict_type: StateDictType = StateDictType.FULL_STATE_DICT, **optim_options: bool
) -> StateDictSettings:
    config, optim_config = CONFIGS[state_dict_type]
    return StateDictSettings(state_dict_type, config(), optim_config(**optim_options))


# -- checks of arguments -----------------------------------------------------------------------------------------


def check_module(module: Any, call: str) -> None:
    if not isinstance(module, nn.Module):
        raise PolicyError(f"{call} takes a module, got {_shown(module)}.")


def checked_mixed_precision(given: Any) -> MixedPrecision:
    """Check the fields, not the class: PyTorch's, created before the drop-in was installed, has the same fields."""
    if given is None:
        return MixedPrecision()
    if all(hasattr(given, name) for name in ("param_dtype", "buffer_dtype", "cast_root_forward_inputs")):
        return given
    hint = "MixedPrecision(param_dtype=...)"
    if isinstance(given, torch.dtype):
        hint = f"MixedPrecision(param_dtype={given})"
    elif isinstance(given, MixedPrecisionPolicy):
        hint = (
            f"MixedPrecision(param_dtype={given.param_dtype}, ...); a MixedPrecisionPolicy is for unshard.fully_shard"
        )
    raise PolicyError(f"mixed_precision must be a MixedPrecision, got {_shown(given)}. Pass {hint}.")


def checked_cpu_offload(given: Any) -> CPUOffload:
    if given is None:
        return CPUOffload()
    if hasattr(given, "offload_params"):
        return given
    also = "; an OffloadPolicy is for unshard.fully_shard" if isinstance(given, OffloadPolicy) else ""
    raise PolicyError(
        f"cpu_offload must be a CPUOffload, got {_shown(given)}. Pass CPUOffload(offload_params=True){also}."
    )


def checked_prefetch(given: Any) -> BackwardPrefetch | None:
    if given is None or isinstance(given, BackwardPrefetch):
        return given
    if isinstance(given, Enum) and given.name in BackwardPrefetch.__members__:  # PyTorch's
        return BackwardPrefetch[given.name]
    names = " or ".join(f"BackwardPrefetch.{name}" for name in BackwardPrefetch.__members__)
    raise PolicyError(f"backward_prefetch must be {names} or None, got {_shown(given)}.")


def _shown(value: Any) -> str:
    return repr(value) if value is None or isinstance(value, str | int | torch.dtype) else f"a {type(value).__name__}"


# -- `MixedPrecision` as a policy of the engine --------------------------------------------------------------


@dataclass(frozen=True)
class WrapperPolicy(MixedPrecisionPolicy):
    """The policy of a wrapped module: FSDP1 casts inputs and keeps gradients by other rules than FSDP2.

    `WrapperState.cast_buffers` casts buffers, not this policy.
    """

    cast_root_forward_inputs: bool = True
    keep_low_precision_grads: bool = False
    shards_params: bool = True
    every_module_is_root: bool = False
    """True for the legacy call: every module that it is applied to casts inputs like a root."""

    def dtype_of_gradients(self, original: torch.dtype, compute: torch.dtype, reduce: torch.dtype) -> torch.dtype:
        if not self.keep_low_precision_grads:
            return original
        return compute if self.shards_params else reduce

    def dtype_of_sums(self, compute: torch.dtype, reduce: torch.dtype) -> torch.dtype:
        return compute

    def dtype_of_stored_reduction(self, original: torch.dtype, reduce: torch.dtype) -> torch.dtype:
        return original

    def casts_inputs(self, root: bool, empty: bool) -> bool:
        as_root = (root or self.every_module_is_root) and self.cast_root_forward_inputs
        return as_root or (self.cast_forward_inputs and not empty)


# -- process groups, meshes and sharding strategy ---------------------------------------------------------------------


HYBRID_SHARDING_STRATEGIES = [ShardingStrategy.HYBRID_SHARD, ShardingStrategy._HYBRID_SHARD_ZERO2]
NO_RESHARD_AFTER_FORWARD_STRATEGIES = (ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy._HYBRID_SHARD_ZERO2)


@dataclass(frozen=True)
class Groups:
    """The process groups of a wrapped module. `own` is the one that users see as `process_group`."""

    strategy: ShardingStrategy
    own: Any
    replicas: Any = None
    mesh: DeviceMesh | None = None

    @property
    def shards(self) -> Any:
        """The process group of the ranks that hold the shards; None if the unit is not sharded."""
        return None if self.strategy is ShardingStrategy.NO_SHARD else self.own

    def transports(self, device: torch.device) -> tuple[Transport, Transport]:
        """Transports over the shards, and over the replicas."""
        over_own = transport_for(self.own, device)
        if self.shards is None:
            return SoloTransport(), over_own
        return over_own, SoloTransport() if self.replicas is None else transport_for(self.replicas, device)

    def options(self) -> Options:
        """The root stays unsharded after forward. If other units are resharded, it still exposes sharded parameters."""
        reshards = self.shards is not None and self.strategy not in NO_RESHARD_AFTER_FORWARD_STRATEGIES
        return Options(
            reshard_after_forward=None if reshards else False,
            show_sharded_after_forward=reshards,
            show_sharded_after_backward=True,
            divide_in_halves=True,
        )

    def arguments(self) -> dict[str, Any]:
        """Arguments that make a wrapped module inside use the same groups."""
        if self.mesh is not None:
            return {"device_mesh": self.mesh}
        return {"process_group": self.own if self.replicas is None else (self.own, self.replicas)}


def resolve_groups(process_group: Any, mesh: Any, strategy: Any, by_policy: bool) -> Groups:
    """Resolve `process_group`, `device_mesh` and `sharding_strategy`.

    `by_policy`: the call has an `auto_wrap_policy`, so all wrapped modules get the same groups.
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


# -- tensor parallelism ------------------------------------------------------------------------------------------


def check_tensor_parallel(where: str, parameter: DTensor, groups: Groups) -> None:
    """Refuse DTensors that a flat unit cannot shard. `where` names the parameter.

    `ManagedParam.tp_spec` keeps how `parallelize_module` distributed a parameter. A flat unit shards the local tensor;
    the unsharded parameter is a DTensor on the tensor-parallel mesh again.
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
    """Drop the last dimension of `mesh` if it has one more than the strategy takes: it is for tensor parallelism.

    Any other mesh is returned unchanged, to be checked with the other arguments; so is a mesh for a hybrid strategy
    whose last dimension is not tensor parallel. `states`: of the units inside `module`.
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
    """Distinct process groups of the tensor-parallel meshes of these parameters."""
    meshes = {id(param.tp_spec.mesh): param.tp_spec.mesh for param in params if param.tp_spec is not None}
    return list(dict.fromkeys(group for mesh in meshes.values() for group in mesh.get_all_groups()))
