"""`register_comm_hook`: a user's function reduces the gradients of a wrapped model."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import torch

from ..comm.interface import Done, Label, Tensors, Transport, Work
from ..engine.api import division
from ..torch_private import low_precision_of


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

    def all_gather(self, outputs: Tensors, inputs: Tensors, *, label: Label | None = None) -> Work:
        return self._inner.all_gather(outputs, inputs, label=label)

    def reduce_scatter(self, outputs: Tensors, inputs: Tensors, *, label: Label | None = None, average: bool) -> Work:
        for output, unreduced in zip(outputs, inputs, strict=True):
            if self.world > 1:
                self._hook(self._state, unreduced, output)
            else:  # one rank: the unit is not sharded
                self._hook(self._state, unreduced)
                output.copy_(unreduced[: output.numel()])
        return Done()

    def all_reduce(self, tensors: list[torch.Tensor], *, label: Label | None = None, average: bool) -> Work:
        for tensor in tensors:
            self._hook(self._state, tensor)
        return Done()

    def carrier(self, dtype: torch.dtype) -> torch.dtype:
        return self._inner.carrier(dtype)


def compressed_dtype(hook: Callable[..., Any], state: Any, group: Any, originals: Iterable[torch.dtype]) -> Any:
    """The dtype that the hook compresses gradients to and does nothing else; None if it does, or may do, more.

    The engine reduces in that dtype by itself: as `MixedPrecision(reduce_dtype=...)` does, with overlap, on any device.
    `originals`: the dtypes of the unit's parameters.
    """
    dtype = low_precision_of(hook)
    usual = division(group.size(), 1, frozenset(), None, False, in_halves=True)
    factors = (
        getattr(state, "gradient_predivide_factor", None),
        getattr(state, "gradient_postdivide_factor", None),
    )
    same_ranks = getattr(state, "process_group", None) is group and factors == (usual.before, usual.after)
    restores = {getattr(state, "parameter_type", None)} == set(originals)
    return dtype if same_ranks and restores else None


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
