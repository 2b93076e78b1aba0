"""Counts writes to parameters at rest, so that gathered copies of them are known to be out of date.

Autograd counts writes through a DTensor and through its local tensor, but not those of the `_foreach` and fused
operations of optimizers on DTensors. Those are seen by a hook on every optimizer's step.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from ..torch_private import version_of


class _Steps:
    taken = 0


def note_optimizer_step() -> None:
    _Steps.taken += 1


def count_writes(tensors: Iterable[torch.Tensor]) -> int:
    """Grows when any of `tensors` may have been written."""
    return _Steps.taken + sum(map(version_of, tensors))
