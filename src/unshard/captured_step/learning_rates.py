"""Optimizers made ready for recording: learning rates and counters of steps lie on the device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from numbers import Real
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from ..optim.flat_optimizer import Flat
from ..torch_private import version_of

_O = torch.optim
_CAPTURABLE = (_O.Adam, _O.AdamW, _O.Adamax, _O.NAdam, _O.RAdam, _O.RMSprop, _O.Rprop, _O.Adadelta, _O.ASGD)


class LearningRates:
    """The learning rates of an optimizer as tensors: a replay reads what a scheduler or a program has set since.

    The param groups have the program's own numbers, except while a step runs. Where an optimizer reads its learning
    rate on the host, or the program has a tensor there itself, nothing is changed.
    """

    def __init__(self, optimizer: Optimizer, device: torch.device):
        self._optimizer, self._device = optimizer, device
        self._tensors: list[torch.Tensor] = []
        self._numbers: list[Any] = []

    def refresh(self) -> None:
        """Take over what a program has assigned since: a number, or groups of a loaded state dict."""
        groups: list[dict[str, Any]] = self._optimizer.param_groups
        for group in groups:
            if not group.get("capturable") and can_be_capturable(self._optimizer, group):
                group["capturable"] = True
                self._move_counters(group["params"])
        while len(self._tensors) < len(groups):
            self._tensors.append(torch.zeros((), device=self._device))
            self._numbers.append(None)
        for number, group in enumerate(groups):
            if reads_on_device(self._optimizer, group) and group["lr"] != self._numbers[number]:
                self._numbers[number] = group["lr"]
                self._tensors[number].fill_(float(group["lr"]))

    def _move_counters(self, parameters: list[Any]) -> None:
        """To the device, where `capturable` optimizers expect them. Parameters of a flat optimizer share some.

        NAdam has a second number besides the counter of steps.
        """
        moved: dict[int, torch.Tensor] = {}
        for parameter in parameters:
            entry = self._optimizer.state.get(parameter, {})
            for name, value in entry.items():
                if isinstance(value, torch.Tensor) and value.dim() == 0 and value.device != self._device:
                    entry[name] = moved.setdefault(id(value), value.to(self._device, torch.float32))

    @contextmanager
    def shown(self, recorded: bool = False) -> Iterator[None]:
        """The param groups have the tensors in here. A scheduler that steps in here writes to them.

        `recorded`: nothing in here runs, so that there is nothing to read.
        """
        optimizer = self._optimizer
        groups = list(zip(optimizer.param_groups, self._tensors, strict=False))
        shown = [
            (group, tensor, group["lr"], version_of(tensor))
            for group, tensor in groups
            if reads_on_device(optimizer, group)
        ]
        for group, tensor, _, _ in shown:
            group["lr"] = tensor
        try:
            yield
        finally:
            for group, tensor, number, version in shown:
                if group["lr"] is tensor:
                    group["lr"] = number if recorded or version_of(tensor) == version else tensor.item()


def reads_on_device(optimizer: Optimizer, group: dict[str, Any]) -> bool:
    """Whether the optimizer takes the learning rate of this group from a tensor, and the program has a number there."""
    if not isinstance(group.get("lr"), Real):
        return False
    if not group.get("fused"):
        return bool(group.get("capturable"))
    # Of the fused kernels that take a tensor, torch knows only those of Adam for DTensors (2.11 to 2.13).
    if isinstance(optimizer, Flat | torch.optim.Adam | torch.optim.AdamW):
        return True
    return not any(isinstance(each, DTensor) for each in group["params"])


def can_be_capturable(optimizer: Optimizer, group: dict[str, Any]) -> bool:
    """Whether it is one of torch's own, which then do nothing on the host. What others would do is not known."""
    kind = type(optimizer).base if isinstance(optimizer, Flat) else type(optimizer)
    if kind is torch.optim.Rprop and group.get("foreach") and not isinstance(optimizer, Flat):
        return False  # of DTensors, torch then cannot copy lists
    return kind in _CAPTURABLE and "capturable" in group
