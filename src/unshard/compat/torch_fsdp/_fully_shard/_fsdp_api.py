"""`torch.distributed.fsdp._fully_shard._fsdp_api`."""

from ....comm.plugin import AllGather, Comm, ReduceScatter
from ....frontends.meshes import DataParallelMeshDims
from ....policies import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy

__all__ = [
    "AllGather",
    "CPUOffloadPolicy",
    "Comm",
    "DataParallelMeshDims",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "ReduceScatter",
]
