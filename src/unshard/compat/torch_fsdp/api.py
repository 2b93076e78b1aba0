"""`torch.distributed.fsdp.api`."""

from ...frontends.wrapper_api import *
from ...frontends.wrapper_api import __all__ as __all__
