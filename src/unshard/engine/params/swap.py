"""Swaps what the modules hold: sharded parameters at rest, unsharded ones while they compute."""

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
    """By assignment into the modules' dicts, from lists made once."""

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
        """To be called when the params were given other parameters."""
        unsharded = [param.unsharded for param in self._params if param.unsharded is not None]
        self.unsharded = unsharded if len(unsharded) == len(self._params) else []
        """The unsharded parameter of every param, once all have one."""
        self._at_rest = [param.sharded for param in self._params]
        self._unsharded_values = [param.unsharded for param in self._plain]
        self._sharded_values: Sequence[Any] = [param.sharded for param in self._plain]

    def show_unsharded(self, follow_requires_grad: bool = False) -> None:
        """`follow_requires_grad`: users freeze and unfreeze the parameters they see at rest."""
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
    """Memory in which recurrent layers keep their unsharded parameters.

    On a GPU such a layer moves weights it has not seen before into one chunk, in cuDNN's order. Later all-gathers would
    fill memory that nobody reads, and the layer would silently compute with the weights of the first step. So what is
    gathered is copied into the chunk, and the chunk is emptied with the unsharded buffer.
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
        """Unsharded parameters that no longer lie at their places; only while the unsharded buffer is held."""
        pairs = [(param.unsharded, param.unsharded_view) for param in self._params]
        return [(p, v) for p, v in pairs if p is not None and v is not None and p.data_ptr() != v.data_ptr()]
