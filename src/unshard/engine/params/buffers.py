"""Memory of a param group.

The shard stays allocated. Buffers are freed and allocated again in every step.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from math import prod

import torch

from ...comm.interface import Pool, Transport
from ...layout.collective_tensors import ROW_LAYOUT, BufferLayout, Grouping, LayoutParam, Region, UnitLayout, lay_out
from ...layout.shardings import FlatSharding, RowSharding
from ...torch_private import contiguous_stride, foreach_zero, storage_key
from ..states import Segments, sent_dtype

EMPTIED: set[int] = set()
"""Keys of the storages that are freed and allocated again in every step.

Reading a tensor while its storage is freed crashes the process.
"""


def will_empty(owner: object, storages: Iterable[torch.UntypedStorage]) -> None:
    """Add `storages` to `EMPTIED` until `owner`, which frees and reallocates these storages, is deleted."""
    keys = [storage_key(each) for each in storages]
    EMPTIED.update(keys)
    weakref.finalize(owner, EMPTIED.difference_update, keys).atexit = False


class Buffer:
    """A storage that can be freed and allocated again without replacing the tensor objects that use the storage.

    Autograd saves these tensors between forward and backward. They take no memory while the storage is freed. The
    memory belongs to the stream that is current when `take` is called. `release` does not wait for any stream. Call
    `release` only after this stream has queued the last use of the memory, or has queued a wait for the last use.
    """

    def __init__(self, nbytes: int, device: torch.device, pool: Pool | None = None, memory: torch.Tensor | None = None):
        """Use `memory`, a tensor of bytes that is never freed. If it is None, allocate `nbytes` bytes."""
        self.nbytes = nbytes
        self.device = device
        self.stays = memory is not None
        """True if the memory is never freed."""
        if memory is None:
            memory = torch.empty(nbytes, dtype=torch.uint8, device=device)
        self.storage = memory.untyped_storage()
        if not self.stays:
            will_empty(self, [self.storage])
        self.held = True
        self._pool = pool

    def take(self) -> None:
        """Allocate the memory, unless it is already allocated. The contents of new memory are undefined."""
        if not self.held:
            if self._pool is None:
                self.storage.resize_(self.nbytes)
            else:
                with self._pool.allocating():
                    self.storage.resize_(self.nbytes)
            self.held = True

    def release(self) -> None:
        """Free the memory, unless `stays` is True. The caller must make sure that no collective uses the memory."""
        if self.held and not self.stays:
            self.storage.resize_(0)
            self.held = False

    def stay(self) -> None:
        """Allocate the memory and never free it again, because recorded steps use the memory at a fixed address."""
        self.take()
        self.stays = True

    def tensor(
        self, dtype: torch.dtype, offset: int, shape: Sequence[int], stride: Sequence[int] | None = None
    ) -> torch.Tensor:
        """Return a tensor at a byte offset. The tensor is contiguous if `stride` is None.

        Call this method only while the memory is allocated. The tensor is created with `set_` instead of slicing, so
        that it has its own version counter. Otherwise, autograd would treat an all-gather into the buffer as a write to
        the parameters that autograd saved.
        """
        empty = torch.empty(0, dtype=dtype, device=self.device)
        return empty.set_(
            self.storage, offset // dtype.itemsize, tuple(shape), tuple(stride or contiguous_stride(shape))
        )


_PAIRS = 64
"""The number of pairs of contiguous tensors that one kernel of `foreach_copy` copies."""


def pairs_to_copy(target: torch.Tensor, source: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return pairs of tensors with which `foreach_copy` copies `source` to `target`. Both have one row per rank.

    The rows of few ranks are copied one by one, because one kernel copies many contiguous tensors. Otherwise, one
    kernel copies all rows, so the number of kernels does not grow with the number of ranks.
    """
    if target.shape[0] <= _PAIRS and target[0].is_contiguous():
        return list(zip(target, source, strict=True))
    return [(target, source)]


