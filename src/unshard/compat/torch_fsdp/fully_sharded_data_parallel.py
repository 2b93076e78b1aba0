"""`torch.distributed.fsdp.fully_sharded_data_parallel`."""

from ...frontends.optim_legacy import OptimStateKeyType
from ...frontends.wrapper import FLAT_PARAM, FSDP_WRAPPED_MODULE, FullyShardedDataParallel
from ...frontends.wrapper_state import TrainingState
from . import api
from ._common_utils import FSDP_PREFIX
from ._flat_param import FlatParameter
from ._init_utils import HYBRID_SHARDING_STRATEGIES
from .api import *
from .wrap import CustomPolicy, ModuleWrapPolicy

__all__ = [
    "FLAT_PARAM",
    "FSDP_PREFIX",
    "FSDP_WRAPPED_MODULE",
    "HYBRID_SHARDING_STRATEGIES",
    "CustomPolicy",
    "FlatParameter",
    "FullyShardedDataParallel",
    "ModuleWrapPolicy",
    "OptimStateKeyType",
    "TrainingState",
]
__all__ += api.__all__
