"""Whole gradients kept on this rank between backwards that do not synchronise."""

from __future__ import annotations

import torch

from ..layout.rows import Cut, Grouping, Item, Region, arrange, place
from ..torch_private import foreach_add, foreach_copy
from .buffers import Buffer
from .master import Master


class LocalGradients:
    """Sums of unreduced gradients, nearly always in the reduce dtype, one flat buffer per unit."""

    def __init__(self, master: Master, device: torch.device):
        itemsizes = master.segments.itemsizes("kept")
        items = [Item(Cut(item.cut.shape, 1), item.segment, itemsizes[item.segment]) for item in master.items]
        regions = [
            Region(arrange(items, (index,), Grouping.BY_SEGMENT)[0].runs, packed=False)
            for index, item in enumerate(items)
            if item.cut.numel
        ]
        placement = place(regions, itemsizes, 1)
        self._buffer = Buffer(placement.nbytes, device)
        self._views = {
            region.members[0]: self._buffer.tensor(
                master.segments.dtypes(region.members[0]).kept,
                spot.offset,
                master.cuts[region.members[0]].shape,
            )
            for region, spot in zip(regions, placement.places, strict=True)
        }
        self._buffer.release()
        self._present: set[int] = set()

    def add(self, gradients: dict[int, torch.Tensor]) -> None:
        self._buffer.take()
        new = [index for index in gradients if index not in self._present]
        old = [index for index in gradients if index in self._present]
        if new:
            foreach_copy([self._views[i] for i in new], [gradients[i] for i in new])
        if old:
            foreach_add([self._views[i] for i in old], [gradients[i] for i in old])
        self._present.update(new)

    def sums(self) -> dict[int, torch.Tensor]:
        return {index: self._views[index] for index in sorted(self._present)}

    def clear(self) -> None:
        self._present.clear()
        self._buffer.release()
