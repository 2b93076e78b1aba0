"""Parameters of quantised layers: subclasses of nn.Parameter that keep scales and the like in attributes.

bitsandbytes has two: `Params4bit` (attribute `quant_state`; the elements are packed, whatever the dtype) and
`Int8Params` (`SCB`, and `CB`, which is the memory of the parameter itself). Layers read these attributes from the
parameter that they hold, in forward and in state dicts, so sharded and unsharded parameters need them, too.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from ...errors import ParameterError
from ...names import clean_tensor_name

_QUANT_STATE = "quant_state"


class _OwnMemory:
    """Stands for a tensor over the parameter's own memory."""


def attributes_of(parameter: nn.Parameter) -> dict[str, Any]:
    """Return the attributes and properties that a subclass of nn.Parameter adds."""
    kind = type(parameter)
    if kind is nn.Parameter or isinstance(parameter, DTensor) or not issubclass(kind, nn.Parameter):
        return {}
    found = dict(vars(parameter))
    for base in kind.__mro__[: kind.__mro__.index(nn.Parameter)]:
        for name, each in vars(base).items():
            if isinstance(each, property) and not hasattr(nn.Parameter, name):
                # torch resolves a state dict key such as "weight.absmax" with getattr.
                with suppress(AttributeError):
                    found.setdefault(name, getattr(parameter, name))
    return {name: _OwnMemory if _is_memory_of(parameter, value) else value for name, value in found.items()}


def _is_memory_of(parameter: nn.Parameter, value: Any) -> bool:
    if not isinstance(value, torch.Tensor) or isinstance(value, DTensor) or not value.numel():
        return False
    return value.untyped_storage().data_ptr() == parameter.untyped_storage().data_ptr()


def give_attributes(parameter: torch.Tensor, attributes: dict[str, Any], memory: torch.Tensor | None) -> None:
    """Set the attributes on a sharded or unsharded parameter, except those that it has.

    `memory`: the value of attributes that are the parameter's own memory.
    """
    for name, value in attributes.items():
        if vars(parameter).get(name) is None:
            setattr(parameter, name, memory if value is _OwnMemory else value)


def is_packed(parameter: Any) -> bool:
    """Return True if the elements are packed bits, whatever the dtype. They must not be cast."""
    return getattr(parameter, _QUANT_STATE, None) is not None


def load_quant_states(module: nn.Module, state_dict: dict[str, Any], prefix: str) -> None:
    """Load the scales of packed parameters from entries such as `weight.absmax`, and remove these from `state_dict`.

    torch would report the entries as unexpected: the layers save them but have no method to load them.
    """
    marked = [key for key in state_dict if key.startswith(prefix) and f".{_QUANT_STATE}." in key]
    entries: dict[str, dict[str, Any]] = {key.partition(f".{_QUANT_STATE}.")[0]: {} for key in marked}
    if not entries:
        return
    for key in list(state_dict):
        name = next((name for name in (key.rpartition(".")[0], key.rsplit(".", 2)[0]) if name in entries), None)
        if name is not None:
            entries[name][key.removeprefix(f"{name}.")] = state_dict[key]
    modules = {clean_tensor_name(f"{path}."): each for path, each in module.named_modules()}
    for key, scales in entries.items():
        path, _, name = key.removeprefix(prefix).rpartition(".")
        parameter = getattr(modules.get(path + "."), name, None)  # not registered in a flat unit
        if is_packed(parameter):
            set_quant_state(parameter, scales, key)
            for suffix in scales:
                del state_dict[f"{key}.{suffix}"]


def set_quant_state(parameter: Any, entries: dict[str, Any], name: str) -> None:
    """Change the scales of a packed parameter, which its layer and its sharded and unsharded parameter share."""
    state = getattr(parameter, _QUANT_STATE)
    try:
        loaded = type(state).from_dict(dict(entries), device=state.absmax.device)
    except Exception as error:
        raise ParameterError(f"The quantisation state of {name!r} cannot be loaded: {error!r}") from error
    if loaded.quant_type != state.quant_type:
        raise ParameterError(f"{name!r} is quantised as {state.quant_type}, and was saved as {loaded.quant_type}.")
    _assign(state, loaded)


@torch.no_grad()
def _assign(state: Any, loaded: Any) -> None:
    for name, value in vars(loaded).items():
        mine = getattr(state, name, None)
        if isinstance(mine, type(state)) and isinstance(value, type(state)):
            _assign(mine, value)
        elif (
            isinstance(mine, torch.Tensor)
            and isinstance(value, torch.Tensor)
            and (mine.shape, mine.dtype) == (value.shape, value.dtype)
        ):
            mine.copy_(value)  # in place: parameters have the same tensor as an attribute
        else:
            setattr(state, name, value)
