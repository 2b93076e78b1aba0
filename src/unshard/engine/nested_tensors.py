"""Tensors inside the arguments and results of forward: tuples, lists, dicts, sets and dataclasses."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence

from ..errors import StateError
from . import step_recording

_DEEPEST = 128
_CONTAINERS = (dict, list, tuple, set)  # `torch.compile` traces casts inside a unit, and does not know `dict | list`


def map_tensors(fn: Callable[[torch.Tensor], torch.Tensor], value: Any, depth: int = 0) -> Any:
    """`value` with `fn` applied to every tensor in it; containers keep their type, other values pass through."""
    if isinstance(value, torch.Tensor):
        return fn(value)
    if isinstance(value, PackedSequence):
        # Its batch sizes must stay as they are, on the host.
        named = {name: getattr(value, name) for name in ("data", "sorted_indices", "unsorted_indices")}
        return value._replace(**{name: fn(each) for name, each in named.items() if each is not None})
    if not _is_container(value):
        return value
    if depth >= _DEEPEST:
        raise StateError(
            f"Arguments or results of forward are nested deeper than {_DEEPEST} levels; do they contain themselves?"
        )
    if dataclasses.is_dataclass(value):  # first: the outputs of some libraries are dicts besides
        fields = [field for field in dataclasses.fields(value) if field.init]
        new = {f.name: map_tensors(fn, getattr(value, f.name), depth + 1) for f in fields}
        return dataclasses.replace(value, **new)  # type: ignore[type-var]
    if isinstance(value, dict):
        items = ((key, map_tensors(fn, item, depth + 1)) for key, item in value.items())
        return OrderedDict(items) if isinstance(value, OrderedDict) else dict(items)
    mapped = [map_tensors(fn, item, depth + 1) for item in value]
    if hasattr(value, "_fields"):
        return type(value)(*mapped)
    return type(value)(mapped)


def moved(device: torch.device, tensor: torch.Tensor) -> torch.Tensor:
    """The tensor on `device`."""
    if tensor.device == device:
        return tensor
    # Of a copy that does not wait, a recording keeps the address of host memory that is free afterwards. One that waits
    # ends the recording.
    return tensor.to(device, non_blocking=not step_recording.active)


def tensors_in(value: Any, depth: int = 0) -> Iterator[torch.Tensor]:
    """Every tensor in `value`. In a set their order differs between ranks."""
    if isinstance(value, torch.Tensor):
        yield value
    elif _is_container(value):
        if depth >= _DEEPEST:
            raise StateError(f"Results of forward are nested deeper than {_DEEPEST} levels.")
        for item in _items(value):
            yield from tensors_in(item, depth + 1)


def _items(value: Any) -> list[Any]:
    if dataclasses.is_dataclass(value):
        return [getattr(value, field.name) for field in dataclasses.fields(value)]
    if isinstance(value, dict):
        return list(value.values())
    return list(value)


def _is_container(value: Any) -> bool:
    if isinstance(value, _CONTAINERS):
        return True
    return dataclasses.is_dataclass(value) and not isinstance(value, type)
