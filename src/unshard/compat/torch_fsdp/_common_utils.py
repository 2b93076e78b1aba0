"""`torch.distributed.fsdp._common_utils`."""

from ...engine.hooks import WRAPPED as FSDP_PREFIX
from ...frontends.traversal import _get_module_fsdp_state
from ...frontends.traversal import _get_module_fsdp_state as _get_module_fsdp_state_if_fully_sharded_module
from ...frontends.wrapper import FSDP_WRAPPED_MODULE
from ...frontends.wrapper_names import clean_tensor_name
from ...frontends.wrapper_state import TrainingState

__all__ = [
    "FSDP_PREFIX",
    "FSDP_WRAPPED_MODULE",
    "TrainingState",
    "_get_module_fsdp_state",
    "_get_module_fsdp_state_if_fully_sharded_module",
    "clean_tensor_name",
]
