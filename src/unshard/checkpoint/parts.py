"""Which part of a tensor this rank holds, and where that is in its local tensor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.distributed.tensor import DTensor, Shard

from ..engine.api import ManagedParam
from ..errors import CheckpointError
from ..layout.flat import FlatSharding
from ..torch_private import DTensorSpec, is_strided_shard, spec_of
from .boxes import Box, Interval, boxes_of_intervals, boxes_of_range, chunk, full_box, take


@dataclass(frozen=True)
class Part:
    """Some boxes of a tensor of shape `shape`, in a local tensor that has their elements in dimensions of its own."""

    shape: tuple[int, ...]
    boxes: tuple[Box, ...]
    slices: tuple[tuple[slice, ...], ...]

    def views(self, local: torch.Tensor) -> list[torch.Tensor]:
        """For each box a view of the local tensor of the parameter, or of its state, in the shape of the box."""
        return [local[each] for each in self.slices]


@dataclass(frozen=True)
class FlatPart(Part):
    """A run of elements in memory order, as a rank has it of a flat unit. The local tensor has one dimension."""

    starts: tuple[int, ...]
    order: tuple[int, ...]
    """The dimensions, from the largest stride to the smallest."""

    def views(self, local: torch.Tensor) -> list[torch.Tensor]:
        local = local.view(-1)  # never a copy: what is written to the views has to arrive
        back = [self.order.index(dim) for dim in range(len(self.order))]
        found = []
        for start, box in zip(self.starts, self.boxes, strict=True):
            elements = local[start : start + box.numel]
            found.append(elements.view([box.size[dim] for dim in self.order]).permute(back))
        return found


def whole(shape: Sequence[int]) -> Part:
    """All of a tensor that is not sharded."""
    return Part(tuple(shape), (full_box(shape),), ((slice(None),) * len(shape),))


def part_of_intervals(shape: Sequence[int], index: Sequence[Sequence[Interval]]) -> Part:
    found = [(box, slices) for box, slices in boxes_of_intervals(index) if box.numel]
    return Part(tuple(shape), tuple(box for box, _ in found), tuple(slices for _, slices in found))


def intervals_of(name: str, spec: DTensorSpec) -> list[list[Interval]] | None:
    """The indices that this rank's local tensor has in each dimension; None for a rank outside the mesh."""
    coordinate = spec.mesh.get_coordinate()
    if coordinate is None:
        return None
    index: list[list[Interval]] = [[(0, length)] if length else [] for length in spec.shape]
    for number, placement in enumerate(spec.placements):
        ranks, mine = spec.mesh.size(number), coordinate[number]
        if placement.is_replicate():
            continue
        if is_strided_shard(placement):
            # Sharded by a later mesh dimension first; each of these shards is chunked here.
            dim, factor = placement.dim, placement.split_factor  # type: ignore[attr-defined]
            parts = [chunk(chunk(index[dim], factor, each), ranks, mine) for each in range(factor)]
            index[dim] = [interval for part in parts for interval in part]
        elif isinstance(placement, Shard):
            index[placement.dim] = chunk(index[placement.dim], ranks, mine)
        else:
            raise CheckpointError(
                f"{name!r} is a DTensor with the placement {placement}, which cannot be saved: its value is the sum of "
                "what the ranks hold. Redistribute it to Replicate() or Shard(dim) first."
            )
    return index


def part_of_dtensor(name: str, tensor: DTensor) -> Part:
    index = intervals_of(name, spec_of(tensor))
    return Part(tuple(tensor.shape), (), ()) if index is None else part_of_intervals(tensor.shape, index)


def part_of_param(name: str, param: ManagedParam, rank: int, in_a_row: bool) -> Part:
    """Of a managed parameter; `rank`: this rank's number among those that have the shards.

    `in_a_row`: the local tensors of a flat unit have one dimension, in memory order. Otherwise they have their shape,
    and those of the optimizer's state may have other strides.
    """
    sharding, spec = param.sharding, param.tp_spec
    shape = tuple(sharding.shape) if spec is None else tuple(spec.shape)
    index = None if spec is None else intervals_of(name, spec)
    if index is None:
        index = [[(0, length)] if length else [] for length in sharding.shape]
    if isinstance(sharding, FlatSharding):
        return _flat_part(name, shape, index, sharding, rank) if in_a_row else part_of_intervals(shape, index)
    if shape:
        index[sharding.dim] = take(index[sharding.dim], *sharding.rows(rank))
    return part_of_intervals(shape, index)


def _flat_part(
    name: str, shape: tuple[int, ...], index: list[list[Interval]], sharding: FlatSharding, rank: int
) -> Part:
    if any(len(intervals) > 1 for intervals in index):
        raise CheckpointError(f"{name!r} is a strided shard in a flat unit, which is not supported.")
    offsets = [intervals[0][0] if intervals else 0 for intervals in index]
    order = tuple(sorted(range(len(sharding.shape)), key=lambda dim: (-sharding.stride[dim], dim)))
    boxes, starts = [], []
    for start, box in boxes_of_range([sharding.shape[dim] for dim in order], *sharding.elements(rank)):
        begin, size = [0] * len(order), [0] * len(order)
        for place, dim in enumerate(order):
            begin[dim], size[dim] = box.begin[place], box.size[place]
        boxes.append(Box(tuple(begin), tuple(size)).moved(offsets))
        starts.append(start)
    return FlatPart(shape, tuple(boxes), (), tuple(starts), order)
