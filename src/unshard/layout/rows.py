"""Per-parameter sharding: each parameter is chunked along one dim like `torch.chunk`, and chunks are padded."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import prod


@dataclass(frozen=True)
class RowSharding:
    """A parameter sharded along dim `dim` over `world` ranks.

    Along dim 0, the concatenated padded chunks of all ranks are the parameter. Along another dim they are not, so the
    parameter must be copied after the all-gather and before the reduce-scatter (`needs_copy`).
    """

    shape: tuple[int, ...]
    world: int
    dim: int = 0

    def __post_init__(self) -> None:
        if self.dim and self.shape[self.dim] % self.world:
            raise AssertionError(f"dim {self.dim} of {self.shape} is not divisible by {self.world}")

    @property
    def needs_copy(self) -> bool:
        return self.dim > 0

    @cached_property
    def width(self) -> int:
        """Elements per index of the sharded dim."""
        return prod(self.shape[: self.dim]) * prod(self.shape[self.dim + 1 :])

    @cached_property
    def numel(self) -> int:
        return prod(self.shape)

    @cached_property
    def chunk(self) -> int:
        """Length of a padded chunk along the sharded dim."""
        return -(-self.shape[self.dim] // self.world)

    @cached_property
    def piece(self) -> int:
        """Elements of a padded chunk."""
        return self.chunk * self.width

    def rows(self, rank: int) -> tuple[int, int]:
        """First index and number of indices of the chunk of `rank` along the sharded dim, without padding."""
        first = min(rank * self.chunk, self.shape[self.dim])
        return first, min(self.chunk, self.shape[self.dim] - first)

    def local_shape(self, rank: int) -> tuple[int, ...]:
        """Shape of the chunk of `rank`, without padding."""
        return (*self.shape[: self.dim], self.rows(rank)[1], *self.shape[self.dim + 1 :])

    @property
    def unsharded(self) -> RowSharding:
        """The same parameter on one rank."""
        return RowSharding(self.shape, 1)

    @property
    def stride(self) -> tuple[int, ...] | None:
        """Strides of the unsharded parameter; None means contiguous."""
        return None

    @property
    def local_stride(self) -> tuple[int, ...] | None:
        """Strides of the shard; None means contiguous."""
        return None
