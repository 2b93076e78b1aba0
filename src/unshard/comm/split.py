"""Two transports over the same ranks, one for gathers and one for reductions."""

from __future__ import annotations

from collections.abc import Callable

import torch

from .interface import Transport, Work
from .order import Event


class SplitTransport(Transport):
    """Reductions have a queue of their own and do not wait behind gathers."""

    def __init__(self, gathers: Transport, reductions: Transport):
        self.rank, self.world = gathers.rank, gathers.world
        self._gathers, self._reductions = gathers, reductions
        self.gathers_groups, self.reduces_groups = gathers.gathers_groups, reductions.reduces_groups
        self.few = min(gathers.few, reductions.few)
        self.in_place_only, self.stays_in_lane = gathers.in_place_only, gathers.stays_in_lane
        self.waits_in_stream = reductions.waits_in_stream
        self.piece_alignment = max(gathers.piece_alignment, reductions.piece_alignment)

    def announce(self, event: Event, describe: Callable[[], str]) -> None:
        (self._reductions if event.reduces else self._gathers).announce(event, describe)

    def carrier(self, dtype: torch.dtype) -> torch.dtype:
        return self._gathers.carrier(dtype)

    def gather(self, outputs: list[torch.Tensor], inputs: list[torch.Tensor]) -> Work:
        return self._gathers.gather(outputs, inputs)

    def reduce_scatter(self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], *, average: bool) -> Work:
        return self._reductions.reduce_scatter(outputs, inputs, average=average)

    def all_reduce(self, tensors: list[torch.Tensor], *, average: bool) -> Work:
        return self._reductions.all_reduce(tensors, average=average)
