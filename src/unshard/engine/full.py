"""The full buffer: a unit's parameters made whole, where the modules compute with them."""

from __future__ import annotations

import torch

from ..comm.interface import Pool
from ..layout.rows import Grouping, Region, arrange, place
from .buffers import Buffer
from .shard import Shard


class FullBuffer(Buffer):
    """Every parameter in a region of its own, padded to the master shard's pieces; empty when not in use."""

    def __init__(self, master: Shard, members: list[int], device: torch.device, pool: Pool | None):
        singles = [region for index in members for region in _single(master, index)]
        whole = place(singles, master.segments.itemsizes("compute"), master.cuts[0].world if singles else 1)
        super().__init__(whole.nbytes, device, pool)
        self.offsets = {region.members[0]: spot.offset for region, spot in zip(singles, whole.places, strict=True)}

    def parameter(self, shard: Shard, index: int) -> torch.Tensor:
        """A parameter's place; to be called while memory is held."""
        return self.tensor(shard.segments.dtypes(index).compute, self.offsets.get(index, 0), shard.cuts[index].shape)


def _single(shard: Shard, index: int) -> list[Region]:
    """The parameter in a region of its own; none if it has no elements."""
    return [Region(region.runs, packed=False) for region in arrange(shard.items, (index,), Grouping.BY_SEGMENT)]
