"""Defines boxes, which are rectangular parts of a tensor, and finds the boxes that this rank holds.

A box has a first index and a length in each dimension. A rank holds only a few boxes of a tensor. If the tensor is
sharded by rows or columns, the rank holds one box. In a flat unit, the rank holds consecutive elements, which form
at most 2 * ndim - 1 boxes:

    a tensor of 4 x 5, elements 3 to 12     . . . a a     a: (0, 3) of size 1 x 2
                                            b b b b b     b: (1, 0) of size 1 x 5
                                            c c c . .     c: (2, 0) of size 1 x 3
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import NamedTuple

import torch
from torch.distributed.tensor import DTensor, Shard

from ..engine.api import ManagedParam
from ..errors import CheckpointError
from ..layout.shardings import FlatSharding
from ..torch_private import DTensorSpec, is_strided_shard, spec_of

Interval = tuple[int, int]
"""The first index and the number of consecutive indices."""


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
        """Return the slices that select this box from a tensor that contains exactly the box `outer`."""
        starts = (begin - first for begin, first in zip(self.begin, outer.begin, strict=True))
        return tuple(slice(start, start + length) for start, length in zip(starts, self.size, strict=True))

    def elements_in(self, outer: Box) -> tuple[int, int]:
        """Return the smallest range (start, stop) in the flattened box `outer` that contains this box."""
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
    """Skip `first` indices in `intervals`, and return up to `count` of the indices that follow, as intervals."""
    found = []
    for begin, length in intervals:
        skipped = min(first, length)
        taken = min(count, length - skipped)
        if taken > 0:
            found.append((begin + skipped, taken))
        first, count = first - skipped, count - max(taken, 0)
    return found


def chunk(intervals: Sequence[Interval], chunks: int, number: int) -> list[Interval]:
    """Split the indices in `intervals` into `chunks` chunks, as `torch.chunk` does, and return chunk `number`."""
    total = sum(length for _, length in intervals)
    size = -(-total // chunks)
    return take(intervals, number * size, size)


def boxes_of_intervals(index: Sequence[Sequence[Interval]]) -> list[tuple[Box, tuple[slice, ...]]]:
    """Return each box of a local tensor with its slices. `index` has the tensor's global intervals per dimension."""
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
    """Split `count` elements, starting at flat index `first`, into boxes. Yield (offset from `first`, box)."""
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
        rest = min(width - within, count - done)
        for offset, box in boxes_of_range(shape[1:], within, rest):
            yield done + offset, Box((row, *box.begin), (1, *box.size))
        done += rest


def first_overlap(boxes: Sequence[Box]) -> tuple[Box, Box] | None:
    """Return two boxes that overlap, or None."""
    ordered = sorted(box for box in boxes if box.numel)
    if len(ordered) < 2:
        return None
    if not ordered[0].size:
        return ordered[0], ordered[1]
    # Go along the dimension that the tensor is divided along. Along another one, each box would meet all others.
    dim = max(range(len(ordered[0].size)), key=lambda dim: len({box.begin[dim] for box in ordered}))
    ordered.sort(key=lambda box: box.begin[dim])
    active: list[Box] = []  # boxes that extend into the next one's indices of this dimension
    for box in ordered:
        active = [each for each in active if each.begin[dim] + each.size[dim] > box.begin[dim]]
        for each in active:
            if each.intersection(box) is not None:
                return each, box
        active.append(box)
    return None


# -- what this rank holds ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class BoxMap:
    """This rank's boxes of a tensor with the global shape `shape`. `slices` select the boxes from the local tensor."""

    shape: tuple[int, ...]
    boxes: tuple[Box, ...]
    slices: tuple[tuple[slice, ...], ...]
    order: tuple[int, ...] | None = None
    """The dimensions by decreasing stride if local tensors are flat tensors in memory order, otherwise None."""

    def views(self, local: torch.Tensor) -> list[torch.Tensor]:
        """Return a view of `local` in the shape of each box. `local` is a parameter's local tensor or its state."""
        if self.order is None:
            return [local[each] for each in self.slices]
        local = local.view(-1)  # not reshape, which may copy, because callers write to the views
        back = [self.order.index(dim) for dim in range(len(self.order))]
        return [
            local[each].view([box.size[dim] for dim in self.order]).permute(back)
            for each, box in zip(self.slices, self.boxes, strict=True)
        ]


