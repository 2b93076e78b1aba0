"""Defines shardings. A sharding determines which elements of a parameter are on each rank.

With `fully_shard`, each parameter is chunked along one dim, as `torch.chunk` does, and the chunks are padded. With
`FullyShardedDataParallel`, the parameters of a unit are concatenated and split into equal flat shards. A shard may
begin or end inside a parameter. For example:

    world 4, float32, parameters of 15, 5, 15 and 3 elements

    not aligned  |15|5|15|3| 2 of padding = 40 elements, 10 on each rank
    aligned      |15|.|5|...|15|.|3|.      = 44 elements, 11 on each rank; parameters begin at multiples of 16 bytes

Concatenating the flat shards of all ranks yields the unit, so an all-gather needs one collective and no copies. Each
rank has a contiguous range of each parameter. This range is often empty.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import ClassVar

from .collective_tensors import align


@dataclass(frozen=True)
class RowSharding:
    """The sharding of a parameter along dim `dim` over `world` ranks.

    If `dim` is 0, concatenating the padded chunks of all ranks yields the parameter. For other dims, it does not, and
    `needs_copy` is True: the parameter must be copied after the all-gather and before the reduce-scatter.
    """

    shape: tuple[int, ...]
    world: int
    dim: int = 0
    stride: ClassVar[None] = None
    local_stride: ClassVar[None] = None
    """The strides of the parameter (`stride`) and of its shard (`local_stride`). None means contiguous."""

    def __post_init__(self) -> None:
        if self.dim and self.shape[self.dim] % self.world:
            raise AssertionError(f"dim {self.dim} of {self.shape} is not divisible by {self.world}")

    @property
    def needs_copy(self) -> bool:
        return self.dim > 0

    @cached_property
    def width(self) -> int:
        """The number of elements at each index of the sharded dim."""
        return prod(self.shape[: self.dim]) * prod(self.shape[self.dim + 1 :])

    @cached_property
    def numel(self) -> int:
        return prod(self.shape)

    @cached_property
    def chunk(self) -> int:
        """The length of a padded chunk along the sharded dim."""
        return -(-self.shape[self.dim] // self.world)

    @cached_property
    def piece(self) -> int:
        """The number of elements in a padded chunk."""
        return self.chunk * self.width

    def rows(self, rank: int) -> tuple[int, int]:
        """Return the first index and the length of the chunk of `rank` along the sharded dim, without padding."""
        first = min(rank * self.chunk, self.shape[self.dim])
        return first, min(self.chunk, self.shape[self.dim] - first)

    def local_shape(self, rank: int) -> tuple[int, ...]:
        """Return the shape of the chunk of `rank`, without padding."""
        return (*self.shape[: self.dim], self.rows(rank)[1], *self.shape[self.dim + 1 :])

    @property
    def unsharded(self) -> RowSharding:
        """The sharding of the same parameter over one rank."""
        return RowSharding(self.shape, 1)


PARAM_ALIGNMENT = 16
"""Aligned parameters begin at multiples of this many bytes."""


@dataclass(frozen=True)
class FlatSharding:
    """The position of a parameter in a flat unit. It determines which elements are on each rank.

    `begin` is the index of the parameter's first element in the unit. Each rank holds `shard_numel` elements of the
    unit. `stride` contains the strides of the parameter. The parameter must not have gaps between its elements.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    begin: int
    shard_numel: int
    world: int
    dim: ClassVar[int] = 0
    needs_copy: ClassVar[bool] = False

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
        """This sharding itself, because the parameter has the same offset in an unsharded buffer."""
        return self

    @cached_property
    def numel(self) -> int:
        return prod(self.shape)

    def elements(self, rank: int) -> tuple[int, int]:
        """Return the index of the first element that `rank` holds, and the number of elements that it holds."""
        first = min(max(rank * self.shard_numel - self.begin, 0), self.numel)
        last = min(max((rank + 1) * self.shard_numel - self.begin, 0), self.numel)
        return first, last - first

    def local_shape(self, rank: int) -> tuple[int, ...]:
        """Return the shape of the shard on `rank`.

        This is the parameter's own shape if there is only one rank. Otherwise, the shard is one-dimensional.
        """
        return self.shape if self.world == 1 else (self.elements(rank)[1],)

    @property
    def local_stride(self) -> tuple[int, ...]:
        return self.stride if self.world == 1 else (1,)


@dataclass(frozen=True)
class FlatOffsets:
    """The offsets of all parameters of a flat unit."""

    begins: tuple[int, ...]
    """The index of each parameter's first element in the unit."""
    numels: tuple[tuple[int, bool], ...]
    """One pair per parameter or padding, in the order of the unit: the number of elements, and True for padding."""
    length: int
    """The number of elements of the unit.

    If parameters are aligned, the unit has padding at the end, so its length is divisible by the number of ranks.
    """
    shard_numel: int
    """The number of elements on each rank."""

    @property
    def padded(self) -> tuple[int, ...]:
        return tuple(numel for numel, _ in self.numels)


def flat_offsets(numels: Sequence[int], world: int, itemsize: int, aligned: bool) -> FlatOffsets:
    """Return the offsets of the parameters of a flat unit. `numels` contains each parameter's number of elements.

    If `aligned` is True, each parameter begins at a multiple of 16 bytes, and the length of the unit includes padding
    at the end.
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
    """Return True if a tensor with these strides has no gaps and no overlaps. Its memory order does not matter."""
    reach = 1
    for step, length in sorted((step, length) for length, step in zip(shape, stride, strict=True) if length != 1):
        if step != reach:
            return False
        reach *= length
    return True
