"""Swaps the parameters that modules hold: sharded ones at rest, unsharded ones while they compute."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter, is_not, setitem
from typing import Any

import torch
from torch import nn

from ...torch_private import foreach_copy
from .param import ManagedParam

_requires_grad: Callable[[torch.Tensor], bool] = attrgetter("requires_grad")  # no Python function: hot


class ParamSwap:
    """Assigns into the `_parameters` of modules, from lists that are made once."""

    def __init__(self, params: Iterable[ManagedParam]):
        self._params = list(params)
        locations = [(location, param) for param in self._params for location in param.locations]
        plain = [(location, param) for location, param in locations if location.plain]
        self._dicts = [location.parameters for location, _ in plain]
        self._names = [location.name for location, _ in plain]
        self._plain = [param for _, param in plain]
        self._special = [(location, param) for location, param in locations if not location.plain]
        self._cudnn = CudnnWeights(param for _, param in self._special)
        self.refresh()

    def refresh(self) -> None:
        """Call this after the params were given other parameters."""
        unsharded = [param.unsharded for param in self._params if param.unsharded is not None]
        self.unsharded = unsharded if len(unsharded) == len(self._params) else []
        """The unsharded parameters of all params, once all have one; else empty."""
        self._at_rest = [param.sharded for param in self._params]
        self._unsharded_values = [param.unsharded for param in self._plain]
        self._sharded_values: Sequence[Any] = [param.sharded for param in self._plain]

    def show_unsharded(self, follow_requires_grad: bool = False) -> None:
        """`follow_requires_grad`: copy it from the sharded parameters, which users freeze and unfreeze."""
        if follow_requires_grad and any(
            map(is_not, map(_requires_grad, self.unsharded), map(_requires_grad, self._at_rest))
        ):
            for unsharded, at_rest in zip(self.unsharded, self._at_rest, strict=True):
                unsharded.requires_grad_(at_rest.requires_grad)
        deque(map(setitem, self._dicts, self._names, self._unsharded_values), maxlen=0)  # a loop in C
        if self._special:
            self._cudnn.fill()
            for location, param in self._special:
                assert param.unsharded is not None
                location.put(param.unsharded)

    def show_sharded(self) -> None:
        deque(map(setitem, self._dicts, self._names, self._sharded_values), maxlen=0)
        if self._special:
            self._cudnn.empty()
            for location, param in self._special:
                location.put(self._at_rest_of(param))

    def _at_rest_of(self, param: ManagedParam) -> Any:
        return param.sharded

    def show_sliced(self) -> None:
        for param in self._params:
            assert param.sliced is not None
            param.sliced.requires_grad_(param.sharded.requires_grad)
        deque(map(setitem, self._dicts, self._names, [param.sliced for param in self._plain]), maxlen=0)
        if self._special:
            self._cudnn.empty()
            for location, param in self._special:
                assert param.sliced is not None
                location.put(param.sliced)


class CudnnWeights:
    """The memory to which recurrent layers move their unsharded parameters on a GPU.

    Such a layer moves weights that it has not seen before into one allocation, in cuDNN's order. Later all-gathers
    would fill memory that nobody reads, and the layer would silently compute with the weights of the first step. So
    `fill` copies the gathered values there, and `empty` frees that memory with the unsharded buffer.
    """

    def __init__(self, params: Iterable[ManagedParam]):
        self._params = list(params)
        self._filled = False
        self._emptied: list[tuple[torch.UntypedStorage, int]] = []

    def fill(self) -> None:
        self._filled = True
        for storage, nbytes in self._emptied:
            storage.resize_(nbytes)
        self._emptied = []
        moved = self._moved()
        if moved:
            foreach_copy([unsharded.data for unsharded, _ in moved], [view for _, view in moved])

    def empty(self) -> None:
        if not self._filled:
            return
        self._filled = False
        storages = {each.untyped_storage().data_ptr(): each.untyped_storage() for each, _ in self._moved()}
        self._emptied = [(storage, storage.nbytes()) for storage in storages.values()]
        for storage in storages.values():
            storage.resize_(0)

    def _moved(self) -> list[tuple[nn.Parameter, torch.Tensor]]:
        """Return the unsharded parameters outside the unsharded buffer. Only while that holds memory."""
        pairs = [(param.unsharded, param.unsharded_view) for param in self._params]
        return [(p, v) for p, v in pairs if p is not None and v is not None and p.data_ptr() != v.data_ptr()]
