"""Our names for `torch.distributed.fsdp.wrap`. This file is separate because that module has a function `wrap`."""

from ... import wrap as policies
from ...fsdp1.auto_wrap import _construct_wrap_fn, _post_order_apply, _recursive_wrap
from ...wrap import *
from ...wrap import _module_wrap_policy, _or_policy, _Policy, _wrap_module_cls_individually

__all__ = [
    "_Policy",
    "_construct_wrap_fn",
    "_module_wrap_policy",
    "_or_policy",
    "_post_order_apply",
    "_recursive_wrap",
    "_wrap_module_cls_individually",
]
__all__ += policies.__all__
