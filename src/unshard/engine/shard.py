"""One rank's piece of a unit, laid out flat: what a gather sends."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from ..comm.interface import Transport
from ..layout.flat import FlatCut
from ..layout.rows import ROWS, Cut, Grouping, Item, Layout, Region, place
from .precision import Segments


class Shard:
    """The regions a gather sends and where each parameter's piece lies in them.

    `members` are the parameters it holds; others take part in the numbering only. A subclass says what memory it is.
    """

    def __init__(
        self,
        cuts: Sequence[Cut | FlatCut],
        segments: Segments,
        transport: Transport,
        members: Sequence[int],
        layout: Layout = ROWS,
    ):
        self.cuts = cuts
        self.layout = layout
        self.segments = segments
        self.rank = transport.rank
        itemsizes = segments.itemsizes("compute")
        self.items = [Item(cut, kind, itemsizes[kind]) for cut, kind in zip(cuts, segments.of, strict=True)]
        grouping = Grouping.GROUPED if transport.gathers_groups else Grouping.WHOLE
        self.regions: tuple[Region, ...] = layout.arrange(self.items, members, grouping, transport.few)
        self.placement = place(
            self.regions, segments.itemsizes("original"), copies=1, piece_alignment=transport.piece_alignment
        )
        self._flat = torch.empty(0)

    def run_tensors(self, region: int) -> list[torch.Tensor]:
        """A region's runs as flat tensors of their original dtypes."""
        spot, runs = self.placement.places[region], self.regions[region].runs
        return [
            self.flat(self.segments.kinds[run.segment].original, spot.offset + start, run.numel)
            for run, start in zip(runs, spot.runs, strict=True)
        ]

    def piece_bytes(self, region: int) -> torch.Tensor:
        """A region's piece, padding included, as bytes."""
        spot = self.placement.places[region]
        return self.flat(torch.uint8, spot.offset, spot.piece)

    def flat(self, dtype: torch.dtype, offset: int, numel: int) -> torch.Tensor:
        """Some of it as a flat tensor; `offset` in bytes."""
        return self._flat[offset : offset + numel * dtype.itemsize].view(dtype)

    def spots(self) -> Iterator[tuple[int, int]]:
        """Each parameter in the order in which they lie, and the byte where it begins."""
        for region, spot in zip(self.regions, self.placement.places, strict=True):
            for run, start in zip(region.runs, spot.runs, strict=True):
                itemsize = self.segments.kinds[run.segment].original.itemsize
                for index, first in region.begins(run, self.rank):
                    yield index, spot.offset + start + first * itemsize
