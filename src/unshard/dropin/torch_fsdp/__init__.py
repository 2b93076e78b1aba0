"""Our names for `torch.distributed.fsdp`, and for the modules inside it that have no file in this folder.

`torch.distributed.fsdp` itself gets only the names in `__all__`.
"""

from ...errors import UnsupportedError
from ...fsdp1 import api as wrapper_api
from ...fsdp1.api import *
from ...fsdp1.groups import HYBRID_SHARDING_STRATEGIES, NO_RESHARD_AFTER_FORWARD_STRATEGIES
from ...fsdp1.optim_load import OptimStateKeyType
from ...fsdp1.state import (
    FLAT_PARAM,
    FlatParameter,
    ParamInfo,
    SharedParamInfo,
    TrainingState,
    _get_fsdp_handles,
    _get_fsdp_states,
    _get_fsdp_states_with_modules,
    _get_module_fsdp_state,
)
from ...fsdp1.state import _get_module_fsdp_state as _get_module_fsdp_state_if_fully_sharded_module
from ...fsdp1.wrapper import FSDP_WRAPPED_MODULE, FullyShardedDataParallel
from ...names import FSDP_PREFIX, clean_tensor_name
from ...optim import ShardedGradScaler
from . import _fully_shard
from ._fully_shard import *
from .wrap import (
    CustomPolicy,
    ModuleWrapPolicy,
    _construct_wrap_fn,
    _or_policy,
    _Policy,
    _post_order_apply,
    _recursive_wrap,
    _wrap_module_cls_individually,
)

__all__ = ["FlatParameter", "FullyShardedDataParallel", "OptimStateKeyType"]
__all__ += _fully_shard.__all__
__all__ += wrapper_api.__all__


def _set_fsdp_extensions(flattener: object) -> None:
    """Accept PyTorch's DTensor extension, because unshard does not need it. Raise for any other extension."""
    if type(flattener).__name__ not in ("DTensorExtensions", "NoneType"):
        raise UnsupportedError(
            f"unshard shards tensor-parallel parameters without an FSDPExtensions object and would not call this "
            f"{type(flattener).__name__}. Run without the drop-in to set PyTorch's own."
        )
