"""A group of one rank: nothing is sent, and the rest of the engine need not know."""

from __future__ import annotations

import torch

from ..layout.collective_tensors import PackingRule
from ..torch_private import foreach_copy
from .interface import Done, Label, Traits, Transport, Work


class SoloTransport(Transport):
    rank = 0
    world = 1
    traits = Traits(
        gathers_groups=True,
        reduces_groups=True,
        packing=PackingRule(least=9),  # nothing is sent, but packing would cost copies
        in_place_only=True,
        reduces_in_place=True,
        gathers_on_any_stream=True,
    )

    def all_gather(self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], label: Label | None = None) -> Work:
        return Done()

    def reduce_scatter(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], label: Label | None = None, *, average: bool
    ) -> Work:
        if inputs is not outputs:
            foreach_copy(outputs, inputs)
        return Done()

    def all_reduce(self, tensors: list[torch.Tensor], label: Label | None = None, *, average: bool) -> Work:
        return Done()