def whole(shape: Sequence[int]) -> BoxMap:
    """Return the box map of an unsharded tensor, which has one box with all elements."""
    return BoxMap(tuple(shape), (full_box(shape),), ((slice(None),) * len(shape),))


def box_map_of_intervals(shape: Sequence[int], index: Sequence[Sequence[Interval]]) -> BoxMap:
    found = [(box, slices) for box, slices in boxes_of_intervals(index) if box.numel]
    return BoxMap(tuple(shape), tuple(box for box, _ in found), tuple(slices for _, slices in found))


def intervals_of(name: str, spec: DTensorSpec) -> list[list[Interval]] | None:
    """Return the global indices of this rank's local tensor by dimension, or None if the rank is outside the mesh."""
    coordinate = spec.mesh.get_coordinate()
    if coordinate is None:
        return None
    index: list[list[Interval]] = [[(0, length)] if length else [] for length in spec.shape]
    for number, placement in enumerate(spec.placements):
        ranks, mine = spec.mesh.size(number), coordinate[number]
        if placement.is_replicate():
            continue
        if is_strided_shard(placement):
            # A later mesh dimension first splits the tensor into `factor` chunks. This dimension splits each of them.
            dim, factor = placement.dim, placement.split_factor  # type: ignore[attr-defined]
            chunks = [chunk(chunk(index[dim], factor, each), ranks, mine) for each in range(factor)]
            index[dim] = [interval for each in chunks for interval in each]
        elif isinstance(placement, Shard):
            index[placement.dim] = chunk(index[placement.dim], ranks, mine)
        else:
            raise CheckpointError(
                f"{name!r} is a DTensor with the placement {placement}, which cannot be saved: its value is a sum "
                "over the ranks. Redistribute it to Replicate() or Shard(dim) first."
            )
    return index


def box_map_of_dtensor(name: str, tensor: DTensor) -> BoxMap:
    index = intervals_of(name, spec_of(tensor))
    return BoxMap(tuple(tensor.shape), (), ()) if index is None else box_map_of_intervals(tensor.shape, index)


def box_map_of_param(name: str, param: ManagedParam, rank: int, in_a_row: bool) -> BoxMap:
    """Return the boxes of a managed parameter. `rank` is this rank's number among the ranks that shard the parameter.

    `in_a_row` matters only in flat units. True means that local tensors are flat tensors in memory order. False means
    that they have the parameter's shape. The strides of optimizer state may then differ from the parameter's.
    """
    sharding, spec = param.sharding, param.tp_spec
    shape = tuple(sharding.shape) if spec is None else tuple(spec.shape)
    index = None if spec is None else intervals_of(name, spec)
    if index is None:
        index = [[(0, length)] if length else [] for length in sharding.shape]
    if isinstance(sharding, FlatSharding):
        return _flat_box_map(name, shape, index, sharding, rank) if in_a_row else box_map_of_intervals(shape, index)
    if shape:
        index[sharding.dim] = take(index[sharding.dim], *sharding.rows(rank))
    return box_map_of_intervals(shape, index)


def _flat_box_map(
    name: str, shape: tuple[int, ...], index: list[list[Interval]], sharding: FlatSharding, rank: int
) -> BoxMap:
    if any(len(intervals) > 1 for intervals in index):
        raise CheckpointError(f"{name!r} is a strided shard in a flat unit, which is not supported.")
    offsets = [intervals[0][0] if intervals else 0 for intervals in index]
    order = tuple(sorted(range(len(sharding.shape)), key=lambda dim: (-sharding.stride[dim], dim)))
    boxes, slices = [], []
    for start, box in boxes_of_range([sharding.shape[dim] for dim in order], *sharding.elements(rank)):
        begin, size = [0] * len(order), [0] * len(order)
        for place, dim in enumerate(order):
            begin[dim], size[dim] = box.begin[place], box.size[place]
        boxes.append(Box(tuple(begin), tuple(size)).moved(offsets))
        slices.append((slice(start, start + box.numel),))
    return BoxMap(shape, tuple(boxes), tuple(slices), order)
