"""The settings of param groups that a recording repeats."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from numbers import Number
from types import NoneType
from typing import Any

import torch

from .learning_rates import reads_on_device
from .same_objects import SameObjects, values_of

_SIMPLE = frozenset((bool, int, float, str, NoneType))
_NO_SETTINGS = ("params", "param_names")


class OptimizerSettings:
    """Of all optimizers of a step. A call reads them only if one is another object, or can change in place."""

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]):
        self._optimizers = optimizers
        self._all = SameObjects([])
        self._can_change_in_place = True
        self.tensors = SameObjects([])
        """Those among them that are tensors."""
        self.compared: tuple[tuple[tuple[str, Any], ...], ...] = ()
        """For each param group, names and values: equal for calls that can share a recording."""

    def look(self) -> None:
        """Follow what a program has assigned since."""
        groups = [(each, group) for each in self._optimizers for group in each.param_groups]
        before, self._all = self._all, self._all.followed_by(values_of([group for _, group in groups]))
        if before is self._all and not self._can_change_in_place:
            return
        settings = [value for _, group in groups for name, value in group.items() if name not in _NO_SETTINGS]
        self._can_change_in_place = any(map(_can_change_in_place, settings))
        self.tensors = self.tensors.followed_by([each for value in settings for each in _tensors_in(value)])
        self.compared = tuple([_settings(optimizer, group) for optimizer, group in groups])


class _Held:
    """An object that is compared by identity, and held, so that no other one gets its id."""

    def __init__(self, value: Any):
        self._value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Held) and self._value is other._value

    def __hash__(self) -> int:
        return id(self._value)


def _settings(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> tuple[tuple[str, Any], ...]:
    """All that a recording repeats: the learning rate only if it is read on the host."""
    left_out = (*_NO_SETTINGS, "lr") if reads_on_device(optimizer, group) else _NO_SETTINGS
    return tuple([(name, _comparable(value)) for name, value in group.items() if name not in left_out])


def _comparable(value: Any) -> Any:
    """Numbers and flags as they are, the rest by identity: tensors on a device may change, and are read there."""
    if type(value) in _SIMPLE or isinstance(value, Number | str):
        return value
    if isinstance(value, tuple | list):
        return tuple(map(_comparable, value))
    return value.item() if _is_read_on_host(value) else _Held(value)


def _can_change_in_place(value: Any) -> bool:
    """Whether `_comparable` may become another one although the value is the same object."""
    if isinstance(value, tuple):
        return any(map(_can_change_in_place, value))
    return isinstance(value, list) or _is_read_on_host(value)


def _is_read_on_host(value: Any) -> bool:
    """Whether it is a tensor that is recorded as a number."""
    return isinstance(value, torch.Tensor) and value.is_cpu and value.numel() == 1


def _tensors_in(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for each in value:
            yield from _tensors_in(each)
