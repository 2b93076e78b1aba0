"""Two transports over the same ranks, one for all-gathers and one for reduce-scatters."""

from __future__ import annotations

from collections.abc import Callable

import torch

from .interface import Label, Transport, Work


class SplitTransport(Transport):
    """Reduce-scatters have a queue of their own and do not wait behind all-gathers.

    Their transport is made for the first one: it may need a process group that does not exist yet, which all ranks have
    to make together. A job that only evaluates has no use for it.
    """

    def __init__(self, gathers: Transport, make_reduce_scatters: Callable[[], Transport]):
        """`make_reduce_scatters` makes a transport of the same traits."""
        self.rank, self.world, self.traits, self.pool = gathers.rank, gathers.world, gathers.traits, gathers.pool
        self._gathers, self._make_reduce_scatters = gathers, make_reduce_scatters
        self._reduce_scatters: Transport | None = None

    def carrier(self, dtype: torch.dtype) -> torch.dtype:
        return self._gathers.carrier(dtype)

    def all_gather(self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], label: Label | None = None) -> Work:
        return self._gathers.all_gather(outputs, inputs, label)

    def reduce_scatter(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], label: Label | None = None, *, average: bool
    ) -> Work:
        if self._reduce_scatters is None:
            self._reduce_scatters = self._make_reduce_scatters()
        return self._reduce_scatters.reduce_scatter(outputs, inputs, label, average=average)

    def all_reduce(self, tensors: list[torch.Tensor], label: Label | None = None, *, average: bool) -> Work:
        return self._gathers.all_reduce(tensors, label, average=average)
