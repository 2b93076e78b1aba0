"""Shardings: which elements of a parameter are on which rank.

By row (`fully_shard`): each parameter is chunked along one dim as by `torch.chunk`, and chunks are padded. Flat
(`FullyShardedDataParallel`): the concatenated parameters of a unit are split into equal shards, even inside a
parameter, for example:

    world 4, float32, parameters of 15, 5, 15 and 3 elements

    not aligned  |15|5|15|3| 2 of padding = 40 elements, 10 on each rank
    aligned      |15|.|5|...|15|.|3|.      = 44 elements, 11 on each rank; parameters begin at multiples of 16 bytes

The concatenated flat shards of all ranks are the unit, so an all-gather needs one collective and no copies. A rank has
a contiguous range of each parameter, which is often empty.
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
    """A parameter sharded along dim `dim` over `world` ranks.

    Along dim 0, the concatenated padded chunks of all ranks are the parameter. Along another dim they are not, so the
    parameter must be copied after the all-gather and before the reduce-scatter (`needs_copy`).
    """

    shape: tuple[int, ...]
    world: int
    dim: int = 0
    stride: ClassVar[None] = None
    local_stride: ClassVar[None] = None
    """Strides of the unsharded parameter, and of the shard; None means contiguous."""

    def __post_init__(self) -> None:
        if self.dim and self.shape[self.dim] % self.world:
            raise AssertionError(f"dim {self.dim} of {self.shape} is not divisible by {self.world}")

    @property
    def needs_copy(self) -> bool:
        return self.dim > 0

    @cached_property
    def width(self) -> int:
        """The number of elements per index of the sharded dim."""
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
    """The position of a parameter in a flat unit, which determines the elements on each rank.

    `begin`: the parameter's first element in the unit; `shard_numel`: elements of the unit on each rank; `stride`: the
    parameter's strides, without gaps between elements.
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
        """Return the first element of the parameter that is on `rank`, and the number of elements on `rank`."""
        first = min(max(rank * self.shard_numel - self.begin, 0), self.numel)
        last = min(max((rank + 1) * self.shard_numel - self.begin, 0), self.numel)
        return first, last - first

    def local_shape(self, rank: int) -> tuple[int, ...]:
        """Return the shape of the shard: one-dimensional, or the parameter's own shape if there is only one rank."""
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
    """Elements of the unit. If aligned, includes padding at the end, which makes the length divisible by the ranks."""
    shard_numel: int
    """Elements on each rank."""

    @property
    def padded(self) -> tuple[int, ...]:
        return tuple(numel for numel, _ in self.numels)


def flat_offsets(numels: Sequence[int], world: int, itemsize: int, aligned: bool) -> FlatOffsets:
    """Return the offsets of parameters with these numbers of elements.

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
