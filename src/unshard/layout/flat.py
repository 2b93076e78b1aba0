"""Flat sharding: the concatenated parameters of a unit are split into equal shards, even inside a parameter.

    world 4, float32, parameters of 15, 5, 15 and 3 elements

    not aligned  |15|5|15|3| 2 of padding = 40 elements, 10 on each rank
    aligned      |15|.|5|...|15|.|3|.      = 44 elements, 11 on each rank: each begins at a multiple of 16 bytes

The concatenated shards of all ranks are the unit: one collective and no copies. A rank has a contiguous range of each
parameter, which is often empty.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

from .collective_tensors import PACK_SMALL, DtypeRun, Grouping, LayoutParam, PackingRule, Region, align

PARAM_ALIGNMENT = 16
"""Aligned parameters begin at multiples of this many bytes."""


@dataclass(frozen=True)
class FlatSharding:
    """The position of a parameter in a flat unit, which determines the elements on each rank.

    `begin`: its first element in the unit; `shard_numel`: elements of the unit on each rank; `stride`: its strides,
    without gaps between elements.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    begin: int
    shard_numel: int
    world: int

    def __post_init__(self) -> None:
        if self.begin < 0 or self.begin + self.numel > self.shard_numel * self.world:
            raise AssertionError(
                f"{self.shape} at {self.begin} exceeds {self.world} shards of {self.shard_numel} elements"
            )
        reach = 1 + sum((length - 1) * step for length, step in zip(self.shape, self.stride, strict=True))
        if self.numel and reach != self.numel:
            raise AssertionError(f"{self.shape} with strides {self.stride} has gaps")

    @property
    def unsharded(self) -> FlatSharding:
        """The parameter has the same offset in an unsharded buffer."""
        return self

    @property
    def needs_copy(self) -> bool:
        return False

    @property
    def dim(self) -> int:
        return 0

    @cached_property
    def numel(self) -> int:
        return prod(self.shape)

    def elements(self, rank: int) -> tuple[int, int]:
        """The first element of the parameter on `rank`, and the number of elements."""
        first = min(max(rank * self.shard_numel - self.begin, 0), self.numel)
        last = min(max((rank + 1) * self.shard_numel - self.begin, 0), self.numel)
        return first, last - first

    def local_shape(self, rank: int) -> tuple[int, ...]:
        """Shape of the shard: one-dimensional, but the parameter's own on one rank."""
        return self.shape if self.world == 1 else (self.elements(rank)[1],)

    @property
    def local_stride(self) -> tuple[int, ...]:
        return self.stride if self.world == 1 else (1,)


@dataclass(frozen=True)
class FlatOffsets:
    """Offsets of all parameters of a flat unit."""

    begins: tuple[int, ...]
    """First element of each parameter."""
    numels: tuple[tuple[int, bool], ...]
    """Elements of each parameter and of each padding between them. The second value is True for padding."""
    length: int
    """Elements of the unit, without padding that only makes it divisible by the number of ranks."""
    shard_numel: int
    """Elements on each rank."""

    @property
    def padded(self) -> tuple[int, ...]:
        return tuple(numel for numel, _ in self.numels)


def flat_offsets(numels: Sequence[int], world: int, itemsize: int, aligned: bool) -> FlatOffsets:
    """Offsets of parameters with these numbers of elements.

    `aligned`: each parameter begins at a multiple of 16 bytes, and the padding at the end belongs to the unit.
    """
    step = max(PARAM_ALIGNMENT // itemsize, 1) if aligned else 1
    begins: list[int] = []
    entries: list[tuple[int, bool]] = []
    end = 0
    for numel in numels:
        begin = align(end, step)
        if begin > end:
            entries.append((begin - end, True))
        begins.append(begin)
        entries.append((numel, False))
        end = begin + numel
    shard_numel = -(-end // world)
    if aligned and shard_numel * world > end:
        entries.append((shard_numel * world - end, True))
        end = shard_numel * world
    return FlatOffsets(tuple(begins), tuple(entries), end, shard_numel)


def is_dense(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Return True if elements with these strides have no gaps and no overlap, in any order of dims."""
    reach = 1
    for step, length in sorted((step, length) for length, step in zip(shape, stride, strict=True) if length != 1):
        if step != reach:
            return False
        reach *= length
    return True


class FlatLayout:
    """The unit is one region, whichever parameters a collective is for."""

    same_unsharded = True

    def collective_regions(
        self, items: Sequence[LayoutParam], members: Sequence[int], grouping: Grouping, rule: PackingRule = PACK_SMALL
    ) -> tuple[Region, ...]:
        return tuple(self.unsharded_regions(items, members))

    def unsharded_regions(self, items: Sequence[LayoutParam], members: Sequence[int]) -> list[Region]:
        present = [index for index, item in enumerate(items) if item.sharding.numel]
        if not present:
            return []
        first = items[present[0]]
        if any(
            item.segment != first.segment or item.sharding.shard_numel != first.sharding.shard_numel for item in items
        ):
            raise AssertionError("the parameters of a flat unit must have the same dtypes and the same shard size")
        starts = tuple(items[index].sharding.begin for index in present)
        return [Region((DtypeRun(first.segment, tuple(present), starts, first.sharding.shard_numel),), packed=False)]


FLAT_LAYOUT = FlatLayout()
