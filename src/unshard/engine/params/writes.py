"""Counts writes to parameters at rest, so that gathered copies of them are known to be out of date.

Autograd counts writes through a DTensor and through its local tensor, but not those of the `_foreach` and fused
operations of optimizers on DTensors. Those are seen by a hook on every optimizer's step. Nor does it count writes
through `.data`; where these matter and memory can be read at once, on the host, samples show them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import cached_property
from itertools import repeat
from operator import attrgetter, is_not
from typing import Any

import torch
import torch.distributed as dist

from ...torch_private import version_of

# No Python functions: these look at every parameter of a unit.
_requires_grad: Callable[[torch.Tensor], bool] = attrgetter("requires_grad")
_gradient: Callable[[torch.Tensor], torch.Tensor | None] = attrgetter("grad")


class Steps:
    """Counts the steps of optimizers on one rank, for all units that were made there."""

    def __init__(self) -> None:
        self.taken = 0

    def count_writes(self, tensors: Sequence[torch.Tensor]) -> tuple[int, int]:
        """Changes when any of `tensors` may have been written.

        Optimizers skip frozen parameters without gradients, so a frozen unit stays valid after their steps.
        """
        stepped = any(map(_requires_grad, tensors)) or any(map(is_not, map(_gradient, tensors), repeat(None)))
        return self.taken if stepped else -1, sum(map(version_of, tensors))


# By default process group: ranks may be threads of this process, and each must gather again after its own steps only.
_steps: weakref.WeakKeyDictionary[Any, Steps] = weakref.WeakKeyDictionary()
_steps_without_group = Steps()


def steps_of_this_rank() -> Steps:
    group = dist.group.WORLD
    return _steps_without_group if group is None else _steps.setdefault(group, Steps())


class Samples:
    """A few elements of every tensor, evenly spread."""

    MOST = 64

    def __init__(self, tensors: Sequence[torch.Tensor]):
        """`tensors` have no gaps."""
        self._tensors = tensors

    @cached_property
    def _places(self) -> list[torch.Tensor]:
        steps = [max(1, each.numel() // self.MOST) for each in self._tensors]
        return [
            each.detach().as_strided((-(-each.numel() // step),), (step,))
            for each, step in zip(self._tensors, steps, strict=True)
        ]

    def take(self) -> list[torch.Tensor]:
        return [each.clone() for each in self._places]

    def same(self, before: list[torch.Tensor]) -> bool:
        """Whether nothing was written to them since; NaN counts as written."""
        return all(map(torch.equal, self._places, before))
