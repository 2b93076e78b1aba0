"""The shard: this rank's piece of a param group in the original dtypes, one flat tensor that stays."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from math import prod

import torch

from ...comm.interface import Transport
from ...layout.collective_tensors import ROW_LAYOUT, Grouping, LayoutParam, Region, UnitLayout, lay_out
from ...layout.flat import FlatSharding
from ...layout.rows import RowSharding
from ...torch_private import contiguous_stride
from ..dtype_rules import Segments
from .offload import OffloadPlan

META = torch.device("meta")
_SPARE = 16  # bytes behind a shard on the host, so that its last parameter can be widened


class ShardLayout:
    """The regions a gather sends and where each parameter's piece lies in them.

    `members` are the parameters it holds; others take part in the numbering only. A subclass says what memory it is.
    """

    def __init__(
        self,
        shardings: Sequence[RowSharding | FlatSharding],
        segments: Segments,
        transport: Transport,
        members: Sequence[int],
        layout: UnitLayout = ROW_LAYOUT,
    ):
        self.shardings = shardings
        self.layout = layout
        self.segments = segments
        self.rank = transport.rank
        itemsizes = segments.itemsizes("compute")
        self.items = [
            LayoutParam(sharding, kind, itemsizes[kind]) for sharding, kind in zip(shardings, segments.of, strict=True)
        ]
        grouping = Grouping.GROUPED if transport.traits.gathers_groups else Grouping.ONE_REGION
        self.regions: tuple[Region, ...] = layout.collective_regions(
            self.items, members, grouping, transport.traits.packing
        )
        self.buffer_layout = lay_out(
            self.regions, segments.itemsizes("original"), copies=1, piece_alignment=transport.traits.piece_alignment
        )
        self._flat = torch.empty(0)

    def run_tensors(self, region: int) -> list[torch.Tensor]:
        """A region's runs as flat tensors of their original dtypes."""
        at, runs = self.buffer_layout.ranges[region], self.regions[region].runs
        return [
            self.flat(self.segments.kinds[run.segment].original, at.offset + start, run.numel)
            for run, start in zip(runs, at.runs, strict=True)
        ]

    def piece_bytes(self, region: int) -> torch.Tensor:
        """A region's piece, padding included, as bytes."""
        at = self.buffer_layout.ranges[region]
        return self.flat(torch.uint8, at.offset, at.piece)

    def flat(self, dtype: torch.dtype, offset: int, numel: int) -> torch.Tensor:
        """Some of it as a flat tensor; `offset` in bytes."""
        return self._flat[offset : offset + numel * dtype.itemsize].view(dtype)

    def ranges(self) -> Iterator[tuple[int, int]]:
        """Each parameter in the order in which they lie, and the byte where it begins."""
        for region, at in zip(self.regions, self.buffer_layout.ranges, strict=True):
            for run, start in zip(region.runs, at.runs, strict=True):
                itemsize = self.segments.kinds[run.segment].original.itemsize
                for index, first in region.begins(run, self.rank):
                    yield index, at.offset + start + first * itemsize


class Shard(ShardLayout):
    """Storage, and each parameter's local tensor.

    Local tensors lie on storage slices at offset 0: a DTensor over a tensor with a storage offset can be neither
    saved nor deep-copied, and a slice saves only the parameter's own bytes. On meta there is no storage.
    """

    def __init__(
        self,
        shardings: Sequence[RowSharding | FlatSharding],
        segments: Segments,
        transport: Transport,
        members: Sequence[int],
        device: torch.device,
        offload: OffloadPlan,
        layout: UnitLayout = ROW_LAYOUT,
    ):
        """`device`: that of the offload plan, or meta."""
        super().__init__(shardings, segments, transport, members, layout)
        self.device = device
        # Zeros: padding is read by flat optimizers and must never hold anything else. Memory that stays, not a
        # Buffer: slices of an emptied storage would dangle.
        if device == META:
            self._flat = torch.empty(0, dtype=torch.uint8, device=META)
        else:
            nbytes = self.buffer_layout.nbytes
            spare = _SPARE if layout is ROW_LAYOUT and device.type == "cpu" else 0
            self._flat = offload.memory(nbytes + spare)[:nbytes]
        self.locals = self._make_locals()

    @property
    def memory(self) -> torch.Tensor:
        """All of it, as bytes."""
        return self._flat

    def widen(self, local: torch.Tensor) -> None:
        """Give a local tensor that modules hold under several names a slice with one more element.

        Writers of torch.distributed.checkpoint copy a tensor from the host only if it does not fill its storage, and
        safetensors refuses to write the same memory under two names.
        """
        begin = local.data_ptr() - self._flat.data_ptr()
        if local.numel() and self.device.type == "cpu" and local.untyped_storage().nbytes() == local.nbytes:
            storage = self._flat.untyped_storage()[begin : begin + local.nbytes + local.element_size()]
            local.set_(storage, 0, local.shape, local.stride())

    def stored(self) -> Shard:
        """This shard as one that is gathered in the dtypes it has."""
        same = copy.copy(self)
        same.segments = self.segments.stored()
        return same

    def _make_locals(self) -> list[torch.Tensor]:
        tensors = [
            torch.empty(
                sharding.local_shape(self.rank)
                if self.device == META or not prod(sharding.local_shape(self.rank))
                else 0,
                dtype=self.segments.dtypes(index).original,
                device=self.device,
            )
            for index, sharding in enumerate(self.shardings)
        ]
        if self.device == META:
            return tensors
        storage = self._flat.untyped_storage()
        for index, begin in self.ranges():
            shape, itemsize = self.shardings[index].local_shape(self.rank), tensors[index].element_size()
            if prod(shape):
                slice_ = storage[begin : begin + prod(shape) * itemsize]
                stride = self.shardings[index].local_stride or contiguous_stride(shape)
                tensors[index].set_(slice_, 0, shape, stride)
        return tensors
