"""What users pass to `FullyShardedDataParallel` and to the legacy call, and the checks of it.

Names, fields, defaults and the order of the values are those of PyTorch's FSDP1.
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
    """What is sharded over the ranks, and when a unit is resharded."""

    FULL_SHARD = auto()
    """Parameters, gradients and optimizer state; a unit is unsharded only while it computes."""
    SHARD_GRAD_OP = auto()
    """The same, but parameters stay unsharded from forward to the end of backward."""
    NO_SHARD = auto()
    """Nothing: every rank holds the whole model, and gradients are all-reduced."""
    HYBRID_SHARD = auto()
    """As FULL_SHARD inside a group of ranks, with replicas over the groups."""
    _HYBRID_SHARD_ZERO2 = auto()
    """As SHARD_GRAD_OP inside a group of ranks, with replicas over the groups."""


class BackwardPrefetch(Enum):
    """When backward all-gathers the next unit: before the gradients of this one are computed, or after."""

    BACKWARD_PRE = auto()
    BACKWARD_POST = auto()


@dataclass
class MixedPrecision:
    """The dtypes of a wrapped module.

    ``param_dtype``: what parameters are all-gathered and computed in; ``reduce_dtype``: what gradients are reduced in
    (by default ``param_dtype``); ``buffer_dtype``: what the first forward casts floating-point buffers to. ``None``
    keeps the dtype that each is stored in. ``keep_low_precision_grads`` leaves gradients in the compute dtype.
    Floating-point inputs of the root are cast if ``cast_root_forward_inputs``, those of another wrapped module if
    ``cast_forward_inputs``. With an ``auto_wrap_policy``, ``_module_classes_to_ignore`` compute in full precision.
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
    """Whether sharded parameters and gradients are offloaded to host memory."""

    offload_params: bool = False


class StateDictType(Enum):
    """What `state_dict()` of a wrapped module contains."""

    FULL_STATE_DICT = auto()
    """Unsharded parameters with the names and shapes of the module before it was wrapped."""
    LOCAL_STATE_DICT = auto()
    """This rank's shards of the flat parameters."""
    SHARDED_STATE_DICT = auto()
    """The names and shapes of the full one; each tensor is a ShardedTensor or DTensor."""


@dataclass
class StateDictConfig:
    """``offload_to_cpu``: the tensors are copied to host memory."""

    offload_to_cpu: bool = False


@dataclass
class FullStateDictConfig(StateDictConfig):
    """``rank0_only``: the other ranks get an empty state dict."""

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
    """The same for optimizer state, which is copied to host memory by default."""

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


def default_settings() -> StateDictSettings:
    return StateDictSettings(StateDictType.FULL_STATE_DICT, FullStateDictConfig(), FullOptimStateDictConfig())


# -- checks of arguments -----------------------------------------------------------------------------------------


def check_module(module: Any, call: str) -> None:
    if not isinstance(module, nn.Module):
        raise PolicyError(f"{call} takes a module, got {_shown(module)}.")


def checked_mixed_precision(given: Any) -> MixedPrecision:
    """Checked by its fields: one of PyTorch's, made before the drop-in was installed, has the same."""
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
