"""Decides which parameters share a tensor of a collective, and where each parameter is in a buffer.

A buffer holds the parameters of a unit in *regions*. A collective sends one tensor per region. A large parameter has
its own region. This region contains the padded shards of all ranks, in rank order, so an all-gather into it yields the
parameter without a copy. Small parameters share a *packed* region, unless there are only a few of them. In a packed
region, all shards of one rank are next to each other:

    world 2, weight (3, 2) and bias (3,): chunks of 2 rows, padded shards of 4 and 2 elements

    own regions   weight [r0 r0 r0 r0 | r1 r1 .. ..]        bias [r0 r0 | r1 ..]
    packed        [w w w w b b | w w .. .. b ..]            (rank 0 | rank 1; dots are padding, always zero)

A buffer for one rank (the shard or the sharded gradient) holds one piece per region. A buffer for all ranks (the
unsharded buffer or the reduce-scatter input) has the same regions, and holds one piece per region and rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import accumulate
from typing import Any, NamedTuple

ALIGNMENT = 256
"""Regions begin at multiples of this many bytes, as memory allocations do.

Vectorized kernels and NCCL are faster with such addresses.
"""


@dataclass(frozen=True)
class PackingRule:
    """Decides which parameters share a packed region. Each transport has its own rule."""

    below: int = 64 * 1024
    """Parameters that have fewer than this many bytes (unsharded, in the compute dtype) are packed.

    Copying a larger parameter into a packed region would cost more than sending one more tensor.
    """
    least: int = 1
    """Small parameters are packed only if there are at least this many. Packing fewer costs more than it saves."""


PACK_SMALL = PackingRule()


def align(offset: int, alignment: int) -> int:
    """Round `offset` up to a multiple of `alignment`."""
    return -(-offset // alignment) * alignment


@dataclass(frozen=True)
class DtypeRun:
    """Adjacent parameters of one segment in a region. All parameters of a segment have the same dtypes.

    `members` contains the indices of the parameters. Together, they have `numel` elements on each rank. `starts`
    contains the position of each parameter's first element. In a packed region, this position counts from the start of
    a rank's piece. Otherwise, it counts from the start of the region.
    """

    segment: int
    members: tuple[int, ...]
    starts: tuple[int, ...]
    numel: int


@dataclass(frozen=True)
class Region:
    """The content of one tensor of a collective.

    A packed region holds the shards of several parameters, rank by rank. Any other region holds one whole parameter or
    all parameters of a flat unit, as the concatenated pieces of all ranks.
    """

    runs: tuple[DtypeRun, ...]
    packed: bool

    @property
    def members(self) -> tuple[int, ...]:
        return tuple(index for run in self.runs for index in run.members)

    def begins(self, run: DtypeRun, rank: int) -> Iterator[tuple[int, int]]:
        """Yield the index of each parameter in `run`, and the position of its shard in the piece of `rank`."""
        for index, start in zip(run.members, run.starts, strict=True):
            yield index, start if self.packed else min(max(start - rank * run.numel, 0), run.numel)


class Grouping(Enum):
    """Ways to divide parameters into regions. The choice depends on the tensors that a collective can send."""

    GROUPED = "a region per large parameter, one packed region per segment"
    BY_SEGMENT = "one packed region per segment"
    ONE_REGION = "one packed region for all parameters, sent as bytes if dtypes differ"


@dataclass(frozen=True)
class LayoutParam:
    """The properties of a parameter that layouts need.

    These are its sharding, the index of its segment, and the number of bytes of an element.
    """

    sharding: Any
    segment: int
    itemsize: int


def _row_regions(
    items: Sequence[LayoutParam], members: Sequence[int], grouping: Grouping, rule: PackingRule = PACK_SMALL
) -> tuple[Region, ...]:
    members = [index for index in members if items[index].sharding.numel]
    possible = {index for index in members if not items[index].sharding.needs_copy}
    alone = {index for index in possible if items[index].sharding.numel * items[index].itemsize >= rule.below}
    if len(possible) - len(alone) < rule.least:
        alone = possible
    by_segment: dict[int, list[int]] = {}
    # Large parameters come first in every grouping, so that buffers of different groupings have the same order.
    # Vectors come last: optimizers treat biases and norms differently from matrices, and flat optimizers need
    # parameters with the same options next to each other.
    for index in sorted(members, key=lambda index: (index not in alone, len(items[index].sharding.shape) < 2)):
        by_segment.setdefault(items[index].segment, []).append(index)
    # Wide elements come first, so that every run begins at a multiple of its element size without padding.
    segments = sorted(by_segment.values(), key=lambda segment: -items[segment[0]].itemsize)
    if grouping is Grouping.ONE_REGION:
        runs = tuple(_run(items, segment) for segment in segments)
        return (Region(runs, packed=True),) if runs else ()
    if grouping is Grouping.BY_SEGMENT:
        alone = set()
    regions: list[Region] = []
    for segment in segments:  # a segment is a contiguous range of every buffer
        regions += _unpacked_regions(items, [index for index in segment if index in alone])
        packed = [index for index in segment if index not in alone]
        if packed:
            regions.append(Region((_run(items, packed),), packed=True))
    return tuple(regions)


def _unpacked_regions(items: Sequence[LayoutParam], members: Sequence[int]) -> tuple[Region, ...]:
    return tuple(Region((_run(items, [index]),), packed=False) for index in members if items[index].sharding.numel)


def _run(items: Sequence[LayoutParam], members: Sequence[int]) -> DtypeRun:
    *starts, total = accumulate((items[index].sharding.piece for index in members), initial=0)
    return DtypeRun(items[members[0]].segment, tuple(members), tuple(starts), total)


def _flat_region(items: Sequence[LayoutParam], *unused: object) -> tuple[Region, ...]:
    # A flat unit has only one region, even if a collective is only for some of its parameters.
    present = [index for index, item in enumerate(items) if item.sharding.numel]
    if not present:
        return ()
    first = items[present[0]]
    if any(item.segment != first.segment or item.sharding.shard_numel != first.sharding.shard_numel for item in items):
        raise AssertionError("the parameters of a flat unit must have the same dtypes and the same shard size")
    starts = tuple(items[index].sharding.begin for index in present)
    return (Region((DtypeRun(first.segment, tuple(present), starts, first.sharding.shard_numel),), packed=False),)


class UnitLayout(NamedTuple):
    """Functions that divide the parameters of a unit into regions. There is one layout for each kind of sharding."""

    collective_regions: Callable[[Sequence[LayoutParam], Sequence[int], Grouping, PackingRule], tuple[Region, ...]]
    """Return the regions of a collective. Parameters without elements are in no region.

    The arguments are all parameters of the unit, the indices of the parameters to send, the grouping and the rule.
    """
    unsharded_regions: Callable[[Sequence[LayoutParam], Sequence[int]], tuple[Region, ...]]
    """Return the regions of an unsharded buffer, in which every parameter is contiguous.

    The arguments are all parameters of the unit and the indices of the parameters in the buffer.
    """
    same_unsharded: bool
    """True if, on a single rank, the shard has the layout of the unsharded buffer and can be used as this buffer."""


ROW_LAYOUT = UnitLayout(_row_regions, _unpacked_regions, same_unsharded=False)
FLAT_LAYOUT = UnitLayout(_flat_region, _flat_region, same_unsharded=True)


@dataclass(frozen=True)
class RegionRange:
    """The byte range of a region in a buffer.

    The range begins at `offset` and contains `copies` pieces of `piece` bytes each. `runs` contains the offset in bytes
    of each dtype run in a piece.
    """

    offset: int
    piece: int
    copies: int
    runs: tuple[int, ...]

    @property
    def end(self) -> int:
        return self.offset + self.piece * self.copies


@dataclass(frozen=True)
class BufferLayout:
    """The byte ranges of all regions in a buffer, and the buffer's size. Regions are aligned and do not overlap."""

    ranges: tuple[RegionRange, ...]
    nbytes: int

    def __post_init__(self) -> None:
        end = 0
        for at in self.ranges:
            if at.offset < end or at.offset % ALIGNMENT:
                raise AssertionError(
                    f"region at {at.offset} overlaps the one that ends at {end}, or is not aligned to {ALIGNMENT}"
                )
            end = at.end
        if self.nbytes < end:
            raise AssertionError(f"{self.nbytes} bytes cannot hold regions that end at {end}")


def lay_out(regions: Sequence[Region], itemsizes: Sequence[int], copies: int, piece_alignment: int = 1) -> BufferLayout:
    """Compute where each region is in a buffer. Each element of segment `s` has `itemsizes[s]` bytes.

    `copies` is 1 for a shard, and the number of ranks for an unsharded buffer. Pieces of packed regions are padded to a
    multiple of `piece_alignment` bytes. Padding other pieces would put gaps into a parameter, so they are not padded.
    """
    ranges: list[RegionRange] = []
    for region in regions:
        starts, piece = [], 0
        for run in region.runs:
            piece = align(piece, itemsizes[run.segment])
            starts.append(piece)
            piece += run.numel * itemsizes[run.segment]
        if region.packed:
            widest = max(itemsizes[run.segment] for run in region.runs)
            piece = align(piece, max(piece_alignment, widest))
        offset = align(ranges[-1].end, ALIGNMENT) if ranges else 0
        ranges.append(RegionRange(offset, piece, copies, tuple(starts)))
    return BufferLayout(tuple(ranges), ranges[-1].end if ranges else 0)
