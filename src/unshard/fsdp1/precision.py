"""`MixedPrecision` as the engine's policy, and the buffers that it casts."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import nn

from ..policies import MixedPrecisionPolicy
from ..torch_private import own_buffers
from .api import MixedPrecision


@dataclass(frozen=True)
class WrapperPolicy(MixedPrecisionPolicy):
    """The policy of a wrapped module: FSDP1 casts inputs and keeps gradients by other rules than FSDP2.

    It does not cast buffers, `CastBuffers` does.
    """

    cast_root_forward_inputs: bool = True
    keep_low_precision_grads: bool = False
    shards_params: bool = True

    def dtype_of_gradients(self, original: torch.dtype, compute: torch.dtype, reduce: torch.dtype) -> torch.dtype:
        if not self.keep_low_precision_grads:
            return original
        return compute if self.shards_params else reduce

    def dtype_of_sums(self, compute: torch.dtype, reduce: torch.dtype) -> torch.dtype:
        return compute

    def dtype_of_stored_reduction(self, original: torch.dtype, reduce: torch.dtype) -> torch.dtype:
        return original

    def casts_inputs(self, root: bool, empty: bool) -> bool:
        return (root and self.cast_root_forward_inputs) or (self.cast_forward_inputs and not empty)


@dataclass(frozen=True)
class ComposablePolicy(WrapperPolicy):
    """The policy of the legacy call: every module that it is applied to casts inputs as a root does."""

    def casts_inputs(self, root: bool, empty: bool) -> bool:
        return super().casts_inputs(True, empty)


def policy_for(
    given: MixedPrecision, shards_params: bool, policy_class: type[WrapperPolicy] = WrapperPolicy
) -> WrapperPolicy:
    return policy_class(
        param_dtype=given.param_dtype,
        reduce_dtype=given.reduce_dtype,
        cast_forward_inputs=given.cast_forward_inputs,
        full_precision_in_eval=os.environ.get("FSDP_USE_FULL_PREC_IN_EVAL", "") == "1",
        cast_root_forward_inputs=given.cast_root_forward_inputs,
        keep_low_precision_grads=given.keep_low_precision_grads,
        shards_params=shards_params,
    )


class CastBuffers:
    """The floating-point buffers of a unit's modules, and the dtypes that they had when the module was wrapped.

    The root's first forward casts them to `dtype`, and they stay in it.
    """

    def __init__(self, modules: Iterable[nn.Module], dtype: torch.dtype | None):
        self.dtype = dtype
        self._buffers = [
            (own_buffers(module), name, buffer.dtype)
            for module in modules
            for name, buffer in own_buffers(module).items()
            if buffer is not None and buffer.is_floating_point()
        ]

    def cast(self) -> None:
        """Cast to `dtype`, unless it is None."""
        if self.dtype is not None:
            for buffers, name, _ in self._buffers:
                _cast(buffers, name, self.dtype)

    def restore(self) -> None:
        """Cast back to the original dtypes."""
        if self.dtype is not None:
            for buffers, name, original in self._buffers:
                _cast(buffers, name, original)

    def original_dtypes(self) -> dict[int, torch.dtype]:
        """The original dtype of each buffer that is registered now, by the buffer's id."""
        found = ((buffers.get(name), original) for buffers, name, original in self._buffers)
        return {id(buffer): original for buffer, original in found if buffer is not None}


def _cast(buffers: dict[str, torch.Tensor | None], name: str, dtype: torch.dtype) -> None:
    buffer = buffers.get(name)
    if buffer is not None and buffer.dtype != dtype and buffer.is_floating_point():
        with torch.no_grad():
            buffers[name] = buffer.to(dtype)
