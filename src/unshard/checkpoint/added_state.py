"""What layers add to their state dicts besides parameters, buffers and extra state: scales of quantised weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ..engine.api import is_packed, set_quant_state
from ..errors import CheckpointError
from ..torch_private import changes_own_state, load_own_state, own_buffers, own_parameters, own_state

EXTRA = "_extra_state"
"""The last part of the name that torch gives to the extra state of a module."""


def added_state(path: str, module: nn.Module) -> dict[str, torch.Tensor]:
    """What a module adds by its methods and hooks for state dicts, by the names that it gives."""
    if not changes_own_state(module):
        return {}
    try:
        found = own_state(module)
    except Exception as error:
        raise CheckpointError(f"{_named(path, module)} has no state dict: {type(error).__name__}: {error}") from error
    known = {*own_parameters(module), *own_buffers(module), EXTRA}
    added = {name: value for name, value in found.items() if name not in known and value is not None}
    for name, value in added.items():
        if type(value) not in (torch.Tensor, nn.Parameter, nn.Buffer) or value.layout is not torch.strided:
            raise CheckpointError(
                f"{_named(path, module)} adds {name!r} to its state dict, a {type(value).__name__}. A checkpoint holds "
                "dense tensors. Return other values in get_extra_state, and take them in set_extra_state."
            )
    return added


def _named(path: str, module: nn.Module) -> str:
    return f"{path or 'The model'!r}, a {type(module).__name__},"


@torch.no_grad()
def set_added_state(path: str, module: nn.Module, values: dict[str, torch.Tensor]) -> None:
    """Load what was saved of `added_state`. What the module saves afterwards tells whether it took the values."""
    for load in (_set_quant_states, _copy_in_place, load_own_state):
        if _has(path, module, values):
            return
        load(module, dict(values))
    if not _has(path, module, values):
        raise CheckpointError(
            f"{_named(path, module)} adds {', '.join(map(repr, values))} to its state dict and does not take them from "
            "one. Its tensors are loaded. Give it a method _load_from_state_dict, or get_extra_state and "
            "set_extra_state."
        )


def _has(path: str, module: nn.Module, values: dict[str, torch.Tensor]) -> bool:
    now = added_state(path, module)
    return all(name in now and _same(now[name], value) for name, value in values.items())


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    one, other = (each.cpu().contiguous().reshape(-1).view(torch.uint8) for each in (one, other))
    return torch.equal(one, other)


def _set_quant_states(module: nn.Module, values: dict[str, Any]) -> None:
    heads = {name.partition(".")[0] for name in values if "." in name}
    for head in heads:
        parameter = getattr(module, head, None)
        if is_packed(parameter):
            entries = {name.removeprefix(f"{head}."): values[name] for name in values if name.startswith(f"{head}.")}
            set_quant_state(parameter, entries, head)


def _copy_in_place(module: nn.Module, values: dict[str, Any]) -> None:
    """Into what the module has put into its state dict: nearly always its own memory."""
    for name, target in own_state(module).items():
        if name in values and target.shape == values[name].shape:
            target.copy_(values[name])
