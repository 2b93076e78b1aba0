"""Where the boxes of a tensor are stored. Tensors that are sharded alike share a `Split`, however many ranks there are.

A checkpoint of 2,816 ranks has millions of boxes, so their files and offsets are integer tensors instead of objects.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from math import prod
from typing import Any, NamedTuple, TypeVar

import torch

from ..state.boxes import Box, first_overlap

MOST = 2**60
"""The largest number that a manifest may contain."""
_KEPT = 64
"""How many results of `Split.overlapping` are kept."""


ALIGNMENT = 64
"""Boxes start at multiples of this number of bytes, so tensors can be views of a mapped file."""

T = TypeVar("T", int, torch.Tensor)


def aligned(nbytes: T) -> T:
    """Round a number, or a tensor of numbers, up to the next multiple of `ALIGNMENT`."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def integers(values: Sequence[Any]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


class StoredBox(NamedTuple):
    file: int
    offset: int
    box: Box


class Split:
    """The boxes that a tensor is divided into."""

    def __init__(self, boxes: Iterable[Box]):
        self.boxes = tuple(boxes)
        self._checked: set[tuple[int, ...]] = set()
        self._sizes: dict[int, torch.Tensor] = {}
        self._found: dict[Box, list[tuple[int, Box]]] = {}

    def check(self, shape: tuple[int, ...]) -> None:
        """Raise ValueError if the boxes do not make up a tensor of this shape."""
        if shape in self._checked:
            return
        for box in self.boxes:
            if not len(box.begin) == len(box.size) == len(shape):
                raise ValueError("a box has another number of dimensions")
            if any(a + n > length or not n for a, n, length in zip(box.begin, box.size, shape, strict=True)):
                raise ValueError(f"the box {box.begin} of size {box.size} is outside of the shape {shape}")
        if self.numel != prod(shape):
            raise ValueError(f"the boxes do not have the {prod(shape)} elements of the shape {shape}")
        if self.overlap:
            raise ValueError(f"two boxes overlap: {self.overlap[0]} and {self.overlap[1]}")
        self._checked.add(shape)

    @cached_property
    def numels(self) -> torch.Tensor:
        return integers([box.numel for box in self.boxes])

    def aligned_sizes(self, itemsize: int) -> torch.Tensor:
        """Return the bytes that each box takes in a file."""
        if itemsize not in self._sizes:
            self._sizes[itemsize] = aligned(self.numels * itemsize)
        return self._sizes[itemsize]

    @cached_property
    def numel(self) -> int:
        return sum(box.numel for box in self.boxes)

    @cached_property
    def overlap(self) -> tuple[Box, Box] | None:
        """Two of the boxes that overlap, or None."""
        return first_overlap(self.boxes)

    def overlapping(self, box: Box) -> list[tuple[int, Box]]:
        """Return the number of each box that overlaps `box`, and their intersection."""
        if box not in self._found:
            if len(self._found) == _KEPT:
                self._found.clear()
            found = ((number, box.intersection(each)) for number, each in enumerate(self.boxes))
            self._found[box] = [(number, common) for number, common in found if common is not None]
        return self._found[box]


class StoredBoxes(Sequence[StoredBox]):
    """The boxes of a tensor, each with the number of its file and its offset there."""

    def __init__(self, split: Split, files: torch.Tensor, offsets: torch.Tensor):
        self.split, self.files, self.offsets = split, files, offsets

    def __len__(self) -> int:
        return len(self.split.boxes)

    def __getitem__(self, number: Any) -> Any:
        return StoredBox(int(self.files[number]), int(self.offsets[number]), self.split.boxes[number])

    def __iter__(self) -> Iterator[StoredBox]:
        return map(StoredBox, self.files.tolist(), self.offsets.tolist(), self.split.boxes)

    def in_file(self, number: int) -> list[StoredBox]:
        return [self[each] for each in (self.files == number).nonzero().flatten().tolist()]

    def overlapping(self, box: Box) -> Iterator[tuple[StoredBox, Box]]:
        """Yield each stored box that overlaps `box`, and their intersection."""
        for number, common in self.split.overlapping(box):
            yield self[number], common


NONE = StoredBoxes(Split(()), integers([]), integers([]))


def stored_boxes(boxes: Iterable[StoredBox]) -> StoredBoxes:
    files, offsets, parts = zip(*boxes, strict=True) if (boxes := list(boxes)) else ((), (), ())
    return StoredBoxes(Split(parts), integers(files), integers(offsets))


# -- runs ---------------------------------------------------------------------------------------------------


def runs_of(values: torch.Tensor) -> list[int]:
    """Return `values` as runs with constant steps. A run is three numbers: its first value, its step and its length."""
    steps, counts = values.diff().unique_consecutive(return_counts=True)
    ends, numbers = counts.cumsum(0).tolist(), values.tolist()
    runs: list[int] = []
    begin = 0
    for step, end in zip(steps.tolist(), ends, strict=True):
        if end > begin:  # otherwise, this is the step from the previous run to this one
            runs += [numbers[begin], step, end - begin + 1]
            begin = end + 1
    for last in numbers[begin:]:
        runs += [last, 0, 1]
    return runs


def values_of(runs: Any, length: int) -> torch.Tensor:
    """Return the `length` values of untrusted `runs`. Raise ValueError if they are malformed."""
    if type(runs) is not list or len(runs) % 3 or not all(type(each) is int and abs(each) <= MOST for each in runs):
        raise ValueError(f"{str(runs)[:100]} are not runs of integers")
    first, step, count = integers(runs).view(-1, 3).unbind(1)
    if ((count < 1) | (count > length)).any() or int(count.sum()) != length:
        raise ValueError(f"the runs {str(runs)[:100]} do not have {length} values")
    # In floating point first, because the products of integers could overflow.
    far, last = (step.double() * (count - 1)).abs() > MOST, first + step * (count - 1)
    if (far | (first < 0) | (last < 0) | (last > MOST)).any():
        raise ValueError(f"the runs {str(runs)[:100]} leave the range from 0 to {MOST}")
    index = torch.arange(length) - (count.cumsum(0) - count).repeat_interleave(count)
    return first.repeat_interleave(count) + step.repeat_interleave(count) * index