def pieces(
    buffer: Buffer, buffer_layout: BufferLayout, regions: Sequence[Region], segments: Segments, role: str
) -> list[torch.Tensor]:
    """Return the tensors of a collective, one per region. Complex numbers are sent as pairs of real numbers."""
    tensors = []
    for region, at in zip(regions, buffer_layout.ranges, strict=True):
        dtype = sent_dtype(getattr(segments.kinds[region.runs[0].segment], role))
        tensors.append(buffer.tensor(dtype, at.offset, (at.piece * at.copies // dtype.itemsize,)))
    return tensors


META = torch.device("meta")
_SPARE = 16  # bytes behind a shard on the host, so that its last parameter can be widened


class ShardLayout:
    """The regions that an all-gather sends, and the place of each parameter in these regions.

    Only the parameters in `members` have a place in the regions. The other parameters still have an index.
    """

    memory: torch.Tensor
    """The bytes of all regions. The owner of the layout allocates this memory."""

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

    def run_tensors(self, region: int) -> list[torch.Tensor]:
        """Return the runs of a region as flat tensors in their original dtypes."""
        at, runs = self.buffer_layout.ranges[region], self.regions[region].runs
        return [
            self.flat(self.segments.kinds[run.segment].original, at.offset + start, run.numel)
            for run, start in zip(runs, at.runs, strict=True)
        ]

    def piece_bytes(self, region: int) -> torch.Tensor:
        """Return the piece of a region as bytes, including padding."""
        at = self.buffer_layout.ranges[region]
        return self.flat(torch.uint8, at.offset, at.piece)

    def flat(self, dtype: torch.dtype, offset: int, numel: int) -> torch.Tensor:
        """Return `numel` elements of the memory, starting at byte `offset`, as a flat tensor."""
        return self.memory[offset : offset + numel * dtype.itemsize].view(dtype)

    def ranges(self) -> Iterator[tuple[int, int]]:
        """Yield the index and the first byte of each parameter, in memory order."""
        for region, at in zip(self.regions, self.buffer_layout.ranges, strict=True):
            for run, start in zip(region.runs, at.runs, strict=True):
                itemsize = self.segments.kinds[run.segment].original.itemsize
                for index, first in region.begins(run, self.rank):
                    yield index, at.offset + start + first * itemsize


class Shard(ShardLayout):
    """This rank's part of a param group in the original dtypes. It is one flat tensor that stays allocated.

    Each local tensor has offset 0 in its own slice of the storage, because torch neither saves nor deep-copies a
    DTensor with a storage offset. Saving a local tensor writes only its own bytes. A shard on the meta device has no
    storage.
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
        """Create a shard on `device`.

        `memory` must allocate bytes on `device`. It is not called if `device` is the meta device.
        """
        super().__init__(shardings, segments, transport, members, layout)
        self.device = device
        # Zeroed, because flat optimizers read the padding. Not a `Buffer`: slices of an emptied storage would dangle.
        if device == META:
            self.memory = torch.empty(0, dtype=torch.uint8, device=META)
        else:
            nbytes = self.buffer_layout.nbytes
            spare = _SPARE if layout is ROW_LAYOUT and device.type == "cpu" else 0
            self.memory = memory(nbytes + spare)[:nbytes]
        self.locals = self._make_locals()

    def widen(self, local: torch.Tensor) -> None:
        """Extend the storage slice of `local` by one element. Use this method for parameters with several names.

        torch.distributed.checkpoint copies a host tensor only if the tensor does not fill its storage. Without this
        copy, safetensors refuses to write the same memory under two names.
        """
        begin = local.data_ptr() - self.memory.data_ptr()
        if local.numel() and self.device.type == "cpu" and local.untyped_storage().nbytes() == local.nbytes:
            storage = self.memory.untyped_storage()[begin : begin + local.nbytes + local.element_size()]
            local.set_(storage, 0, local.shape, local.stride())

    def stored(self) -> Shard:
        """Return a shard in the same memory for a unit that computes in the stored dtypes."""
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
        storage = self.memory.untyped_storage()
        for index, begin in self.ranges():
            shape, itemsize = self.shardings[index].local_shape(self.rank), tensors[index].element_size()
            if prod(shape):
                slice_ = storage[begin : begin + prod(shape) * itemsize]
                stride = self.shardings[index].local_stride or contiguous_stride(shape)
                tensors[index].set_(slice_, 0, shape, stride)
        return tensors


class UnshardedBuffer(Buffer):
    """The memory of all unsharded parameters of a param group. Its regions are padded to the pieces of the shard."""

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
        """Return a tensor at the place of a parameter in the buffer. The memory must be allocated."""
        sharding, dtype = shard.shardings[index], shard.segments.dtypes(index).compute
        return self.tensor(dtype, self.offsets.get(index, 0), sharding.shape, sharding.stride)


class ShardBuffer(Buffer):
    """This rank's pieces of a collective, one per region.

    `pieces` include the padding of the regions, and `bodies` do not. `flats` has one tensor per segment. Padding and
    gaps are zero, because flat optimizers and all-reduces read them.
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
        """Create the buffer. If `memory` is given, it allocates memory that is never freed."""
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
        # The bytes between the end of each body and the next region.
        ranges = self.buffer_layout.ranges
        ends = [at.offset for at in ranges[1:]] + [self.buffer_layout.nbytes]
        sizes = [body.numel() * body.element_size() for body in self.bodies]
        starts = [at.offset + size for at, size in zip(ranges, sizes, strict=True)]
        return [self.tensor(torch.uint8, a, (b - a,)) for a, b in zip(starts, ends, strict=True) if b > a]
