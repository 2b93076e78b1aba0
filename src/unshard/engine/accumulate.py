"""Whole gradients kept on this rank between backwards that do not synchronise."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import torch

from ..layout.rows import place
from ..torch_private import foreach_add, foreach_copy, storage_uses
from .buffers import Buffer
from .master import Master


class LocalGradients:
    """Sums of unreduced gradients, nearly always in the reduce dtype, one flat buffer per unit."""

    def __init__(self, master: Master, device: torch.device):
        itemsizes = master.segments.itemsizes("kept")
        items = [replace(item, cut=item.cut.whole, itemsize=itemsizes[item.segment]) for item in master.items]
        regions = master.layout.spread(items, range(len(items)))
        placement = place(regions, itemsizes, items[0].cut.world if items else 1)
        self._buffer = Buffer(placement.nbytes, device)
        self._views = {}
        for region, spot in zip(regions, placement.places, strict=True):
            run = region.runs[0]
            for index, start in zip(run.members, run.starts, strict=True):
                dtype, cut = master.segments.dtypes(index).kept, master.cuts[index]
                self._views[index] = self._buffer.tensor(
                    dtype, spot.offset + start * dtype.itemsize, cut.shape, cut.stride
                )
        self._flats: dict[int, torch.Tensor] = {}
        self._uses = storage_uses(self._buffer.storage)
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

    def flat(self, length: int) -> torch.Tensor:
        """The sums as one tensor, where parameters lie end to end: zero where there are none."""
        if length not in self._flats:
            dtype = next(iter(self._views.values())).dtype
            self._flats[length] = self._buffer.tensor(dtype, 0, (length,))
            self._uses += 1
        whole = self._flats[length]
        if len(self._present) < len(self._views):
            kept = [view.clone() for view in self.sums().values()]
            whole.zero_()
            foreach_copy(list(self.sums().values()), kept)
        return whole

    def forget(self, indices: Iterable[int]) -> None:
        self._present.difference_update(indices)

    def clear(self) -> bool:
        """Drop everything; false if somebody holds the memory, who must be left it."""
        self._present.clear()
        if self._buffer.held and storage_uses(self._buffer.storage) > self._uses:
            return False
        self._buffer.release()
        return True
