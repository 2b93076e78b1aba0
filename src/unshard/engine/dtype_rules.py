"""The dtypes in which parameters are stored, computed with, sent and reduced."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum

import torch

from ..policies import MixedPrecisionPolicy


class Precision(Enum):
    """The dtypes that a unit computes in."""

    POLICY = "the dtypes of the policy"
    STORED = "the dtypes that the parameters are stored in"


@dataclass(frozen=True)
class Dtypes:
    """The dtypes of one parameter and its gradient. Parameters that share all of them form a segment."""

    original: torch.dtype
    compute: torch.dtype
    reduce: torch.dtype
    wire: torch.dtype
    """Gradients are sent in this dtype, nearly always `reduce`."""
    gradient: torch.dtype
    """The dtype of `.grad` at rest, nearly always `original`."""
    kept: torch.dtype
    """The dtype in which gradients are accumulated without synchronisation."""
    reduce_stored: torch.dtype
    """The dtype in which gradients are reduced if the unit computes in the original dtype, not the policy's."""

    @property
    def stored(self) -> Dtypes:
        """The dtypes if the unit computes in the original dtype (`Precision.STORED`)."""
        wire = self.wire if self.reduce == self.reduce_stored else self.reduce_stored
        return replace(self, compute=self.original, reduce=self.reduce_stored, wire=wire)


def sent_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which tensors are sent: backends do not support complex numbers, which become pairs of reals."""
    return dtype.to_real()


def dtypes_for(original: torch.dtype, policy: MixedPrecisionPolicy) -> Dtypes:
    if not original.is_floating_point:  # no policy names a complex dtype
        return Dtypes(*[original] * 7)
    compute = policy.param_dtype or original
    # A reduce_dtype equal to param_dtype means the gradient's own dtype, even if the model was converted.
    explicit = policy.reduce_dtype if policy.reduce_dtype != policy.param_dtype else None
    reduce = explicit or compute
    wire = policy.wire_dtype or reduce
    wire = wire if wire.itemsize <= reduce.itemsize else reduce
    gradient = policy.dtype_of_gradients(original, compute, reduce)
    kept, stored = policy.dtype_of_sums(compute, reduce), policy.dtype_of_stored_reduction(original, reduce)
    return Dtypes(original, compute, reduce, wire, gradient, kept, stored)


class Segments:
    """The sets of dtypes in a unit (`kinds`), and the index of the one that each parameter has (`of`)."""

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
        """The same segments for all-gathers in the stored dtypes."""
        same = copy.copy(self)
        same.kinds = [kind.stored for kind in self.kinds]
        return same

    @property
    def reduces_stored_alike(self) -> bool:
        """True if gradients are reduced in the same dtypes after a forward in the stored dtypes."""
        return all(kind.reduce == kind.reduce_stored for kind in self.kinds)
