"""Optimizers of a captured step: learning rates as tensors on the device, and the settings that recordings repeat."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from numbers import Number, Real
from types import NoneType
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from ..optim.flat_optimizer import Flat
from ..torch_private import version_of
from .signature import SameObjects, values_of

_O = torch.optim
_CAPTURABLE = (_O.Adam, _O.AdamW, _O.Adamax, _O.NAdam, _O.RAdam, _O.RMSprop, _O.Rprop, _O.Adadelta, _O.ASGD)
_SIMPLE = frozenset((bool, int, float, str, NoneType))
_NO_SETTINGS = ("params", "param_names")


class LearningRates:
    """The learning rates of an optimizer as tensors, so that a replay reads what a scheduler or the program has set.

    The optimizer groups contain the program's own numbers, except while a step runs. Nothing changes if the optimizer
    reads its learning rate on the host, or if the program itself passes a tensor.
    """

    def __init__(self, optimizer: Optimizer, device: torch.device):
        self._optimizer, self._device = optimizer, device
        self._tensors: list[torch.Tensor] = []
        self._numbers: list[Any] = []

    def refresh(self) -> None:
        """Take over new numbers, and new groups (for example, of a loaded state dict)."""
        groups: list[dict[str, Any]] = self._optimizer.param_groups
        for group in groups:
            if not group.get("capturable") and _can_be_capturable(self._optimizer, group):
                group["capturable"] = True
                self._move_counters(group["params"])
        while len(self._tensors) < len(groups):
            self._tensors.append(torch.zeros((), device=self._device))
            self._numbers.append(None)
        for number, group in enumerate(groups):
            if _reads_on_device(self._optimizer, group) and group["lr"] != self._numbers[number]:
                self._numbers[number] = group["lr"]
                self._tensors[number].fill_(float(group["lr"]))

    def _move_counters(self, parameters: list[Any]) -> None:
        """Move step counters to the device, where `capturable` optimizers expect them.

        Parameters of a flat optimizer share some. NAdam has a second number besides the counter.
        """
        moved: dict[int, torch.Tensor] = {}
        for parameter in parameters:
            entry = self._optimizer.state.get(parameter, {})
            for name, value in entry.items():
                if isinstance(value, torch.Tensor) and value.dim() == 0 and value.device != self._device:
                    entry[name] = moved.setdefault(id(value), value.to(self._device, torch.float32))

    @contextmanager
    def shown(self, recorded: bool = False) -> Iterator[None]:
        """Put the tensors into the optimizer groups. A scheduler that steps in this context writes to them.

        `recorded`: the step is recorded and does not run, so the tensors have no new values to read.
        """
        optimizer = self._optimizer
        shown = [
            (group, tensor, group["lr"], version_of(tensor))
            for group, tensor in zip(optimizer.param_groups, self._tensors, strict=False)
            if _reads_on_device(optimizer, group)
        ]
        for group, tensor, _, _ in shown:
            group["lr"] = tensor
        try:
            yield
        finally:
            for group, tensor, number, version in shown:
                if group["lr"] is tensor:
                    group["lr"] = number if recorded or version_of(tensor) == version else tensor.item()


def _reads_on_device(optimizer: Optimizer, group: dict[str, Any]) -> bool:
    """Return True if the optimizer can read the learning rate from a tensor, and the program has set a number."""
    if not isinstance(group.get("lr"), Real):
        return False
    if not group.get("fused"):
        return bool(group.get("capturable"))
    # For DTensors, torch supports a tensor as learning rate only in Adam's fused kernels (2.11 to 2.13).
    if isinstance(optimizer, Flat | torch.optim.Adam | torch.optim.AdamW):
        return True
    return not any(isinstance(each, DTensor) for each in group["params"])


def _can_be_capturable(optimizer: Optimizer, group: dict[str, Any]) -> bool:
    """Return True for torch's own optimizers, which do nothing on the host with `capturable`."""
    kind = type(optimizer).base if isinstance(optimizer, Flat) else type(optimizer)
    if kind is torch.optim.Rprop and group.get("foreach") and not isinstance(optimizer, Flat):
        return False  # torch then cannot copy lists of DTensors
    return kind in _CAPTURABLE and "capturable" in group


class OptimizerSettings:
    """The settings of all optimizer groups. A call reads them again only if one was assigned or can change in place."""

    def __init__(self, optimizers: Sequence[Optimizer]):
        self._optimizers = optimizers
        self._all = SameObjects([])
        self._can_change_in_place = True
        self.tensors = SameObjects([])
        """Settings that are tensors."""
        self.compared: tuple[tuple[tuple[str, Any], ...], ...] = ()
        """Names and values for each optimizer group: equal for calls that can share a recording."""

    def look(self) -> None:
        """Follow assignments by the program."""
        groups = [(each, group) for each in self._optimizers for group in each.param_groups]
        before, self._all = self._all, self._all.followed_by(values_of([group for _, group in groups]))
        if before is self._all and not self._can_change_in_place:
            return
        settings = [value for _, group in groups for name, value in group.items() if name not in _NO_SETTINGS]
        self._can_change_in_place = any(map(_can_change_in_place, settings))
        self.tensors = self.tensors.followed_by([each for value in settings for each in _tensors_in(value)])
        self.compared = tuple([_settings(optimizer, group) for optimizer, group in groups])


class _Held:
    """Compares an object by identity, and holds it, so that its id is not reused."""

    def __init__(self, value: Any):
        self._value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Held) and self._value is other._value

    def __hash__(self) -> int:
        return id(self._value)


def _settings(optimizer: Optimizer, group: dict[str, Any]) -> tuple[tuple[str, Any], ...]:
    """Everything that a recording repeats; includes the learning rate only if it is read on the host."""
    left_out = (*_NO_SETTINGS, "lr") if _reads_on_device(optimizer, group) else _NO_SETTINGS
    return tuple([(name, _comparable(value)) for name, value in group.items() if name not in left_out])


def _comparable(value: Any) -> Any:
    """Compare numbers and flags by value, the rest by identity: a replay reads tensors on the device itself."""
    if type(value) in _SIMPLE or isinstance(value, Number | str):
        return value
    if isinstance(value, tuple | list):
        return tuple(map(_comparable, value))
    return value.item() if _is_read_on_host(value) else _Held(value)


def _can_change_in_place(value: Any) -> bool:
    """Return True if `_comparable` can change although `value` is the same object."""
    if isinstance(value, tuple):
        return any(map(_can_change_in_place, value))
    return isinstance(value, list) or _is_read_on_host(value)


def _is_read_on_host(value: Any) -> bool:
    """Return True for a tensor that is recorded as a number."""
    return isinstance(value, torch.Tensor) and value.is_cpu and value.numel() == 1


def _tensors_in(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for each in value:
            yield from _tensors_in(each)
