"""What users pass to `FullyShardedDataParallel`: strategies, precisions, kinds of state dicts.

Names, fields, defaults and the order of the values are those that programs written for PyTorch's FSDP1 know.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto

import torch
from torch import nn

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
    """What is cut over the ranks, and for how long a unit is whole."""

    FULL_SHARD = auto()
    """Everything; a unit is whole only while it computes."""
    SHARD_GRAD_OP = auto()
    """Gradients and optimizer state; parameters are whole from forward to the end of backward."""
    NO_SHARD = auto()
    """Nothing: every rank holds the model, and gradients are summed."""
    HYBRID_SHARD = auto()
    """As FULL_SHARD inside a group of ranks, with replicas over the groups."""
    _HYBRID_SHARD_ZERO2 = auto()
    """As SHARD_GRAD_OP inside a group of ranks, with replicas over the groups."""


class BackwardPrefetch(Enum):
    """When backward gathers the next unit: before the gradients of this one are computed, or after."""

    BACKWARD_PRE = auto()
    BACKWARD_POST = auto()


@dataclass
class MixedPrecision:
    """The dtypes of a wrapped module.

    ``param_dtype``: what parameters are gathered and computed in; ``reduce_dtype``: what gradients are reduced in (by
    default ``param_dtype``); ``buffer_dtype``: what floating-point buffers become at the first forward. ``None`` leaves
    each as it is stored. ``keep_low_precision_grads`` leaves gradients in the compute dtype. Floating-point inputs of
    the outermost wrapped module are cast if ``cast_root_forward_inputs``, those of an inner one if
    ``cast_forward_inputs``. Modules of ``_module_classes_to_ignore`` keep their precision where an
    ``auto_wrap_policy`` is given.
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
    """Whether parameters and gradients rest on the host."""

    offload_params: bool = False


class StateDictType(Enum):
    """How `state_dict()` of a wrapped module gives its parameters."""

    FULL_STATE_DICT = auto()
    """Whole, under the names and in the shapes of the module before it was wrapped."""
    LOCAL_STATE_DICT = auto()
    """This rank's flat pieces."""
    SHARDED_STATE_DICT = auto()
    """The names and shapes of the full one, each tensor distributed over the ranks."""


@dataclass
class StateDictConfig:
    """What all kinds of state dicts can be told: whether their tensors are moved to the host."""

    offload_to_cpu: bool = False


@dataclass
class FullStateDictConfig(StateDictConfig):
    """``rank0_only``: the others get an empty one."""

    rank0_only: bool = False


@dataclass
class LocalStateDictConfig(StateDictConfig):
    pass


@dataclass
class ShardedStateDictConfig(StateDictConfig):
    """``_use_dtensor`` is set where the module was wrapped with a mesh."""

    _use_dtensor: bool = False


@dataclass
class OptimStateDictConfig:
    """The same for the optimizer's state, which is moved to the host unless told otherwise."""

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
