"""The public names of the package. `unshard/__init__.py` imports this module on the first use of such a name."""

import os

from . import checkpoint, optim, tools, wrap
from .captured_step import CapturedStep, capture
from .comm.agreement import sync_module_states
from .comm.interface import AllGather, Comm, ReduceScatter
from .engine.api import UnshardHandle
from .errors import CheckpointError, CollectiveError, OrderError, UnshardError
from .fsdp1.api import (
    BackwardPrefetch,
    CPUOffload,
    FullOptimStateDictConfig,
    FullStateDictConfig,
    LocalOptimStateDictConfig,
    LocalStateDictConfig,
    MixedPrecision,
    OptimStateDictConfig,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    ShardingStrategy,
    StateDictConfig,
    StateDictSettings,
    StateDictType,
)
from .fsdp1.optim_load import OptimStateKeyType
from .fsdp1.state import FlatParameter
from .fsdp1.wrapper import FullyShardedDataParallel
from .fsdp2.fully_shard import fully_shard, register_fsdp_forward_method, share_comm_ctx
from .fsdp2.module import FSDPModule, GradientReductionHandle, disable_fsdp_module_new_init, get_cls_to_fsdp_cls
from .fsdp2.placements import DataParallelMeshDims, DDPMeshInfo, FSDPMeshInfo, HSDPMeshInfo, ShardPlacementResult
from .policies import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, OptimizerOffloadPolicy
from .uneven import inference, step
from .wrap import CustomPolicy, ModuleWrapPolicy

__all__ = [
    "AllGather",
    "BackwardPrefetch",
    "CPUOffload",
    "CPUOffloadPolicy",
    "CapturedStep",
    "CheckpointError",
    "CollectiveError",
    "Comm",
    "CustomPolicy",
    "DDPMeshInfo",
    "DataParallelMeshDims",
    "FSDPMeshInfo",
    "FSDPModule",
    "FlatParameter",
    "FullOptimStateDictConfig",
    "FullStateDictConfig",
    "FullyShardedDataParallel",
    "GradientReductionHandle",
    "HSDPMeshInfo",
    "LocalOptimStateDictConfig",
    "LocalStateDictConfig",
    "MixedPrecision",
    "MixedPrecisionPolicy",
    "ModuleWrapPolicy",
    "OffloadPolicy",
    "OptimStateDictConfig",
    "OptimStateKeyType",
    "OptimizerOffloadPolicy",
    "OrderError",
    "ReduceScatter",
    "ShardPlacementResult",
    "ShardedOptimStateDictConfig",
    "ShardedStateDictConfig",
    "ShardingStrategy",
    "StateDictConfig",
    "StateDictSettings",
    "StateDictType",
    "UnshardError",
    "UnshardHandle",
    "capture",
    "checkpoint",
    "disable_fsdp_module_new_init",
    "fully_shard",
    "get_cls_to_fsdp_cls",
    "inference",
    "optim",
    "register_fsdp_forward_method",
    "share_comm_ctx",
    "step",
    "sync_module_states",
    "tools",
    "wrap",
]

if os.environ.get("UNSHARD_EXPLAIN_HANGS"):
    from .tools.hangs import explain_hangs_from_environment

    explain_hangs_from_environment()
