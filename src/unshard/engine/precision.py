"""Which dtype a parameter is stored, computed and reduced in, and the casts at the borders of a unit."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from ..policies import MixedPrecisionPolicy
from .tree import map_tensors

# Reduced by averaging in the collective; any other dtype could overflow in the sum, so it is scaled by hand.
AVERAGED = frozenset((torch.float32, torch.bfloat16))


@dataclass(frozen=True)
class Dtypes:
    """The dtypes of one parameter on its way; parameters that share all three form a segment."""

    original: torch.dtype
    compute: torch.dtype
    reduce: torch.dtype


def dtypes_for(original: torch.dtype, policy: MixedPrecisionPolicy) -> Dtypes:
    if not original.is_floating_point:
        return Dtypes(original, original, original)
    compute = policy.param_dtype or original
    # A reduce dtype equal to param_dtype means "as the gradient comes", whatever the model was converted to.
    explicit = policy.reduce_dtype if policy.reduce_dtype != policy.param_dtype else None
    return Dtypes(original, compute, explicit or compute)


class Segments:
    """The sets of dtypes in a unit, and which one each parameter has."""

    def __init__(self, originals: list[torch.dtype], policy: MixedPrecisionPolicy):
        each = [dtypes_for(original, policy) for original in originals]
        self.kinds: list[Dtypes] = list(dict.fromkeys(each))
        self.of: list[int] = [self.kinds.index(dtypes) for dtypes in each]
        self.originals = originals

    def dtypes(self, index: int) -> Dtypes:
        return self.kinds[self.of[index]]

    def itemsizes(self, role: str) -> list[int]:
        """Bytes per element of each segment in the role "original", "compute" or "reduce"."""
        return [getattr(kind, role).itemsize for kind in self.kinds]


def _cast(dtype: torch.dtype, tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() and tensor.dtype != dtype else tensor


def cast_floats(value: Any, dtype: torch.dtype | None) -> Any:
    """Floating-point tensors in `value` cast to `dtype`; differentiable."""
    return value if dtype is None else map_tensors(partial(_cast, dtype), value)


def division(world: int, reduce_dtypes: set[torch.dtype]) -> tuple[bool, float, float]:
    """How the mean over `world` ranks is taken: (average in the collective, divide before, divide after).

    By hand the divisor is split in two factors, near its square root, so that neither the summands vanish nor
    the sum overflows: 2 -> 2, 1; 3 -> 2, 1.5; 6 -> 4, 1.5; 8 -> 4, 2.
    """
    if reduce_dtypes <= AVERAGED:
        return True, 1.0, 1.0
    before = 1
    while world % before == 0 and world / before > before:
        before *= 2
    return False, float(before), world / before
