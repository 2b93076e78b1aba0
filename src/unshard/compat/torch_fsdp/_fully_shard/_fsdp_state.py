"""`torch.distributed.fsdp._fully_shard._fsdp_state`."""

from ....engine.hooks import state_of as _get_module_fsdp_state

__all__ = ["_get_module_fsdp_state"]
