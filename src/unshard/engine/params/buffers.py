"""Memory of a param group: the shard, which stays, and buffers whose memory comes and goes under tensors made once."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from math import prod

import torch

from ...comm.interface import Pool, Transport
from ...layout.collective_tensors import ROW_LAYOUT, BufferLayout, Grouping, LayoutParam, Region, UnitLayout, lay_out
from ...layout.flat import FlatSharding
from ...layout.rows import RowSharding
from ...torch_private import contiguous_stride, foreach_zero, storage_key
from ..dtype_rules import Segments, sent_dtype

EMPTIED: set[int] = set()
"""Keys of the storages whose memory comes and goes. Reading a tensor over an empty one ends the process."""


def will_empty(owner: object, storages: Iterable[torch.UntypedStorage]) -> None:
    """Add `storages`, which `owner` empties and refills, to `EMPTIED` for as long as `owner` exists."""
    keys = [storage_key(each) for each in storages]
    EMPTIED.update(keys)
    weakref.finalize(owner, EMPTIED.difference_update, keys).atexit = False


class Buffer:
    """A storage that can be emptied and refilled while the tensors over it stay the same objects.

    Autograd keeps the tensors between forward and backward; with an empty storage they cost nothing.
    """

    def __init__(self, nbytes: int, device: torch.device, pool: Pool | None = None, memory: torch.Tensor | None = None):
        """`memory`: bytes that stay instead."""
        self.nbytes = nbytes
        self.device = device
        self._stays = memory is not None
        if memory is None:
            memory = torch.empty(nbytes, dtype=torch.uint8, device=device)
        self.storage = memory.untyped_storage()
        if not self._stays:
            will_empty(self, [self.storage])
        self._held = True
        self._pool = pool

    def take(self) -> None:
        """Have memory, with undefined contents if there was none."""
        if not self._held:
            if self._pool is None:
                self.storage.resize_(self.nbytes)
            else:
                with self._pool.allocating():
                    self.storage.resize_(self.nbytes)
            self._held = True

    def release(self) -> None:
        """Give the memory back. Only when no collective on it is in flight."""
        if self._held and not self._stays:
            self.storage.resize_(0)
            self._held = False

    @property
    def stays(self) -> bool:
        """Whether the memory is never given back."""
        return self._stays

    def stay(self) -> None:
        """Have the memory there is now for good: recorded steps read and write it there."""
        self.take()
        self._stays = True

    @property
    def held(self) -> bool:
        return self._held

    def tensor(
        self, dtype: torch.dtype, offset: int, shape: Sequence[int], stride: Sequence[int] | None = None
    ) -> torch.Tensor:
        """A tensor at a byte offset, by default contiguous; to be called while memory is held.

        Made with `set_`, not by slicing, so that it has a version counter of its own: a gather into the buffer
        must not look to autograd like a change of the parameters it saved.
        """
        empty = torch.empty(0, dtype=dtype, device=self.device)
        return empty.set_(
            self.storage, offset // dtype.itemsize, tuple(shape), tuple(stride or contiguous_stride(shape))
        )


def pieces(
    buffer: Buffer, buffer_layout: BufferLayout, regions: Sequence[Region], segments: Segments, role: str
) -> list[torch.Tensor]:
    """One flat tensor per region of one segment: what a collective carries. Complex numbers are pairs of reals."""
    tensors = []
    for region, at in zip(regions, buffer_layout.ranges, strict=True):
        dtype = sent_dtype(getattr(segments.kinds[region.runs[0].segment], role))
        tensors.append(buffer.tensor(dtype, at.offset, (at.piece * at.copies // dtype.itemsize,)))
    return tensors


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
        memory: Callable[[int], torch.Tensor],
        layout: UnitLayout = ROW_LAYOUT,
    ):
        """`device`: where `memory` allocates, or meta."""
        super().__init__(shardings, segments, transport, members, layout)
        self.device = device
        # Zeros: padding is read by flat optimizers and must never hold anything else. Memory that stays, not a
        # Buffer: slices of an emptied storage would dangle.
        if device == META:
            self._flat = torch.empty(0, dtype=torch.uint8, device=META)
        else:
            nbytes = self.buffer_layout.nbytes
            spare = _SPARE if layout is ROW_LAYOUT and device.type == "cpu" else 0
            self._flat = memory(nbytes + spare)[:nbytes]
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


class UnshardedBuffer(Buffer):
    """Every parameter of a param group in one piece, in regions padded to the pieces of the shard."""

    def __init__(
        self,
        shard: ShardLayout,
        members: list[int],
        device: torch.device,
        pool: Pool | None,
        memory: torch.Tensor | None = None,
    ):
        regions = shard.layout.unsharded_regions(shard.items, members)
        itemsizes = shard.segments.itemsizes("compute")
        buffer_layout = lay_out(regions, itemsizes, shard.shardings[0].world if regions else 1)
        super().__init__(buffer_layout.nbytes, device, pool, memory)
        self.offsets = {
            index: at.offset + start * itemsizes[region.runs[0].segment]
            for region, at in zip(regions, buffer_layout.ranges, strict=True)
            for index, start in zip(region.runs[0].members, region.runs[0].starts, strict=True)
        }

    def parameter(self, shard: ShardLayout, index: int) -> torch.Tensor:
        """A parameter's place; to be called while memory is held."""
        sharding, dtype = shard.shardings[index], shard.segments.dtypes(index).compute
        return self.tensor(dtype, self.offsets.get(index, 0), sharding.shape, sharding.stride)


