"""The flat parameter of a unit, and the placeholders that modules hold instead of the original parameters."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ...errors import StateError
from ...torch_private import no_transforms
from ..forward_tensors import tensors_in
from .param import ManagedParam, ParamLocation, ParamSwap


class PlaceholderParam(torch.Tensor):
    """Has the shape, dtype and device of a sharded parameter; computing with it raises a helpful error.

    Modules cannot hold the emptied unsharded parameter instead, because reading that ends the process. Code that reads
    the memory of a placeholder without calling torch finds NaN.
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
        """Return 0, because recurrent layers would move weights that have an address into one allocation."""
        return 0

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"PlaceholderParam(shape={tuple(self.shape)}, dtype={self.dtype}, device='{self.device}')"


# Allowed functions; properties are read with `__get__`.
_ALLOWED = {
    *("__get__", "__set__", "__delete__", "__len__", "size", "dim", "ndimension", "numel", "nelement", "stride"),
    *("storage_offset", "element_size", "is_floating_point", "is_complex", "is_signed", "is_contiguous", "is_pinned"),
    *("is_shared", "is_inference", "get_device", "untyped_storage", "detach", "requires_grad_"),
}


def placeholder_for(param: ManagedParam, dtype: torch.dtype, device: torch.device) -> PlaceholderParam:
    scalar = torch.zeros((), dtype=dtype, device=device)
    numbers = (scalar.fill_(torch.nan) if dtype.is_floating_point else scalar).expand(param.sharding.shape)
    placeholder = numbers.as_subclass(PlaceholderParam)
    placeholder._param = weakref.ref(param)  # weak: the param refers to the dict that holds the placeholder
    return placeholder


@dataclass(eq=False)
class FlatParam:
    """All parameters of a unit as one 1-D parameter: this rank's shard at rest, all elements while the unit computes.

    Registered on a module instead of the original parameters, or nowhere with `use_orig_params`.
    """

    locations: list[ParamLocation]
    sharded: nn.Parameter
    local: torch.Tensor
    length: int
    """Number of elements, without padding at the end."""
    name: str = "_flat_param"
    unsharded: torch.Tensor | None = None
    padded: torch.Tensor | None = None
    """The unsharded buffer, from the first all-gather on, without and with padding at the end."""
    _of: Any = None
    _shows_unsharded: bool = False
    _assigned: torch.Tensor | None = None
    """A tensor that a program assigned to `sharded.data`; the next forward adopts it."""

    def show_unsharded(self, view: torch.Tensor) -> None:
        """Show the unsharded buffer, which holds memory now; `view` is the place of any parameter in it."""
        if self._of is not view:
            with torch.no_grad(), torch.inference_mode(False), no_transforms():
                storage, empty = view.untyped_storage(), torch.empty(0, dtype=view.dtype, device=view.device)
                self.padded = empty.set_(storage, 0, (storage.nbytes() // view.dtype.itemsize,), (1,))
                self.unsharded = torch.empty_like(empty[:0]).set_(storage, 0, (self.length,), (1,))
            self._of = view
        assert self.unsharded is not None
        if not self._shows_unsharded and self.sharded.data_ptr() != self.local.data_ptr():
            # Assigned between forward and backward; this backward needs the values of its forward.
            self._assigned = self.sharded.data
        self.sharded.data = self.unsharded
        self._shows_unsharded = True

    def show_sharded(self) -> None:
        if self._shows_unsharded:
            self.sharded.data = self.local if self._assigned is None else self._assigned
            self._shows_unsharded, self._assigned = False, None


class FlatParamSwap(ParamSwap):
    """Also lets the flat parameter show the unsharded buffer.

    `placeholders`: what modules hold at rest instead of their parameters, if anything.
    """

    def __init__(self, params: Iterable[ManagedParam], flat: Any, placeholders: Mapping[ManagedParam, torch.Tensor]):
        self._placeholders = placeholders
        super().__init__(params)
        self._flat = flat
        self._first_param = next((param for param in self._params if param.sharding.numel), None)

    def refresh(self) -> None:
        super().refresh()
        if self._placeholders:
            self._sharded_values = [self._placeholders[param] for param in self._plain]

    def _at_rest_of(self, param: ManagedParam) -> Any:
        return self._placeholders.get(param, param.sharded)

    def show_unsharded(self, follow_requires_grad: bool = False) -> None:
        super().show_unsharded(follow_requires_grad)
        if self._first_param is not None and self._first_param.unsharded_view is not None:
            self._flat.show_unsharded(self._first_param.unsharded_view)

    def show_sharded(self) -> None:
        super().show_sharded()
        self._flat.show_sharded()
