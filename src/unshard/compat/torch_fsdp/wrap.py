"""`torch.distributed.fsdp.wrap`."""

from ...frontends import wrap as policies
from ...frontends.wrap import *
from ...frontends.wrap import _module_wrap_policy
from . import _wrap_utils
from ._wrap_utils import *

__all__ = ["_module_wrap_policy"]
__all__ += policies.__all__
__all__ += _wrap_utils.__all__