class ShardBuffer(Buffer):
    """A buffer of this rank's pieces: one per region, padding included; `bodies` are the same without padding.

    `flats` are segments, gaps included. Padding and gaps are zero: flat code reads them.
    """

    def __init__(
        self,
        regions: Sequence[Region],
        segments: Segments,
        role: str,
        piece_alignment: int,
        device: torch.device,
        pool: Pool | None = None,
        memory: Callable[[int], torch.Tensor] | None = None,
    ):
        """`memory` gives bytes that stay."""
        self.buffer_layout = lay_out(regions, segments.itemsizes(role), 1, piece_alignment)
        nbytes = self.buffer_layout.nbytes
        super().__init__(nbytes, device, pool, None if memory is None else memory(nbytes))
        self.all_bytes = self.tensor(torch.uint8, 0, (nbytes,))
        self.pieces = pieces(self, self.buffer_layout, regions, segments, role)
        itemsizes = segments.itemsizes(role)
        self.bodies = [
            piece[: run.numel * itemsizes[run.segment] // piece.itemsize]
            for piece, run in zip(self.pieces, (region.runs[0] for region in regions), strict=True)
        ]
        self.flats = self._segments(regions)
        self._gaps = self._unwritten()
        self.release()

    def take(self) -> None:
        if not self.held:
            super().take()
            if self._gaps:
                foreach_zero(self._gaps)

    def _segments(self, regions: Sequence[Region]) -> list[torch.Tensor]:
        extents: dict[int, tuple[torch.dtype, int, int]] = {}
        for region, at, piece in zip(regions, self.buffer_layout.ranges, self.pieces, strict=True):
            segment = region.runs[0].segment
            _, first, _ = extents.get(segment, (piece.dtype, at.offset, 0))
            extents[segment] = (piece.dtype, first, at.end)
        return [self.tensor(dtype, first, ((end - first) // dtype.itemsize,)) for dtype, first, end in extents.values()]

    def _unwritten(self) -> list[torch.Tensor]:
        """The bytes behind each body, up to the next region."""
        ranges = self.buffer_layout.ranges
        ends = [at.offset for at in ranges[1:]] + [self.buffer_layout.nbytes]
        sizes = [body.numel() * body.element_size() for body in self.bodies]
        starts = [at.offset + size for at, size in zip(ranges, sizes, strict=True)]
        return [self.tensor(torch.uint8, a, (b - a,)) for a, b in zip(starts, ends, strict=True) if b > a]
