"""`torch.distributed.fsdp`."""

from . import _fully_shard, api
from ._flat_param import FlatParameter
from ._fully_shard import *
from .api import *
from .fully_sharded_data_parallel import FullyShardedDataParallel, OptimStateKeyType

__all__ = [
    "FlatParameter",
    "FullyShardedDataParallel",
    "OptimStateKeyType",
]
__all__ += _fully_shard.__all__
__all__ += api.__all__
