"""Results of forward that share memory with unsharded parameters, which `reshard` empties: a weight, a view of one."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from ..torch_private import parts_of, storage_key
from .nested_tensors import map_tensors, tensors_in
from .params.buffers import EMPTIED
from .params.param import unsharded_name

_MOST = 1000
"""Of a longer container only the last ones are looked at."""


def shares_memory(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether one of `tensors` lies in memory that is emptied. Asked in every forward of every unit."""
    try:
        for tensor in tensors:
            if storage_key(tensor.untyped_storage()) in EMPTIED or type(tensor) is not torch.Tensor:
                return any(map(_lies_in_emptied, tensors))
    except NotImplementedError:  # no storage: a function transform wraps the tensor, or it is sparse
        return any(map(_lies_in_emptied, tensors))
    return False


def with_own_memory(value: Any) -> Any:
    """`value` with copies of the tensors in it that lie in memory that is emptied. Gradients flow through copies."""
    return map_tensors(lambda tensor: tensor.clone() if _lies_in_emptied(tensor) else tensor, value)


class LeftAlias:
    """A tensor, or a tuple, that forward left on a module, in a list or in a dict.

    Between forwards a copy takes its place.
    """

    def __init__(self, container: Any, key: Any, value: Any):
        # A list cannot be referred to weakly, and does not keep its module.
        self._container = weakref.ref(container) if isinstance(container, nn.Module) else lambda: container
        self._key, self._value, self._copy = key, value, None

    def copy(self) -> None:
        if self._copy is None:
            self._copy = with_own_memory(self._value)
            self._put(self._copy)

    def restore(self) -> None:
        """Unless the program has put something else there, or the unit has other memory now."""
        if self._now() is self._copy and any(map(_lies_in_emptied, tensors_in(self._value))):
            self._put(self._value)

    def _now(self) -> Any:
        container: Any = self._container()
        if isinstance(container, nn.Module):
            return getattr(container, self._key, None)
        if container is None or isinstance(container, dict):
            return container and container.get(self._key)
        return container[self._key] if self._key < len(container) else None

    def _put(self, value: Any) -> None:
        container: Any = self._container()
        if isinstance(container, nn.Module):
            setattr(container, self._key, value)
        else:
            container[self._key] = value


def aliases_in(container: Any, key: Any, value: Any, levels: int = 3) -> Iterator[LeftAlias]:
    """What shares such memory in `value`, which is an attribute of a module, or an item of a list or dict.

    Unsharded parameters do not count: recurrent layers keep theirs in a list, and modules of a flat unit as attributes.
    """
    if isinstance(value, torch.Tensor | tuple):
        tensors = [value] if isinstance(value, torch.Tensor) else [each for each in value if torch.is_tensor(each)]
        if any(unsharded_name(each) is None and _lies_in_emptied(each) for each in tensors):
            yield LeftAlias(container, key, value)
    elif levels and isinstance(value, dict):
        for name, item in list(value.items())[-_MOST:]:
            yield from aliases_in(value, name, item, levels - 1)
    elif levels and isinstance(value, list | deque):
        for number in range(max(len(value) - _MOST, 0), len(value)):
            yield from aliases_in(value, number, value[number], levels - 1)


def _lies_in_emptied(tensor: torch.Tensor) -> bool:
    parts = parts_of(tensor)
    if parts:
        return any(map(_lies_in_emptied, parts))
    try:
        return storage_key(tensor.untyped_storage()) in EMPTIED
    except NotImplementedError:
        return False  # sparse: its indices and values are new
