"""State that is loaded for parameters whose state rests on the host: it never sees the device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from ..engine.flat import spots_of
from ..torch_private import local_of, make_dtensor, spec_of


class _Hidden:
    """A tensor that torch does not find, and so does not move to where the parameter is: all state at once."""

    def __init__(self, value: DTensor):
        self.value = value


@contextmanager
def loading(optimizer: Optimizer) -> Iterator[None]:
    """Around a load. The hooks are the innermost ones, so that those of users see the tensors."""
    handles = [
        optimizer.register_load_state_dict_pre_hook(_hide),
        optimizer.register_load_state_dict_post_hook(send_home, prepend=True),
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _hide(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    saved = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
    parameters = _parameters(optimizer)
    away = _homes(parameters)
    numbers = {number for number, each in zip(saved, parameters, strict=False) if id(each) in away}
    state = {
        number: {key: _Hidden(value) if _moves(key, value) else value for key, value in entry.items()}
        if number in numbers
        else entry
        for number, entry in state_dict["state"].items()
    }
    return {**state_dict, "state": state}


def _moves(key: Any, value: Any) -> bool:
    return isinstance(value, DTensor) and key != "step"  # counters stay with the optimizer


@torch.no_grad()
def send_home(optimizer: Optimizer) -> None:
    """State of such parameters that is on the device, or was hidden, goes to the host, as it is."""
    parameters = _parameters(optimizer)
    homes = _homes(parameters)
    for parameter in parameters:
        if id(parameter) in homes and parameter in optimizer.state:
            entry = optimizer.state[parameter]
            for key, value in entry.items():
                if isinstance(value, _Hidden) or _moves(key, value):
                    entry[key] = _at(homes[id(parameter)], parameter, value)


def _at(device: torch.device, parameter: torch.Tensor, value: _Hidden | DTensor) -> DTensor:
    dtensor, dtype = value, None
    if isinstance(dtensor, _Hidden):
        # As torch casts what it loads.
        dtensor, dtype = dtensor.value, parameter.dtype if parameter.is_floating_point() else None
    old = local_of(dtensor)
    local = old.to(device, dtype or old.dtype)
    spec = spec_of(dtensor)
    return dtensor if local is old else make_dtensor(local, spec.mesh, spec.placements, dtensor.shape)


def _parameters(optimizer: Optimizer) -> list[torch.Tensor]:
    return [each for group in optimizer.param_groups for each in group["params"]]


def _homes(parameters: list[torch.Tensor]) -> dict[int, torch.device]:
    """By the id of the parameter, where its state rests, if not where it is."""
    return {key: spot.states.device for key, spot in spots_of(parameters).items() if spot.states is not None}
