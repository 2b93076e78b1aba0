"""What a module holds in the place of a parameter that is a piece of a flat one, while the unit is sharded."""

from __future__ import annotations

import weakref
from typing import Any

import torch

from ...errors import StateError
from ..nested_tensors import tensors_in
from .param import ManagedParam


class PlaceholderParam(torch.Tensor):
    """Shape, dtype and device of the parameter. Computing with it raises an error that says what to do.

    The emptied unsharded parameter would do, but reading it ends the process. Where no function of torch is called, its
    numbers are NaN.
    """

    _param: weakref.ref[ManagedParam]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        placeholder = next((each for each in tensors_in((args, kwargs)) if isinstance(each, PlaceholderParam)), None)
        if getattr(func, "__name__", "") not in _ALLOWED:
            param = None if placeholder is None else placeholder._param()
            name = "" if param is None else f" {param.name!r}"
            raise StateError(
                f"Parameter{name} is sharded; it is unsharded only while its wrapped module computes. Call the module "
                "that FullyShardedDataParallel returned, model(x) instead of model.module(x), or whatever uses it "
                "inside FullyShardedDataParallel.summon_full_params(model)."
            )
        result = super().__torch_function__(func, types, args, kwargs or {})
        if placeholder is not None and isinstance(result, PlaceholderParam):
            result._param = placeholder._param
        return result

    def data_ptr(self) -> int:
        """Nowhere. Recurrent layers move weights with addresses into one chunk."""
        return 0

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"PlaceholderParam(shape={tuple(self.shape)}, dtype={self.dtype}, device='{self.device}')"


# What may be asked of a placeholder; properties are read by `__get__`.
_ALLOWED = {
    *("__get__", "__set__", "__delete__", "__len__", "size", "dim", "ndimension", "numel", "nelement", "stride"),
    *("storage_offset", "element_size", "is_floating_point", "is_complex", "is_signed", "is_contiguous", "is_pinned"),
    *("is_shared", "is_inference", "get_device", "untyped_storage", "detach", "requires_grad_"),
}


def placeholder_for(param: ManagedParam, dtype: torch.dtype, device: torch.device) -> PlaceholderParam:
    scalar = torch.zeros((), dtype=dtype, device=device)
    numbers = (scalar.fill_(torch.nan) if dtype.is_floating_point else scalar).expand(param.sharding.shape)
    placeholder = numbers.as_subclass(PlaceholderParam)
    placeholder._param = weakref.ref(param)  # weak: the param knows the module that holds the placeholder
    return placeholder
