"""Which dtype a parameter is stored, computed, sent and reduced in; casts of inputs and outputs of a unit."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial
from typing import Any

import torch

from ..policies import MixedPrecisionPolicy
from .nested_tensors import map_tensors


class Precision(Enum):
    """What a unit computes in."""

    POLICY = "the dtypes of the policy"
    STORED = "the dtypes that the parameters are stored in"


@dataclass(frozen=True)
class Dtypes:
    """The dtypes of one parameter on its way; parameters that share all of them form a segment."""

    original: torch.dtype
    compute: torch.dtype
    reduce: torch.dtype
    wire: torch.dtype
    """What gradients travel in; nearly always what they are reduced in."""
    gradient: torch.dtype
    """What `.grad` is in at rest; nearly always the original dtype."""
    kept: torch.dtype
    """What gradients are summed up in that are not synchronised."""
    reduce_stored: torch.dtype
    """What gradients are reduced in where the unit computes in the original dtype although the policy says another."""

    @property
    def stored(self) -> Dtypes:
        """The dtypes if the unit computes in the original dtype (`Precision.STORED`)."""
        wire = self.wire if self.reduce == self.reduce_stored else self.reduce_stored
        return replace(self, compute=self.original, reduce=self.reduce_stored, wire=wire)


def sent_dtype(dtype: torch.dtype) -> torch.dtype:
    """What numbers of a dtype are sent as: backends know no complex numbers, so these are sent as pairs of reals."""
    return dtype.to_real()


def dtypes_for(original: torch.dtype, policy: MixedPrecisionPolicy) -> Dtypes:
    if not original.is_floating_point:  # no policy names a complex dtype
        return Dtypes(*[original] * 7)
    compute = policy.param_dtype or original
    # A reduce dtype equal to param_dtype means "as the gradient comes", whatever the model was converted to.
    explicit = policy.reduce_dtype if policy.reduce_dtype != policy.param_dtype else None
    reduce = explicit or compute
    wire = policy.wire_dtype or reduce
    wire = wire if wire.itemsize <= reduce.itemsize else reduce
    gradient = policy.dtype_of_gradients(original, compute, reduce)
    kept, stored = policy.dtype_of_sums(compute, reduce), policy.dtype_of_stored_reduction(original, reduce)
    return Dtypes(original, compute, reduce, wire, gradient, kept, stored)


class Segments:
    """The sets of dtypes in a unit, and which one each parameter has."""

    def __init__(self, originals: list[torch.dtype], policies: Sequence[MixedPrecisionPolicy]):
        each = [dtypes_for(original, policy) for original, policy in zip(originals, policies, strict=True)]
        self.kinds: list[Dtypes] = list(dict.fromkeys(each))
        self.of: list[int] = [self.kinds.index(dtypes) for dtypes in each]
        self.originals = originals

    def dtypes(self, index: int) -> Dtypes:
        return self.kinds[self.of[index]]

    def itemsizes(self, role: str) -> list[int]:
        """Bytes per element of each segment in a role: "original", "compute", "reduce", and so on."""
        return [getattr(kind, role).itemsize for kind in self.kinds]

    def stored(self) -> Segments:
        """The same segments where nothing is cast on the way to the modules."""
        same = copy.copy(self)
        same.kinds = [kind.stored for kind in self.kinds]
        return same

    @property
    def reduces_stored_alike(self) -> bool:
        """Whether gradients are reduced in the same dtypes where nothing is cast on the way to the modules."""
        return all(kind.reduce == kind.reduce_stored for kind in self.kinds)


def _cast(dtype: torch.dtype, tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() and tensor.dtype != dtype else tensor


def cast_inputs(args: tuple[Any, ...], kwargs: dict[str, Any], dtype: torch.dtype | None) -> tuple[Any, Any]:
    """The same for the arguments of a forward, nearly always one tensor that has the dtype already."""
    if dtype is None:
        return args, kwargs
    if not kwargs and len(args) == 1 and isinstance(args[0], torch.Tensor):
        only = args[0]
        return (args if only.dtype == dtype or not only.is_floating_point() else (only.to(dtype),)), kwargs
    return map_tensors(partial(_cast, dtype), (args, kwargs))


def cast_floats(value: Any, dtype: torch.dtype | None) -> Any:
    """Floating-point tensors in `value` cast to `dtype`; differentiable."""
    return value if dtype is None else map_tensors(partial(_cast, dtype), value)
