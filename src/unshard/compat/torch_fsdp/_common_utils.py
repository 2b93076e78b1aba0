"""`torch.distributed.fsdp._common_utils`."""

from ...frontends.wrapper import FLAT_PARAM, FSDP_WRAPPED_MODULE
from ...frontends.wrapper_names import clean_tensor_name
from ...frontends.wrapper_state import TrainingState

FSDP_PREFIX = f"{FSDP_WRAPPED_MODULE}."

__all__ = ["FLAT_PARAM", "FSDP_PREFIX", "FSDP_WRAPPED_MODULE", "TrainingState", "clean_tensor_name"]
