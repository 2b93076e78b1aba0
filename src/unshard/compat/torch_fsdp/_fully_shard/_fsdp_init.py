"""`torch.distributed.fsdp._fully_shard._fsdp_init`."""

from torch.distributed.device_mesh import DeviceMesh

from ....frontends.meshes import DataParallelMeshDims, DataParallelMeshInfo, resolve

__all__ = ["_get_mesh_info"]


def _get_mesh_info(mesh: DeviceMesh, dp_mesh_dims: DataParallelMeshDims | None = None) -> DataParallelMeshInfo:
    return resolve(mesh, dp_mesh_dims)
