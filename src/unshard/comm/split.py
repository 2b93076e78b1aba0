"""Two transports over the same ranks, one for all-gathers and one for reductions."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch

from .interface import Label, Transport, Work


class SplitTransport(Transport):
    """Reductions have a queue of their own and do not wait behind gathers."""

    def __init__(self, gathers: Transport, reductions: Transport):
        self.rank, self.world = gathers.rank, gathers.world
        self._gathers, self._reductions = gathers, reductions
        gathering, reducing = gathers.traits, reductions.traits
        self.traits = dataclasses.replace(
            reducing,
            gathers_groups=gathering.gathers_groups,
            unpacked_limit=min(gathering.unpacked_limit, reducing.unpacked_limit),
            in_place_only=gathering.in_place_only,
            gathers_on_any_stream=gathering.gathers_on_any_stream,
            piece_alignment=max(gathering.piece_alignment, reducing.piece_alignment),
        )

    def carrier(self, dtype: torch.dtype) -> torch.dtype:
        return self._gathers.carrier(dtype)

    def raised(self, text: str) -> bool:
        return self._gathers.raised(text)

    def wrapped(self, wrap: Callable[[Transport], Transport]) -> Transport:
        return SplitTransport(self._gathers.wrapped(wrap), self._reductions.wrapped(wrap))

    def all_gather(self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], label: Label | None = None) -> Work:
        return self._gathers.all_gather(outputs, inputs, label)

    def reduce_scatter(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], label: Label | None = None, *, average: bool
    ) -> Work:
        return self._reductions.reduce_scatter(outputs, inputs, label, average=average)

    def all_reduce(self, tensors: list[torch.Tensor], label: Label | None = None, *, average: bool) -> Work:
        return self._reductions.all_reduce(tensors, label, average=average)
