"""`torch.distributed.fsdp.wrap`."""

from ...frontends.auto_wrap import _construct_wrap_fn, _post_order_apply, _recursive_wrap
from ...frontends.wrap import (
    CustomPolicy,
    ModuleWrapPolicy,
    _module_wrap_policy,
    _or_policy,
    _Policy,
    _wrap_module_cls_individually,
    always_wrap_policy,
    enable_wrap,
    lambda_auto_wrap_policy,
    size_based_auto_wrap_policy,
    transformer_auto_wrap_policy,
    wrap,
)

__all__ = [
    "CustomPolicy",
    "ModuleWrapPolicy",
    "_Policy",
    "_construct_wrap_fn",
    "_module_wrap_policy",
    "_or_policy",
    "_post_order_apply",
    "_recursive_wrap",
    "_wrap_module_cls_individually",
    "always_wrap_policy",
    "enable_wrap",
    "lambda_auto_wrap_policy",
    "size_based_auto_wrap_policy",
    "transformer_auto_wrap_policy",
    "wrap",
]
