"""The full buffer: a unit's parameters made whole, where the modules compute with them."""

from __future__ import annotations

import torch

from ..comm.interface import Pool
from ..layout.rows import place
from .buffers import Buffer
from .master import Master
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

    @classmethod
    def over(cls, master: Master, members: list[int], device: torch.device, pool: Pool | None) -> FullBuffer:
        """One for the master shard; or the master shard itself, where it is whole, and in the dtypes of compute."""
        alone = not members or master.cuts[0].world == 1
        cast = any(kind.compute != kind.original for kind in master.segments.kinds)
        if alone and not cast and master.layout.whole_alike and master.device == device:
            return Uncut(master, members)
        return cls(master, members, device, pool)

    def parameter(self, shard: Shard, index: int) -> torch.Tensor:
        """A parameter's place; to be called while memory is held."""
        cut, dtype = shard.cuts[index], shard.segments.dtypes(index).compute
        return self.tensor(dtype, self.offsets.get(index, 0), cut.shape, cut.stride)


class Uncut(FullBuffer):
    """The master shard as full buffer: nothing is gathered, and its memory stays."""

    def __init__(self, master: Master, members: list[int]):
        super().__init__(master, members, torch.device("meta"), None)
        self.device = master.device
        self.storage = master.storage

    def take(self) -> None:
        pass

    def release(self) -> None:
        pass
