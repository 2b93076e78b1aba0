"""Classes for arguments of `FullyShardedDataParallel` and `composable.fully_shard`, and checks of these arguments.

Names, fields, defaults and the order of enum values match PyTorch's FSDP1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

import torch
from torch import nn

from ..errors import PolicyError
from ..policies import MixedPrecisionPolicy, OffloadPolicy
from ..torch_private import BATCH_NORM_BASE

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
    """Selects which tensors are sharded over the ranks, and when parameters are unsharded.

    Example::

        model = FullyShardedDataParallel(model, sharding_strategy=ShardingStrategy.SHARD_GRAD_OP)
    """

    FULL_SHARD = auto()
    """Shard parameters, gradients and optimizer state. Units are resharded after forward and after backward."""
    SHARD_GRAD_OP = auto()
    """Like FULL_SHARD, but parameters stay unsharded from forward until the end of backward."""
    NO_SHARD = auto()
    """Shard nothing. Every rank holds the whole model, and gradients are all-reduced."""
    HYBRID_SHARD = auto()
    """Use FULL_SHARD within each group of ranks, and replicate the model across groups."""
    _HYBRID_SHARD_ZERO2 = auto()
    """Use SHARD_GRAD_OP within each group of ranks, and replicate the model across groups."""


class BackwardPrefetch(Enum):
    """Selects whether backward prefetches the next unit before or after it computes the current unit's gradients.

    Example::

        model = FullyShardedDataParallel(model, backward_prefetch=BackwardPrefetch.BACKWARD_POST)
    """

    BACKWARD_PRE = auto()
    BACKWARD_POST = auto()


@dataclass
class MixedPrecision:
    """The dtypes of a wrapped module. ``None`` keeps the stored dtype.

    ``param_dtype`` is the dtype of all-gathers and of computation. ``reduce_dtype`` is the dtype of gradient
    reductions, by default ``param_dtype``. ``buffer_dtype`` is the dtype to which the first forward casts
    floating-point buffers. ``keep_low_precision_grads`` leaves gradients in the compute dtype.
    ``cast_root_forward_inputs`` casts floating-point inputs of the root. ``cast_forward_inputs`` casts floating-point
    inputs of other wrapped modules. With an ``auto_wrap_policy``, instances of ``_module_classes_to_ignore`` compute
    in full precision.

    Example::

        policy = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        model = FullyShardedDataParallel(model, mixed_precision=policy)
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
    """Options for CPU offloading. ``offload_params`` keeps sharded parameters and gradients in host memory.

    Example::

        model = FullyShardedDataParallel(model, cpu_offload=CPUOffload(offload_params=True))
    """

    offload_params: bool = False


class StateDictType(Enum):
    """Selects what `state_dict()` of a wrapped module returns.

    Example::

        with FullyShardedDataParallel.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
            state = model.state_dict()
    """

    FULL_STATE_DICT = auto()
    """Unsharded parameters with the names and shapes of the module before it was wrapped."""
    LOCAL_STATE_DICT = auto()
    """This rank's shards of the flat parameters."""
    SHARDED_STATE_DICT = auto()
    """The same names and shapes as in FULL_STATE_DICT, with a ShardedTensor or DTensor for each parameter."""


@dataclass
class StateDictConfig:
    """Options for a state dict. ``offload_to_cpu`` copies its tensors to host memory."""

    offload_to_cpu: bool = False


@dataclass
class FullStateDictConfig(StateDictConfig):
    """Options for FULL_STATE_DICT. With ``rank0_only``, ranks other than rank 0 get an empty state dict.

    ``offload_to_cpu`` copies tensors to host memory.

    Example::

        config = FullStateDictConfig(offload_to_cpu=True, rank0_only=True)
        with FullyShardedDataParallel.state_dict_type(model, StateDictType.FULL_STATE_DICT, config):
            state = model.state_dict()
    """

    rank0_only: bool = False


@dataclass
class LocalStateDictConfig(StateDictConfig):
    """Options for LOCAL_STATE_DICT. ``offload_to_cpu`` copies tensors to host memory."""


@dataclass
class ShardedStateDictConfig(StateDictConfig):
    """Options for SHARDED_STATE_DICT. ``_use_dtensor`` is True for modules wrapped with a ``device_mesh``.

    ``offload_to_cpu`` copies tensors to host memory.

    Example::

        config = ShardedStateDictConfig(offload_to_cpu=True)
        with FullyShardedDataParallel.state_dict_type(model, StateDictType.SHARDED_STATE_DICT, config):
            state = model.state_dict()
    """

    _use_dtensor: bool = False


@dataclass
class OptimStateDictConfig:
    """Options for an optimizer state dict. ``offload_to_cpu`` copies its tensors to host memory (the default)."""

    offload_to_cpu: bool = True


@dataclass
class FullOptimStateDictConfig(OptimStateDictConfig):
    """Options for FULL_STATE_DICT. With ``rank0_only``, ranks other than rank 0 get an empty dict.

    ``offload_to_cpu`` copies tensors to host memory; it is True by default.
    """

    rank0_only: bool = False


@dataclass
class LocalOptimStateDictConfig(OptimStateDictConfig):
    """Options for LOCAL_STATE_DICT. ``offload_to_cpu`` copies tensors to host memory."""

    offload_to_cpu: bool = False


@dataclass
class ShardedOptimStateDictConfig(OptimStateDictConfig):
    """Options for SHARDED_STATE_DICT. ``offload_to_cpu`` copies tensors to host memory; it is True by default.

    ``_use_dtensor`` is True for modules wrapped with a ``device_mesh``.
    """

    _use_dtensor: bool = False


@dataclass
class StateDictSettings:
    """A ``state_dict_type`` with its options: ``state_dict_config`` and ``optim_state_dict_config``."""

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
    """Return `given`, or `MixedPrecision()` for None. Accept PyTorch's own `MixedPrecision`. Raise for other types."""
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
    if isinstance(given, Enum) and given.name in BackwardPrefetch.__members__:  # PyTorch's own enum
        return BackwardPrefetch[given.name]
    names = " or ".join(f"BackwardPrefetch.{name}" for name in BackwardPrefetch.__members__)
    raise PolicyError(f"backward_prefetch must be {names} or None, got {_shown(given)}.")


def _shown(value: Any) -> str:
    return repr(value) if value is None or isinstance(value, str | int | torch.dtype) else f"a {type(value).__name__}"


# -- `MixedPrecision` as a policy of the engine --------------------------------------------------------------


@dataclass(frozen=True)
class WrapperPolicy(MixedPrecisionPolicy):
    """The engine's policy for a wrapped module. It follows FSDP1's rules for input casts and gradient dtypes.

    This policy does not cast buffers, because `WrapperState.cast_buffers` casts them.
    """

    cast_root_forward_inputs: bool = True
    keep_low_precision_grads: bool = False
    shards_params: bool = True
    every_module_is_root: bool = False
    """True for `composable.fully_shard`. Every sharded module then casts its inputs like a root."""

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
