"""Trains PyTorch models that do not fit one device: parameters, gradients and optimizer state cut over the ranks."""

from . import optim, tools, wrap
from .comm.plugin import AllGather, Comm, ReduceScatter
from .errors import OrderError, UnshardError
from .frontends import wrapper_api as _wrapper_api
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
from .frontends.optim_legacy import OptimStateKeyType
from .frontends.placements import ShardPlacementResult
from .frontends.wrap import CustomPolicy, ModuleWrapPolicy
from .frontends.wrapper import FullyShardedDataParallel
from .frontends.wrapper_api import *
from .policies import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, OptimizerOffloadPolicy

__all__ = [
    "AllGather",
    "CPUOffloadPolicy",
    "Comm",
    "CustomPolicy",
    "DDPMeshInfo",
    "DataParallelMeshDims",
    "FSDPMeshInfo",
    "FSDPModule",
    "FlatParameter",
    "FullyShardedDataParallel",
    "HSDPMeshInfo",
    "MixedPrecisionPolicy",
    "ModuleWrapPolicy",
    "OffloadPolicy",
    "OptimStateKeyType",
    "OptimizerOffloadPolicy",
    "OrderError",
    "ReduceScatter",
    "ShardPlacementResult",
    "UnshardError",
    "UnshardHandle",
    "disable_fsdp_module_new_init",
    "fully_shard",
    "get_cls_to_fsdp_cls",
    "optim",
    "register_fsdp_forward_method",
    "share_comm_ctx",
    "tools",
    "wrap",
]
__all__ += _wrapper_api.__all__

__version__ = "0.1.0"
