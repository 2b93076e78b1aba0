"""One storage, typed tensors over it that are made once, and memory that comes and goes underneath them."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence

import torch

from ...comm.interface import Pool
from ...layout.collective_tensors import BufferLayout, Region, lay_out
from ...torch_private import contiguous_stride, foreach_zero, storage_key
from ..dtype_rules import Segments, sent_dtype
from .shard import ShardLayout

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
