"""`MixedPrecision` of the wrapper as the engine sees it."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch

from ..policies import MixedPrecisionPolicy
from .wrapper_api import MixedPrecision


@dataclass(frozen=True)
class WrapperPolicy(MixedPrecisionPolicy):
    """A policy whose doors and gradients follow the wrapper's rules. Buffers are cast elsewhere, for good."""

    cast_root_inputs: bool = True
    keep_low_gradients: bool = False
    cut: bool = True
    """Whether parameters are cut over ranks."""

    def dtype_of_gradients(self, original: torch.dtype, compute: torch.dtype, reduce: torch.dtype) -> torch.dtype:
        if not self.keep_low_gradients:
            return original
        return compute if self.cut else reduce

    def dtype_of_sums(self, compute: torch.dtype, reduce: torch.dtype) -> torch.dtype:
        return compute

    def dtype_of_stored_reduction(self, original: torch.dtype, reduce: torch.dtype) -> torch.dtype:
        return original

    def casts_inputs(self, root: bool, empty: bool) -> bool:
        return (root and self.cast_root_inputs) or (self.cast_forward_inputs and not empty)


@dataclass(frozen=True)
class CallPolicy(WrapperPolicy):
    """The legacy call: every module it was applied to casts as a root does."""

    def casts_inputs(self, root: bool, empty: bool) -> bool:
        return super().casts_inputs(True, empty)


def policy_for(given: MixedPrecision, cut: bool, kind: type[WrapperPolicy] = WrapperPolicy) -> WrapperPolicy:
    return kind(
        param_dtype=given.param_dtype,
        reduce_dtype=given.reduce_dtype,
        cast_forward_inputs=given.cast_forward_inputs,
        full_precision_in_eval=os.environ.get("FSDP_USE_FULL_PREC_IN_EVAL", "") == "1",
        cast_root_inputs=given.cast_root_forward_inputs,
        keep_low_gradients=given.keep_low_precision_grads,
        cut=cut,
    )
