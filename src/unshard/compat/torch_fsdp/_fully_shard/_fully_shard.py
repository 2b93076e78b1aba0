"""`torch.distributed.fsdp._fully_shard._fully_shard`."""

from ....frontends.fully_shard import fully_shard
from ....frontends.module import (
    FSDPModule,
    UnshardHandle,
    disable_fsdp_module_new_init,
    get_cls_to_fsdp_cls,
    register_fsdp_forward_method,
    share_comm_ctx,
)
from ._fsdp_api import AllGather, DataParallelMeshDims, MixedPrecisionPolicy, OffloadPolicy, ReduceScatter
from ._fsdp_common import FSDPMeshInfo
from ._fsdp_init import _get_mesh_info
from ._fsdp_state import _get_module_fsdp_state

__all__ = [
    "AllGather",
    "DataParallelMeshDims",
    "FSDPMeshInfo",
    "FSDPModule",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "ReduceScatter",
    "UnshardHandle",
    "_get_mesh_info",
    "_get_module_fsdp_state",
    "disable_fsdp_module_new_init",
    "fully_shard",
    "get_cls_to_fsdp_cls",
    "register_fsdp_forward_method",
    "share_comm_ctx",
]
