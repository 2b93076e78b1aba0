"""`torch.distributed.fsdp._flat_param`."""

from ...frontends.flat_parameter import FlatParameter, ParamInfo, SharedParamInfo

__all__ = ["FlatParameter", "ParamInfo", "SharedParamInfo"]
