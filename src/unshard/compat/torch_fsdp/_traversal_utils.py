"""`torch.distributed.fsdp._traversal_utils`."""

from ...frontends.traversal import _get_fsdp_handles, _get_fsdp_states, _get_fsdp_states_with_modules

__all__ = ["_get_fsdp_handles", "_get_fsdp_states", "_get_fsdp_states_with_modules"]
