"""Tensors in the arguments and results of forward, inside tuples, lists, dicts, sets and dataclasses."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence

from ..errors import StateError
from . import side_stream

_DEEPEST = 128
_CONTAINERS = (dict, list, tuple, set)  # `torch.compile` traces casts inside a unit, and does not know `dict | list`


def map_tensors(fn: Callable[[torch.Tensor], torch.Tensor], value: Any, depth: int = 0) -> Any:
    """Apply `fn` to every tensor in `value`. Containers keep their type, other values pass through."""
    if isinstance(value, torch.Tensor):
        return fn(value)
    if isinstance(value, PackedSequence):
        # `batch_sizes` must stay on the host, uncast.
        named = {name: getattr(value, name) for name in ("data", "sorted_indices", "unsorted_indices")}
        return value._replace(**{name: fn(each) for name, each in named.items() if each is not None})
    if not _is_container(value):
        return value
    if depth >= _DEEPEST:
        raise StateError(
            f"Arguments or results of forward are nested more than {_DEEPEST} levels deep. Do they contain themselves?"
        )
    if dataclasses.is_dataclass(value):  # first: the outputs of some libraries are also dicts
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
    """Return the tensor on `device`."""
    if tensor.device == device:
        return tensor
    # While a step is recorded, the copy blocks, which ends the recording. A graph with a non-blocking copy would keep
    # the address of host memory that is freed after this call.
    return tensor.to(device, non_blocking=not side_stream.recording)


def tensors_in(value: Any, depth: int = 0) -> Iterator[torch.Tensor]:
    """Yield every tensor in `value`. Tensors in a set come in another order on each rank."""
    if isinstance(value, torch.Tensor):
        yield value
    elif _is_container(value):
        if depth >= _DEEPEST:
            raise StateError(f"Results of forward are nested more than {_DEEPEST} levels deep.")
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


def _cast(dtype: torch.dtype, tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() and tensor.dtype != dtype else tensor


def cast_inputs(args: tuple[Any, ...], kwargs: dict[str, Any], dtype: torch.dtype | None) -> tuple[Any, Any]:
    """`cast_floats` for the arguments of forward: nearly always one tensor, which often has the dtype already."""
    if dtype is None:
        return args, kwargs
    if not kwargs and len(args) == 1 and isinstance(args[0], torch.Tensor):
        only = args[0]
        return (args if only.dtype == dtype or not only.is_floating_point() else (only.to(dtype),)), kwargs
    return map_tensors(partial(_cast, dtype), (args, kwargs))


def cast_floats(value: Any, dtype: torch.dtype | None) -> Any:
    """Cast floating-point tensors in `value` to `dtype`; differentiable."""
    return value if dtype is None else map_tensors(partial(_cast, dtype), value)
