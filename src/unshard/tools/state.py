"""What an optimizer keeps for a parameter."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch


def state_tensors(optimizer: Any, parameter: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors with a value per element. A count of steps is a single number and does not matter here."""
    for name, value in optimizer.state.get(parameter, {}).items():
        per_element = isinstance(value, torch.Tensor) and (value.ndim or not parameter.ndim) and name != "step"
        if per_element and value.is_floating_point():
            yield name, value


def state_dtypes(optimizer: Any, parameter: Any) -> tuple[torch.dtype, ...] | None:
    """The dtypes of what an optimizer keeps for a parameter, once it does."""
    if optimizer is None or not optimizer.state.get(parameter):
        return None
    found = {value.dtype for _, value in state_tensors(optimizer, parameter)}
    return tuple(sorted(found, key=str))


def parameters_of(optimizer: Any) -> list[Any]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]
