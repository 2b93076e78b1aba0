"""State of a run that a checkpoint does not hold, by name: attributes, non-persistent buffers, gradients.

Names are those of a program: `model.blocks.0.calls`, `data.position`.
"""

from __future__ import annotations

import random
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterator, Mapping
from enum import Enum
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from ..torch_private import local_part, non_persistent_buffers, own_buffers

PARTS = ("model", "optimizer", "scheduler", "scaler", "data")
"""Arguments of `save` that hold state."""
_VALUES = (bool, int, float, complex, str, bytes, type(None), Enum, torch.dtype, torch.device, torch.Size, range, slice)
_MAPPINGS = (dict, OrderedDict, defaultdict, Counter)
_SEQUENCES = (list, tuple, deque)
_OF_OPTIMIZERS = ("state", "param_groups", "defaults", "_opt_called")
"""Attributes of all optimizers: saved ones, and a flag of torch's schedulers."""
_CODE = (type, FunctionType, BuiltinFunctionType, MethodType, ModuleType)
_LONG = 100
"""Longer lists are one tensor (of numbers) or one value, instead of one name for each element."""


@torch.no_grad()
def unsaved_state(run: Mapping[str, Any]) -> dict[str, Any]:
    """Find attributes of modules and objects, non-persistent buffers, gradients, and other entries of the run.

    torch's own schedulers, scalers and optimizers keep everything that matters in their state dicts.
    """
    found: dict[str, Any] = {}
    for path, module in run["model"].named_modules():
        found.update(_of_module(module, f"model.{path}" if path else "model"))
    gradients = sum(parameter.grad is not None for parameter in run["model"].parameters())
    found["gradients"] = f"of {gradients} parameters" if gradients else "none"
    for name, value in run.items():
        if name not in PARTS and callable(getattr(value, "state_dict", None)) and not isinstance(value, nn.Module):
            found.update(leaves(value.state_dict(), name))
        if not _is_of_torch(value):
            own = value
            if isinstance(value, Optimizer):
                own = {key: each for key, each in vars(value).items() if key not in _OF_OPTIMIZERS}
            found.update(leaves(own, name, inside_objects=True))
    return found


def _of_module(module: nn.Module, path: str) -> Iterator[tuple[str, Any]]:
    skipped = non_persistent_buffers(module)
    for name, buffer in own_buffers(module).items():
        if name in skipped and buffer is not None:
            yield from leaves(buffer, f"{path}.{name}")
    own = set(vars(nn.Module())) - {"training"}
    attributes = {name: value for name, value in vars(module).items() if name not in own}
    for name, value in attributes.items():
        yield from leaves(value, f"{path}.{name}", inside_objects=True)


def leaves(
    value: Any, path: str, inside_objects: bool = False, seen: dict[int, Any] | None = None
) -> Iterator[tuple[str, Any]]:
    """Yield tensors and values in nested containers by name, and, with `inside_objects`, in attributes of objects.

    Functions, iterators and torch objects are skipped: their state cannot be compared.
    """
    seen = {} if seen is None else seen
    if isinstance(value, torch.Tensor):
        if _has_memory(value):
            yield path, local_part(value).detach()
        return
    if isinstance(value, _VALUES):
        yield path, _plain(value)
        return
    if id(value) in seen or isinstance(value, _CODE):
        return
    if not inside_objects:
        seen = {**seen}  # only cycles stop here: after loading, a list with two names is two lists
    seen[id(value)] = value  # keeps the object alive, so that its id is not reused
    inner: dict[str, Any] = {}
    if type(value) in _MAPPINGS:
        inner = {f"{path}.{key}": each for key, each in value.items()}
    elif type(value) in _SEQUENCES:
        if len(value) > _LONG and all(isinstance(each, _VALUES) for each in value):
            yield path, _long(value)
        elif len(value) > _LONG and inside_objects:
            yield path, f"{len(value)} items"
        else:
            inner = {f"{path}[{number}]": each for number, each in enumerate(value)}
    elif isinstance(value, set | frozenset):
        yield path, sorted(map(repr, value)) if len(value) <= _LONG else f"{len(value)} items"
    elif isinstance(value, torch.Generator):
        yield path, value.get_state()
    elif isinstance(value, random.Random):
        inner = {path: value.getstate()}
    elif type(value).__module__.partition(".")[0] == "numpy":
        inner = {path: _of_numpy(value)}
    elif inside_objects and _may_look_inside(value):
        inner = {f"{path}.{name}": each for name, each in vars(value).items()}
    for name, each in inner.items():
        yield from leaves(each, name, inside_objects, seen)


def _has_memory(tensor: torch.Tensor) -> bool:
    """Return False for meta tensors, and for views of unsharded parameters whose memory is freed."""
    if not isinstance(tensor, DTensor) and type(tensor) not in (torch.Tensor, nn.Parameter, nn.Buffer):
        return False
    local = local_part(tensor)
    if local.is_meta or local.layout is not torch.strided:
        return False
    last = sum((length - 1) * stride for length, stride in zip(local.shape, local.stride(), strict=True))
    end = (local.storage_offset() + last + 1) * local.itemsize
    return local.numel() == 0 or local.untyped_storage().nbytes() >= end


def _plain(value: Any) -> Any:
    """Convert NumPy's float64, which is also a float: a checkpoint holds a Python float."""
    if not isinstance(value, Enum | bool):
        for kind in (str, float, int):
            if isinstance(value, kind):
                return kind(value)
    return value


def _long(values: Any) -> Any:
    if all(isinstance(each, bool | int | float) for each in values):
        try:
            return torch.tensor(list(values))
        except (RuntimeError, ValueError, OverflowError):  # integers of more than 64 bits
            pass
    return repr([_plain(each) for each in values])


def _of_numpy(value: Any) -> Any:
    bit_generator = getattr(value, "bit_generator", None)  # a Generator
    if bit_generator is not None:
        return dict(bit_generator.state)
    if hasattr(value, "get_state"):  # a RandomState
        return list(value.get_state())
    return value.tolist() if hasattr(value, "tolist") else None


def _is_of_torch(value: Any) -> bool:
    return type(value).__module__.partition(".")[0] in ("torch", "unshard")


def _may_look_inside(value: Any) -> bool:
    if isinstance(value, nn.Module | Optimizer) or not hasattr(value, "__dict__"):
        return False
    return not _is_of_torch(value) or type(value).__module__.startswith("torch.utils.data")
