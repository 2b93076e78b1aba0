"""The master shard: this rank's piece of the unit in the original dtypes, one flat storage that stays."""

from __future__ import annotations

from math import prod

import torch

from ..comm.interface import Transport
from ..layout.rows import Cut, Grouping, Item, Region, arrange, place
from ..torch_private import contiguous_stride
from .precision import Segments

META = torch.device("meta")


class Master:
    """Storage, the regions a gather sends, and each parameter's local tensor.

    Local tensors lie on storage slices at offset 0: a DTensor over a tensor with a storage offset can be neither
    saved nor deep-copied, and a slice saves only the parameter's own bytes. On meta there is no storage.
    """

    def __init__(self, cuts: list[Cut], segments: Segments, transport: Transport, device: torch.device, pin: bool):
        self.cuts = cuts
        self.segments = segments
        self.device = device
        itemsizes = segments.itemsizes("compute")
        self.items = [Item(cut, kind, itemsizes[kind]) for cut, kind in zip(cuts, segments.of, strict=True)]
        grouping = Grouping.GROUPED if transport.gathers_groups else Grouping.WHOLE
        self.regions: tuple[Region, ...] = arrange(self.items, range(len(cuts)), grouping)
        self.placement = place(
            self.regions, segments.itemsizes("original"), copies=1, piece_alignment=transport.piece_alignment
        )
        # Zeros: padding is read by flat optimizers and must never hold anything else. Memory that stays, not a
        # Buffer: slices of an emptied storage would dangle.
        nbytes = 0 if device == META else self.placement.nbytes
        self._flat = torch.zeros(nbytes, dtype=torch.uint8, device=device, pin_memory=pin and device != META)
        self.locals = self._make_locals(transport.rank)

    def _make_locals(self, rank: int) -> list[torch.Tensor]:
        tensors = [
            torch.empty(
                cut.local_shape(rank) if self.device == META or not prod(cut.local_shape(rank)) else 0,
                dtype=self.segments.dtypes(index).original,
                device=self.device,
            )
            for index, cut in enumerate(self.cuts)
        ]
        if self.device == META:
            return tensors
        storage = self._flat.untyped_storage()
        for region, spot in zip(self.regions, self.placement.places, strict=True):
            for run, start in zip(region.runs, spot.runs, strict=True):
                for index, first in zip(run.members, run.starts, strict=True):
                    shape, itemsize = self.cuts[index].local_shape(rank), tensors[index].element_size()
                    if prod(shape):
                        begin = spot.offset + start + first * itemsize
                        slice_ = storage[begin : begin + prod(shape) * itemsize]
                        tensors[index].set_(slice_, 0, shape, contiguous_stride(shape))
        return tensors

    def run_tensors(self, region: int) -> list[torch.Tensor]:
        """A region's runs as flat tensors of their original dtypes."""
        spot, runs = self.placement.places[region], self.regions[region].runs
        return [
            self._tensor(self.segments.kinds[run.segment].original, spot.offset + start, run.numel)
            for run, start in zip(runs, spot.runs, strict=True)
        ]

    def piece_bytes(self, region: int) -> torch.Tensor:
        """A region's piece, padding included, as bytes."""
        spot = self.placement.places[region]
        return self._tensor(torch.uint8, spot.offset, spot.piece)

    def _tensor(self, dtype: torch.dtype, offset: int, numel: int) -> torch.Tensor:
        return self._flat[offset : offset + numel * dtype.itemsize].view(dtype)
