"""Our names for `torch.distributed.fsdp._fully_shard`, in `__all__`, and for the modules inside it.

Not in the file of `torch.distributed.fsdp`: PyTorch's FSDP1 and FSDP2 give some names, such as
`_get_module_fsdp_state`, to different objects.
"""

import torch.distributed as dist

from ...comm.user_collectives import AllGather, Comm, ReduceScatter
from ...engine.api import UnshardHandle
from ...engine.api import state_of as _get_module_fsdp_state
from ...fsdp2.fully_shard import fully_shard
from ...fsdp2.meshes import (
    DataParallelMeshDims,
    DataParallelMeshInfo,
    DDPMeshInfo,
    FSDPMeshInfo,
    HSDPMeshInfo,
    resolve_mesh_info,
)
from ...fsdp2.module import (
    FSDPModule,
    disable_fsdp_module_new_init,
    get_cls_to_fsdp_cls,
    register_fsdp_forward_method,
    share_comm_ctx,
)
from ...fsdp2.placements import ShardPlacementResult
from ...policies import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy

__all__ = [
    "CPUOffloadPolicy",
    "DataParallelMeshDims",
    "FSDPModule",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "UnshardHandle",
    "fully_shard",
    "register_fsdp_forward_method",
    "share_comm_ctx",
]


def _get_mesh_info(mesh: dist.DeviceMesh, dp_mesh_dims: DataParallelMeshDims | None = None) -> DataParallelMeshInfo:
    return resolve_mesh_info(mesh, dp_mesh_dims)
