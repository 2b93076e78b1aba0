"""Our names for `torch.distributed.fsdp._fully_shard` and for the modules inside it.

The package itself and its former location, `torch.distributed._composable.fsdp`, get only the names in `__all__`.

This file is separate because PyTorch's FSDP1 and FSDP2 use some names, such as `_get_module_fsdp_state`, for different
objects.
"""

from typing import Any, NoReturn

import torch.distributed as dist

from ...comm.interface import AllGather, Comm, ReduceScatter
from ...engine.api import FSDPState, UnshardHandle
from ...engine.api import state_of as _get_module_fsdp_state
from ...errors import UnsupportedError
from ...fsdp2.fully_shard import fully_shard, register_fsdp_forward_method, share_comm_ctx
from ...fsdp2.module import FSDPModule, GradientReductionHandle, disable_fsdp_module_new_init, get_cls_to_fsdp_cls
from ...fsdp2.placements import (
    DataParallelMeshDims,
    DataParallelMeshInfo,
    DDPMeshInfo,
    FSDPMeshInfo,
    HSDPMeshInfo,
    ShardPlacementResult,
    resolve_mesh_info,
)
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


class _NameOnly(type):
    """A metaclass of types that exist only for `isinstance` and annotations. unshard creates no instances of them."""

    def __call__(cls, *args: Any, **kwargs: Any) -> NoReturn:
        raise UnsupportedError(
            f"{cls.__name__} cannot be created: unshard replaces torch.distributed.fsdp and has only the name."
        )

    def __setattr__(cls, name: str, value: Any) -> None:
        raise UnsupportedError(
            f"{cls.__name__}.{name} cannot be assigned: unshard replaces torch.distributed.fsdp and does not use this "
            "class, so the assignment would have no effect."
        )


class FSDPParamGroup(metaclass=_NameOnly):
    def use_training_state(self) -> None:
        """Do nothing. torch.compile accesses this method to compare it with functions that it traces."""


FSDPParam = _NameOnly("FSDPParam", (), {})
FSDPStateContext = _NameOnly("FSDPStateContext", (), {})
FSDPCommContext = _NameOnly("FSDPCommContext", (), {})
RegisterPostBackwardFunction = _NameOnly("RegisterPostBackwardFunction", (), {})
