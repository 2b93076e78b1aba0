"""A single number that the ranks of a group reduce, so that all of them go on with the same bits."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist


def sum_over(group: Any, number: torch.Tensor) -> None:
    """`number` <- its sum over the ranks; a group of one sends nothing."""
    _reduce(group, number, dist.ReduceOp.SUM)


def largest_over(group: Any, number: torch.Tensor) -> None:
    """`number`, not negative, <- the largest of the ranks' numbers, where NaN is larger than infinity.

    Backends lose a NaN in a maximum of floats, each in its own way. The bits of numbers that are not negative, read as
    integers, have the same order, and NaN comes last.
    """
    bits = {4: torch.int32, 8: torch.int64}[number.dtype.itemsize]
    _reduce(group, number.abs_().view(bits), dist.ReduceOp.MAX)


def _reduce(group: Any, number: torch.Tensor, how: Any) -> None:
    if group.size() > 1:
        dist.all_reduce(number, how, group)
