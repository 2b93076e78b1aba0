"""`torch.distributed.fsdp._wrap_utils`."""

from ...frontends.auto_wrap import _construct_wrap_fn, _post_order_apply, _recursive_wrap
from ...frontends.wrap import _or_policy, _Policy, _wrap_module_cls_individually

__all__ = [
    "_Policy",
    "_construct_wrap_fn",
    "_or_policy",
    "_post_order_apply",
    "_recursive_wrap",
    "_wrap_module_cls_individually",
]
