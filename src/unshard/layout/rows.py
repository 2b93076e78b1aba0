"""Per-parameter sharding: every parameter is cut along dim 0 as ``torch.chunk`` would, padded to equal pieces.

A unit's parameters are arranged in *regions*. A large parameter has a region of its own: the pieces of all
ranks, one after the other, *are* the parameter, so a gather straight into the region needs no copy afterwards.
Small parameters, unless there are few of them, share a *packed* region, laid out rank by rank:

    world 2, weight (3, 2) and bias (3,): chunk 2 rows, pieces of 4 and 2 elements

    own regions   weight [r0 r0 r0 r0 | r1 r1 .. ..]        bias [r0 r0 | r1 ..]
    packed        [w w w w b b | w w .. .. b ..]            (rank 0 | rank 1; dots are padding, always zero)

The same arrangement places four kinds of buffer: shards (one piece per region: master shard, gradient shard)
and whole ones (a piece per rank and region: full buffer, reduce buffer).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from math import prod
from typing import Any, Protocol

ALIGNMENT = 256  # bytes; what allocators give, and what vectorised kernels and NCCL want

# Below this many bytes a parameter's place in a group costs more host time than its copy on the device.
PACK_BELOW = 64 * 1024
# A group of more tensors than this packs further parameters, except those too large to be worth a copy.
GROUP_LIMIT = 16
NEVER_PACK_FROM = 4 * 1024 * 1024


def align(offset: int, alignment: int) -> int:
    return -(-offset // alignment) * alignment


@dataclass(frozen=True)
class Cut:
    """How one dimension of a parameter is cut over the ranks.

    Cut along dim 0, the pieces of all ranks one after the other are the parameter. Cut along another dimension they
    are not; such a parameter is *crossed*, and has to be copied on its way in and out.
    """

    shape: tuple[int, ...]
    world: int
    dim: int = 0

    def __post_init__(self) -> None:
        if self.dim and self.shape[self.dim] % self.world:
            raise AssertionError(f"dim {self.dim} of {self.shape} is not divisible by {self.world}")

    @property
    def crossed(self) -> bool:
        return self.dim > 0

    @cached_property
    def width(self) -> int:
        """Elements of the parameter for each index of the dimension that is cut."""
        return prod(self.shape[: self.dim]) * prod(self.shape[self.dim + 1 :])

    @cached_property
    def numel(self) -> int:
        return prod(self.shape)

    @cached_property
    def chunk(self) -> int:
        """Length of every rank's piece along the dimension, padding included."""
        return -(-self.shape[self.dim] // self.world)

    @cached_property
    def piece(self) -> int:
        """Elements of every rank's piece, padding included."""
        return self.chunk * self.width

    def rows(self, rank: int) -> tuple[int, int]:
        """First index along the dimension and number of indices that `rank` really has."""
        first = min(rank * self.chunk, self.shape[self.dim])
        return first, min(self.chunk, self.shape[self.dim] - first)

    def local_shape(self, rank: int) -> tuple[int, ...]:
        return (*self.shape[: self.dim], self.rows(rank)[1], *self.shape[self.dim + 1 :])

    @property
    def whole(self) -> Cut:
        """The same parameter where nothing is cut."""
        return Cut(self.shape, 1)

    @property
    def stride(self) -> tuple[int, ...] | None:
        """How the whole parameter lies in memory; `None` is row by row."""
        return None

    @property
    def local_stride(self) -> tuple[int, ...] | None:
        return None


@dataclass(frozen=True)
class Run:
    """Pieces of one segment (one set of dtypes) that lie end to end inside a region; `numel` elements on every rank.

    `starts` is where each member begins: in a rank's piece if the region is packed, else in the whole region.
    """

    segment: int
    members: tuple[int, ...]
    starts: tuple[int, ...]
    numel: int


@dataclass(frozen=True)
class Region:
    """What one tensor of a collective carries: one parameter, or several packed rank by rank.

    Not packed, the pieces of all ranks one after the other are what the region holds: one parameter, or several end to
    end that are cut together.
    """

    runs: tuple[Run, ...]
    packed: bool

    @property
    def members(self) -> tuple[int, ...]:
        return tuple(index for run in self.runs for index in run.members)

    def begins(self, run: Run, rank: int) -> Iterator[tuple[int, int]]:
        """Each member of a run, and where what `rank` has of it begins in the rank's piece of the run."""
        for index, start in zip(run.members, run.starts, strict=True):
            yield index, start if self.packed else min(max(start - rank * run.numel, 0), run.numel)


class Grouping(Enum):
    """Which tensors one collective can carry."""

    GROUPED = "a region per large parameter, one packed region per segment"
    BY_SEGMENT = "one packed region per segment"
    WHOLE = "one packed region for everything, sent as bytes when dtypes differ"


@dataclass(frozen=True)
class Item:
    """One parameter as the arrangement sees it."""

    cut: Any
    segment: int
    itemsize: int

    @property
    def nbytes(self) -> int:
        return self.cut.numel * self.itemsize


class Layout(Protocol):
    """How the parameters of a unit are arranged: what the engine asks a layout."""

    whole_alike: bool
    """Whether the shard of one rank alone lies as the full buffer does."""

    def arrange(
        self, items: Sequence[Item], members: Sequence[int], grouping: Grouping, few: int = 0
    ) -> tuple[Region, ...]:
        """Regions of a shard, and of a reduction."""

    def spread(self, items: Sequence[Item], members: Sequence[int]) -> list[Region]:
        """Regions of the full buffer: there every parameter lies in one piece."""


class Rows:
    """Each parameter cut for itself."""

    whole_alike = False

    def arrange(
        self, items: Sequence[Item], members: Sequence[int], grouping: Grouping, few: int = 0
    ) -> tuple[Region, ...]:
        return arrange(items, members, grouping, few)

    def spread(self, items: Sequence[Item], members: Sequence[int]) -> list[Region]:
        """Each in a region of its own; none if it has no elements."""
        singles = (region for index in members for region in arrange(items, (index,), Grouping.BY_SEGMENT))
        return [Region(region.runs, packed=False) for region in singles]


ROWS = Rows()


def arrange(items: Sequence[Item], members: Sequence[int], grouping: Grouping, few: int = 0) -> tuple[Region, ...]:
    """Regions for the parameters `members` of a unit; parameters without elements need none.

    Up to `few` small parameters are not packed where tensors can be grouped.
    """
    members = [index for index in members if items[index].cut.numel]
    alone = _alone(items, members, few)
    by_segment: dict[int, list[int]] = {}
    # Large ones first in every grouping: buffers that are grouped differently then have the same order. Vectors last:
    # optimizers treat biases and norms differently from matrices, and flat ones want those of a kind side by side.
    for index in sorted(members, key=lambda index: (index not in alone, len(items[index].cut.shape) < 2)):
        by_segment.setdefault(items[index].segment, []).append(index)
    # Wide elements first: then every run starts at a multiple of its element size without padding.
    segments = sorted(by_segment.values(), key=lambda segment: -items[segment[0]].itemsize)
    if grouping is Grouping.WHOLE:
        runs = tuple(_run(items, tuple(segment)) for segment in segments)
        return (Region(runs, packed=True),) if runs else ()
    regions = []
    if grouping is Grouping.BY_SEGMENT:
        alone = set()
    for segment in segments:  # a segment is a contiguous range of every buffer
        regions += [Region((_run(items, (index,)),), packed=False) for index in segment if index in alone]
        small = tuple(index for index in segment if index not in alone)
        if small:
            regions.append(Region((_run(items, small),), packed=True))
    return tuple(regions)


def _alone(items: Sequence[Item], members: Sequence[int], few: int) -> set[int]:
    plain = [index for index in members if not items[index].cut.crossed]
    large = [index for index in plain if items[index].nbytes >= PACK_BELOW]
    if len(plain) - len(large) <= few and len(plain) <= GROUP_LIMIT:
        return set(plain)
    large.sort(key=lambda index: -items[index].nbytes)
    room = max(GROUP_LIMIT - len({items[i].segment for i in members}), 1)
    return {index for rank, index in enumerate(large) if rank < room or items[index].nbytes >= NEVER_PACK_FROM}


def _run(items: Sequence[Item], members: tuple[int, ...]) -> Run:
    starts, total = [], 0
    for index in members:
        starts.append(total)
        total += items[index].cut.piece
    return Run(items[members[0]].segment, members, tuple(starts), total)


@dataclass(frozen=True)
class Place:
    """Where a region lies in a buffer, in bytes. `runs` are offsets of its runs inside one rank's piece."""

    offset: int
    piece: int
    copies: int
    runs: tuple[int, ...]

    @property
    def end(self) -> int:
        return self.offset + self.piece * self.copies


@dataclass(frozen=True)
class Placement:
    """Places of all regions in one buffer; checks itself."""

    places: tuple[Place, ...]
    nbytes: int

    def __post_init__(self) -> None:
        end = 0
        for place in self.places:
            if place.offset < end or place.offset % ALIGNMENT:
                raise AssertionError(f"region at {place.offset} overlaps its neighbour ending at {end}")
            end = place.end
        if self.nbytes < end:
            raise AssertionError(f"{self.nbytes} bytes cannot hold regions that end at {end}")


def place(regions: Sequence[Region], itemsizes: Sequence[int], copies: int, piece_alignment: int = 1) -> Placement:
    """Lay regions out in a buffer whose segment `s` has elements of `itemsizes[s]` bytes.

    `copies` is 1 for a shard and the world size for a whole buffer. A packed piece is padded to a multiple of
    `piece_alignment` bytes; a piece of a region of its own cannot be, or it would no longer be the parameter.
    """
    places: list[Place] = []
    for region in regions:
        starts, piece = [], 0
        for run in region.runs:
            piece = align(piece, itemsizes[run.segment])
            starts.append(piece)
            piece += run.numel * itemsizes[run.segment]
        if region.packed:
            widest = max(itemsizes[run.segment] for run in region.runs)
            piece = align(piece, max(piece_alignment, widest))
        offset = align(places[-1].end, ALIGNMENT) if places else 0
        places.append(Place(offset, piece, copies, tuple(starts)))
    return Placement(tuple(places), places[-1].end if places else 0)
