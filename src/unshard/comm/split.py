"""Two transports over the same ranks, one for all-gathers and one for reduce-scatters."""

from __future__ import annotations

from collections.abc import Callable

import torch

from .interface import Label, Transport, Work


class SplitTransport(Transport):
    """Reduce-scatters have a queue of their own and do not wait behind all-gathers.

    Their transport may need a process group that does not exist yet, which all ranks have to make together. It is made
    with the first unit that is gathered in grad mode: later, ranks that disagree on their order would wait in there,
    where nothing tells them. A job that only evaluates has no use for it.
    """

    def __init__(self, gathers: Transport, make_reductions: Callable[[], Transport]):
        """`make_reductions` makes a transport of the same traits."""
        self.rank, self.world, self.traits, self.pool = gathers.rank, gathers.world, gathers.traits, gathers.pool
        self._gathers, self._make_reductions = gathers, make_reductions
        self._reductions: Transport | None = None

    def carrier(self, dtype: torch.dtype) -> torch.dtype:
        return self._gathers.carrier(dtype)

    def all_gather(self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], label: Label | None = None) -> Work:
        work = self._gathers.all_gather(outputs, inputs, label)
        if self._reductions is None and label is not None and torch.is_grad_enabled():
            self._reductions = self._make_reductions()
        return work

    def reduce_scatter(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], label: Label | None = None, *, average: bool
    ) -> Work:
        if self._reductions is None:  # nothing was gathered in grad mode: units were kept from before
            self._reductions = self._make_reductions()
        return self._reductions.reduce_scatter(outputs, inputs, label, average=average)

    def all_reduce(self, tensors: list[torch.Tensor], label: Label | None = None, *, average: bool) -> Work:
        return self._gathers.all_reduce(tensors, label, average=average)
