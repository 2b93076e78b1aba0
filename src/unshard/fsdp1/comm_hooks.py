"""`register_comm_hook`: a user's function reduces the gradients of a wrapped model."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from ..comm.interface import Done, Label, Transport, Work


class HookedTransport(Transport):
    """Gathers as the transport inside; gradients are given to a user's hook.

    A hook of a sharded unit gets (state, flat gradient, this rank's shard of it to fill); one of a unit that is not
    sharded gets (state, gradient) and changes it.
    """

    def __init__(self, inner: Transport, state: Any, hook: Callable[..., Any]):
        self._inner, self._state, self._hook = inner, state, hook
        self.rank, self.world = inner.rank, inner.world
        self.traits = dataclasses.replace(inner.traits, reduces_in_place=False, waits_in_stream=False)
        self.pool = inner.pool

    def all_gather(self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], label: Label | None = None) -> Work:
        return self._inner.all_gather(outputs, inputs, label)

    def reduce_scatter(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], label: Label | None = None, *, average: bool
    ) -> Work:
        for output, unreduced in zip(outputs, inputs, strict=True):
            self._hook(self._state, unreduced, output)
        return Done()

    def all_reduce(self, tensors: list[torch.Tensor], label: Label | None = None, *, average: bool) -> Work:
        for tensor in tensors:
            self._hook(self._state, tensor)
        return Done()

    def carrier(self, dtype: torch.dtype) -> torch.dtype:
        return self._inner.carrier(dtype)


def with_results_copied(hook: Callable[..., Any]) -> Callable[..., None]:
    """The same hook, whose result is where the transport expects it.

    PyTorch's low-precision hooks (`torch.distributed.algorithms._comm_hooks.default_hooks`) replace the memory of the
    tensors that they get.
    """

    def call(state: Any, *tensors: torch.Tensor) -> None:
        given = [each.detach() for each in tensors]
        hook(state, *given)
        if given[-1].data_ptr() != tensors[-1].data_ptr():
            tensors[-1].copy_(given[-1])

    return call
