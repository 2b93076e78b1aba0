"""`torch.distributed.fsdp._fully_shard._fsdp_common`."""

from ....frontends.meshes import DataParallelMeshInfo, DDPMeshInfo, FSDPMeshInfo, HSDPMeshInfo
from ....frontends.placements import ShardPlacementResult

__all__ = ["DDPMeshInfo", "DataParallelMeshInfo", "FSDPMeshInfo", "HSDPMeshInfo", "ShardPlacementResult"]
