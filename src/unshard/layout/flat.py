"""Flat sharding: the parameters of a unit laid end to end and cut into equal pieces, wherever that falls.

    world 4, float32, parameters of 15, 5, 15 and 3 elements

    end to end   |15|5|15|3| 2 of padding = 40 elements, 10 on each rank
    aligned      |15|.|5|...|15|.|3|.      = 44 elements, 11 on each rank: each begins at a multiple of 16 bytes

The pieces of all ranks, one after the other, *are* the unit: one collective and no copies. A rank has some elements of
each parameter, in a row, often none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

from .rows import Grouping, Item, Region, Run, align

BYTES = 16
"""What parameters are aligned to where each is seen for itself."""


@dataclass(frozen=True)
class FlatCut:
    """Where one parameter lies in a flat unit, and so which of its elements a rank has.

    `begin` is its first element in the unit, of which every rank has `share` elements. `stride` is how the parameter
    lies in memory; it covers its elements without gaps.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    begin: int
    share: int
    world: int

    def __post_init__(self) -> None:
        if self.begin < 0 or self.begin + self.numel > self.share * self.world:
            raise AssertionError(f"{self.shape} at {self.begin} leaves {self.world} pieces of {self.share} elements")
        reach = 1 + sum((length - 1) * step for length, step in zip(self.shape, self.stride, strict=True))
        if self.numel and reach != self.numel:
            raise AssertionError(f"{self.shape} with strides {self.stride} has gaps")

    @property
    def whole(self) -> FlatCut:
        """In a unit that is whole it lies at the same place."""
        return self

    @property
    def crossed(self) -> bool:
        return False

    @property
    def dim(self) -> int:
        return 0

    @cached_property
    def numel(self) -> int:
        return prod(self.shape)

    def elements(self, rank: int) -> tuple[int, int]:
        """First element of the parameter that `rank` has, and how many."""
        first = min(max(rank * self.share - self.begin, 0), self.numel)
        last = min(max((rank + 1) * self.share - self.begin, 0), self.numel)
        return first, last - first

    def local_shape(self, rank: int) -> tuple[int, ...]:
        """A row of elements; where nothing is cut, the parameter as it is."""
        return self.shape if self.world == 1 else (self.elements(rank)[1],)

    @property
    def local_stride(self) -> tuple[int, ...]:
        return self.stride if self.world == 1 else (1,)


@dataclass(frozen=True)
class Flat:
    """Where the parameters of a unit lie end to end; `numels` with the padding between them, in their order."""

    begins: tuple[int, ...]
    numels: tuple[tuple[int, bool], ...]
    """Number of elements, and whether that is padding."""
    length: int
    """Without what is added at the end only because the ranks do not divide it."""
    share: int

    @property
    def padded(self) -> tuple[int, ...]:
        return tuple(numel for numel, _ in self.numels)


def lay_end_to_end(numels: Sequence[int], world: int, itemsize: int, aligned: bool) -> Flat:
    """The unit's layout; `aligned` lets each parameter begin at a multiple of 16 bytes, and the whole be divisible."""
    step = max(BYTES // itemsize, 1) if aligned else 1
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
    share = -(-end // world)
    if aligned and share * world > end:
        entries.append((share * world - end, True))
        end = share * world
    return Flat(tuple(begins), tuple(entries), end, share)


def is_dense(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether elements cover their memory without gaps or overlap, in whatever order of the dimensions."""
    reach = 1
    for step, length in sorted((step, length) for length, step in zip(shape, stride, strict=True) if length != 1):
        if step != reach:
            return False
        reach *= length
    return True


class EndToEnd:
    """One region for the whole unit: its cuts say where each parameter lies, whichever of them have gradients."""

    whole_alike = True

    def arrange(
        self, items: Sequence[Item], members: Sequence[int], grouping: Grouping, few: int = 0
    ) -> tuple[Region, ...]:
        return tuple(self.spread(items, members))

    def spread(self, items: Sequence[Item], members: Sequence[int]) -> list[Region]:
        there = [index for index, item in enumerate(items) if item.cut.numel]
        if not there:
            return []
        first = items[there[0]]
        if any(item.segment != first.segment or item.cut.share != first.cut.share for item in items):
            raise AssertionError("parameters that are laid end to end must have one set of dtypes")
        starts = tuple(items[index].cut.begin for index in there)
        return [Region((Run(first.segment, tuple(there), starts, first.cut.share),), packed=False)]


END_TO_END = EndToEnd()
