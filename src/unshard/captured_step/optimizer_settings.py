"""The settings of param groups that a recording repeats."""

from __future__ import annotations

from collections.abc import Sequence
from types import NoneType
from typing import Any

import torch

from .learning_rates import reads_on_device
from .same_objects import SameObjects

_NUMBERS = frozenset((bool, int, float, str, NoneType))


class OptimizerSettings:
    """Of all optimizers of a step. They are compared in every call, and read only if one of them is a new object."""

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]):
        self._optimizers = optimizers
        self._all = SameObjects()
        self._can_change_in_place = True
        self.tensors = SameObjects()
        """Those among them that are tensors."""
        self.compared: tuple[tuple[tuple[str, Any], ...], ...] = ()
        """For each param group, names and values: equal for calls that can share a recording."""

    def look(self) -> None:
        """Follow what a program has assigned since."""
        groups = [(each, group) for each in self._optimizers for group in each.param_groups]
        before, self._all = self._all, self._all.followed_by(*(group for _, group in groups))
        if before is self._all and not self._can_change_in_place:
            return
        settings = [value for _, group in groups for name, value in group.items() if name != "params"]
        self._can_change_in_place = any(map(_can_change_in_place, settings))
        self.tensors = self.tensors.followed_by([each for each in settings if isinstance(each, torch.Tensor)])
        self.compared = tuple([_settings(optimizer, group) for optimizer, group in groups])


def _settings(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> tuple[tuple[str, Any], ...]:
    """All that a recording repeats: the learning rate only if it is read on the host."""
    left_out = ("params", "lr") if reads_on_device(optimizer, group) else ("params",)
    return tuple([(name, _comparable(value)) for name, value in group.items() if name not in left_out])


def _comparable(value: Any) -> Any:
    """Numbers and flags as they are, the rest by identity: tensors on a device may change, and are read there."""
    if type(value) in _NUMBERS or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, tuple | list):
        return tuple(map(_comparable, value))
    return value.item() if _is_read_on_host(value) else id(value)


def _can_change_in_place(value: Any) -> bool:
    """Whether `_comparable` may become another one although the value is the same object."""
    if isinstance(value, tuple):
        return any(map(_can_change_in_place, value))
    return type(value) not in _NUMBERS and (isinstance(value, list) or _is_read_on_host(value))


def _is_read_on_host(value: Any) -> bool:
    """Whether it is a tensor that is recorded as a number."""
    return isinstance(value, torch.Tensor) and value.is_cpu and value.numel() == 1
