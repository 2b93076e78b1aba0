"""The full buffer: a unit's parameters made whole, where the modules compute with them."""

from __future__ import annotations

import torch

from ..comm.interface import Pool
from ..layout.rows import place
from .buffers import Buffer
from .shard import Shard


class FullBuffer(Buffer):
    """Every parameter in one piece, in regions padded to the master shard's pieces; empty when not in use."""

    def __init__(self, master: Shard, members: list[int], device: torch.device, pool: Pool | None):
        regions = master.layout.spread(master.items, members)
        itemsizes = master.segments.itemsizes("compute")
        whole = place(regions, itemsizes, master.cuts[0].world if regions else 1)
        super().__init__(whole.nbytes, device, pool)
        self.offsets = {
            index: spot.offset + start * itemsizes[region.runs[0].segment]
            for region, spot in zip(regions, whole.places, strict=True)
            for index, start in zip(region.runs[0].members, region.runs[0].starts, strict=True)
        }

    def parameter(self, shard: Shard, index: int) -> torch.Tensor:
        """A parameter's place; to be called while memory is held."""
        cut, dtype = shard.cuts[index], shard.segments.dtypes(index).compute
        return self.tensor(dtype, self.offsets.get(index, 0), cut.shape, cut.stride)
