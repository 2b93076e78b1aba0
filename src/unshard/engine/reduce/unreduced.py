"""Gradients that backwards without synchronisation leave: summed up on this rank, not reduced."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import torch

from ...layout.collective_tensors import lay_out
from ...torch_private import foreach_add, foreach_copy, storage_use_count
from ..params.buffers import Buffer
from ..params.shard import Shard


class UnreducedGradients:
    """Sums of unreduced gradients, nearly always in the reduce dtype, one flat buffer per unit."""

    def __init__(self, shard: Shard, device: torch.device):
        itemsizes = shard.segments.itemsizes("kept")
        items = [
            replace(item, sharding=item.sharding.unsharded, itemsize=itemsizes[item.segment]) for item in shard.items
        ]
        regions = shard.layout.unsharded_regions(items, range(len(items)))
        buffer_layout = lay_out(regions, itemsizes, items[0].sharding.world if items else 1)
        self._buffer = Buffer(buffer_layout.nbytes, device)
        self._views = {}
        for region, at in zip(regions, buffer_layout.ranges, strict=True):
            run = region.runs[0]
            for index, start in zip(run.members, run.starts, strict=True):
                dtype, sharding = shard.segments.dtypes(index).kept, shard.shardings[index]
                self._views[index] = self._buffer.tensor(
                    dtype, at.offset + start * dtype.itemsize, sharding.shape, sharding.stride
                )
        self._flats: dict[int, torch.Tensor] = {}
        self._uses = storage_use_count(self._buffer.storage)
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
        """The sums of a flat unit as one tensor, zero where there are none."""
        if length not in self._flats:
            dtype = next(iter(self._views.values())).dtype
            self._flats[length] = self._buffer.tensor(dtype, 0, (length,))
            self._uses += 1
        flat = self._flats[length]
        if len(self._present) < len(self._views):
            kept = [view.clone() for view in self.sums().values()]
            flat.zero_()
            foreach_copy(list(self.sums().values()), kept)
        return flat

    @property
    def address(self) -> int:
        return self._buffer.storage.data_ptr()

    def stay(self) -> None:
        """Keep the memory where it is."""
        self._buffer.stay()

    def know(self, present: Iterable[int]) -> None:
        """There are sums of these parameters, and of no others."""
        self._present = set(present)

    def forget(self, indices: Iterable[int]) -> None:
        self._present.difference_update(indices)

    def clear(self) -> bool:
        """Drop everything; false if a user holds the memory."""
        self._present.clear()
        if self._buffer.held and storage_use_count(self._buffer.storage) > self._uses:
            return False
        self._buffer.release()
        return True
