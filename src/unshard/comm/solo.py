"""A world of one rank: nothing is sent, and the rest of the engine need not know."""

from __future__ import annotations

import torch

from ..torch_private import foreach_copy
from .interface import Done, Transport, Work


class SoloTransport(Transport):
    rank = 0
    world = 1
    gathers_groups = True
    reduces_groups = True
    in_place_only = True
    reduces_in_place = True
    stays_in_lane = True
    few = 8  # there is no group at all, but packing would cost copies

    def gather(self, outputs: list[torch.Tensor], inputs: list[torch.Tensor]) -> Work:
        return Done()

    def reduce_scatter(self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], *, average: bool) -> Work:
        if inputs is not outputs:
            foreach_copy(outputs, inputs)
        return Done()

    def all_reduce(self, tensors: list[torch.Tensor], *, average: bool) -> Work:
        return Done()
