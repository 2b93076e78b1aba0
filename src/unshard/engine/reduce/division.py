"""How a sum of gradients over the ranks becomes a mean."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch

# Reduced by averaging in the collective; any other dtype could overflow in the sum, so it is scaled by hand.
AVERAGED = frozenset((torch.float32, torch.bfloat16))


@dataclass(frozen=True)
class Division:
    """How a sum over the ranks becomes a mean: in the collectives, or by dividing before and after them."""

    scatter_average: bool
    all_reduce_average: bool
    before: float
    after: float


@cache
def division(
    shards: int,
    replicas: int,
    reduce_dtypes: frozenset[torch.dtype],
    factor: float | None,
    force_sum: bool,
    in_halves: bool = False,
) -> Division:
    """The division for gradients that are reduced over `shards` x `replicas` ranks.

    `factor` replaces the number of ranks; `in_halves` divides by hand in every dtype. By hand the divisor is split in
    two factors, near its square root, so that neither the summands vanish nor the sum overflows: 2 -> 2, 1; 3 -> 2,
    1.5; 6 -> 4, 1.5; 8 -> 4, 2.
    """
    total = factor or shards * replicas
    if reduce_dtypes <= AVERAGED and not in_halves:
        if force_sum:
            return Division(False, False, 1.0, total)
        if factor is None:
            return Division(True, True, 1.0, 1.0)
        # Averaging over the shards is a division by their number; any other factor divides the result.
        return Division(True, False, 1.0, 1.0) if factor == shards else Division(False, False, 1.0, factor)
    before = 1
    while total % before == 0 and total / before > before:
        before *= 2
    return Division(False, False, float(before), total / before)
