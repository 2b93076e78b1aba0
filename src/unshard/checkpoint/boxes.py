"""Boxes: rectangular parts of a tensor, in integers only.

A box has a first index and a length in each dimension. Every part of a tensor that a rank holds is a few boxes, however
the tensor is sharded: rows and columns are one box, and a run of elements in the middle of a flat shard is at most
2 * ndim - 1 of them:

    a tensor of 4 x 5, elements 3 to 12     . . . a a     a: (0, 3) of size 1 x 2
                                            b b b b b     b: (1, 0) of size 1 x 5
                                            c c c . .     c: (2, 0) of size 1 x 3
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from math import prod
from typing import NamedTuple

Interval = tuple[int, int]
"""First index and number of indices."""


class Box(NamedTuple):
    begin: tuple[int, ...]
    size: tuple[int, ...]

    @property
    def numel(self) -> int:
        return prod(self.size)

    def intersection(self, other: Box) -> Box | None:
        begin = tuple(map(max, self.begin, other.begin))
        ends = zip(self.begin, self.size, other.begin, other.size, strict=True)
        size = tuple(min(a + n, b + m) - first for first, (a, n, b, m) in zip(begin, ends, strict=True))
        return Box(begin, size) if all(length > 0 for length in size) else None

    def slices_in(self, outer: Box) -> tuple[slice, ...]:
        """Where this box is in a tensor that holds `outer`."""
        starts = (begin - first for begin, first in zip(self.begin, outer.begin, strict=True))
        return tuple(slice(start, start + length) for start, length in zip(starts, self.size, strict=True))

    def elements_in(self, outer: Box) -> tuple[int, int]:
        """The first element of this box in the row-major order of `outer`, and the one after its last."""
        first = last = 0
        for begin, size, start, length in zip(self.begin, self.size, outer.begin, outer.size, strict=True):
            first = first * length + begin - start
            last = last * length + begin - start + size - 1
        return first, last + 1

    def moved(self, offsets: Sequence[int]) -> Box:
        return Box(tuple(a + b for a, b in zip(self.begin, offsets, strict=True)), self.size)


def full_box(shape: Sequence[int]) -> Box:
    return Box((0,) * len(shape), tuple(shape))


def take(intervals: Sequence[Interval], first: int, count: int) -> list[Interval]:
    """`count` of the indices in `intervals`, from number `first` on."""
    found = []
    for begin, length in intervals:
        skipped = min(first, length)
        taken = min(count, length - skipped)
        if taken > 0:
            found.append((begin + skipped, taken))
        first, count = first - skipped, count - max(taken, 0)
    return found


def chunk(intervals: Sequence[Interval], chunks: int, number: int) -> list[Interval]:
    """The indices that chunk `number` of `chunks` has, as by `torch.chunk`."""
    total = sum(length for _, length in intervals)
    size = -(-total // chunks)
    return take(intervals, number * size, size)


def boxes_of_intervals(index: Sequence[Sequence[Interval]]) -> list[tuple[Box, tuple[slice, ...]]]:
    """The boxes of a local tensor that has these indices in each dimension, and where each of them is in it."""
    dims = []
    for intervals in index:
        place, placed = 0, []
        for begin, length in intervals:
            placed.append((begin, length, place))
            place += length
        dims.append(placed)
    found = []
    for each in product(*dims):
        box = Box(tuple(begin for begin, _, _ in each), tuple(length for _, length, _ in each))
        found.append((box, tuple(slice(place, place + length) for _, length, place in each)))
    return found


def boxes_of_range(shape: Sequence[int], first: int, count: int) -> Iterator[tuple[int, Box]]:
    """The boxes of `count` contiguous elements, each with the number of its first element among these."""
    if count <= 0:
        return
    if not shape:
        yield 0, Box((), ())
        return
    width, done = prod(shape[1:]), 0
    while done < count:
        row, within = divmod(first + done, width)
        rows = (count - done) // width if not within else 0
        if rows:
            yield done, Box((row, *[0] * (len(shape) - 1)), (rows, *shape[1:]))
            done += rows * width
            continue
        part = min(width - within, count - done)
        for offset, box in boxes_of_range(shape[1:], within, part):
            yield done + offset, Box((row, *box.begin), (1, *box.size))
        done += part


def first_overlap(boxes: Sequence[Box]) -> tuple[Box, Box] | None:
    """Two boxes that have an element in common, if there are any."""
    ordered = sorted(box for box in boxes if box.numel)
    if len(ordered) > 1 and not ordered[0].size:
        return ordered[0], ordered[1]
    active: list[Box] = []  # those that reach into the rows of the next one
    for box in ordered:
        active = [each for each in active if each.begin[0] + each.size[0] > box.begin[0]]
        for each in active:
            if each.intersection(box) is not None:
                return each, box
        active.append(box)
    return None
