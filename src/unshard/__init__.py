"""Trains PyTorch models that do not fit one device: parameters, gradients and optimizer state cut over the ranks."""

from . import optim, tools
from .comm.plugin import AllGather, Comm, ReduceScatter
from .errors import OrderError, UnshardError
from .frontends.flat_parameter import FlatParameter
from .frontends.fully_shard import fully_shard
from .frontends.meshes import DataParallelMeshDims, DDPMeshInfo, FSDPMeshInfo, HSDPMeshInfo
from .frontends.module import (
    FSDPModule,
    UnshardHandle,
    disable_fsdp_module_new_init,
    get_cls_to_fsdp_cls,
    register_fsdp_forward_method,
    share_comm_ctx,
)
from .frontends.placements import ShardPlacementResult
from .frontends.wrap import CustomPolicy, ModuleWrapPolicy
from .frontends.wrapper import FullyShardedDataParallel
from .frontends.wrapper_api import (
    BackwardPrefetch,
    CPUOffload,
    FullOptimStateDictConfig,
    FullStateDictConfig,
    LocalOptimStateDictConfig,
    LocalStateDictConfig,
    MixedPrecision,
    OptimStateDictConfig,
    OptimStateKeyType,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    ShardingStrategy,
    StateDictConfig,
    StateDictSettings,
    StateDictType,
)
from .policies import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, OptimizerOffloadPolicy

__all__ = [
    "AllGather",
    "BackwardPrefetch",
    "CPUOffload",
    "CPUOffloadPolicy",
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
    "disable_fsdp_module_new_init",
    "fully_shard",
    "get_cls_to_fsdp_cls",
    "optim",
    "register_fsdp_forward_method",
    "share_comm_ctx",
    "tools",
]

__version__ = "0.1.0"
