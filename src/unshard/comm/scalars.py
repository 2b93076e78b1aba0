"""A single number, or a few, that the ranks of a group reduce, so that all of them go on with the same bits."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from .order.calls import SharedCall


def sum_over(group: Any, number: torch.Tensor, call: SharedCall) -> None:
    """`number` <- its sum over the ranks; a group of one sends nothing. `call`: what it is for."""
    _reduce(group, number, dist.ReduceOp.SUM, call)


def largest_over(group: Any, number: torch.Tensor, call: SharedCall) -> None:
    """`number`, not negative, <- the largest of the ranks' numbers, where NaN is larger than infinity.

    Backends lose a NaN in a maximum of floats, each in its own way. The bits of numbers that are not negative, read as
    integers, have the same order, and NaN comes last.
    """
    bits = {4: torch.int32, 8: torch.int64}[number.dtype.itemsize]
    _reduce(group, number.abs_().view(bits), dist.ReduceOp.MAX, call)


_INFINITY_BITS = 0x7FF0000000000000
"""Of a float64; those of a NaN are larger."""


def smallest_over(group: Any, number: torch.Tensor, call: SharedCall) -> None:
    """`number`, a float64, <- the smallest of the ranks' numbers that are not negative; NaN if any is NaN.

    A rank without a number has -1, and so has the result if no rank has one.
    """
    bits = number.view(torch.int64)
    distance = torch.where(number < 0, -1, _INFINITY_BITS - bits)
    _reduce(group, distance.masked_fill_(number.isnan(), torch.iinfo(torch.int64).max), dist.ReduceOp.MAX, call)
    bits.copy_(_INFINITY_BITS - distance.clamp(min=0))
    number.masked_fill_(distance < 0, -1)
    number.masked_fill_(distance > _INFINITY_BITS, torch.nan)


def _reduce(group: Any, number: torch.Tensor, how: Any, call: SharedCall) -> None:
    if group.size() > 1:
        call.run(partial(dist.all_reduce, number, how, group))
