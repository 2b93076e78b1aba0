"""Decides which rank writes which box of which tensor at which offset. All ranks compute the same plan.

Ranks describe the tensors that have equal boxes together, and equal descriptions of ranks are one object (`unpacked`).
So the time of a plan depends on the number of different shapes times the number of ranks, and on the number of tensors,
but not on their product.
"""

from __future__ import annotations

from math import prod
from typing import NamedTuple

import torch

from ..errors import CheckpointError
from ..state.boxes import Box
from ..state.model import HeldTensor
from .manifest import TensorEntry
from .ranks import rank_and_size
from .stored_boxes import Split, StoredBoxes, integers
from .values import DTYPES, name_of_dtype


class Described(NamedTuple):
    """Describes tensors that one rank holds."""

    dtype: str
    shape: tuple[int, ...]
    plain: bool
    boxes: tuple[Box, ...]


Descriptions = dict[tuple[str, ...], Described]
"""What one rank holds, by the names of the tensors with the same description. The ranks exchange these dicts."""


def describe(tensors: list[HeldTensor]) -> Descriptions:
    names: dict[Described, list[str]] = {}
    seen: set[str] = set()
    rank, _ = rank_and_size()
    for each in tensors:
        if each.name in seen:
            raise CheckpointError(f"Two tensors have the name {each.name!r}.")
        if not each.name.isprintable() or len(each.name) > 4096:
            raise CheckpointError(f"{each.name[:100]!r} cannot be the name of a tensor in a checkpoint.")
        seen.add(each.name)
        shape, boxes = each.box_map.shape, each.box_map.boxes
        described = Described(name_of_dtype(each.dtype, repr(each.name)), shape, each.plain, boxes)
        # Only rank 0 lists tensors of which it has no elements. In a flat unit, those are nearly all tensors.
        if boxes or rank == 0 or not prod(shape):
            names.setdefault(described, []).append(each.name)
    return {tuple(those): described for described, those in names.items()}


def make_plan(ranks: list[Descriptions], spread: bool = True) -> tuple[dict[str, TensorEntry], list[int]]:
    """Assign each box to the rank that writes it. Return the tensor entries and the size of each rank's file.

    In the returned entries, the file number of a box is the rank that writes the box. If several ranks hold a box, the
    rank with the smallest file so far writes it, or the lowest rank if the tensor is plain or `spread` is False.
    """
    holders: dict[tuple[str, ...], list[tuple[int, Described]]] = {}
    for rank, held in enumerate(ranks):
        for names, described in held.items():
            holders.setdefault(names, []).append((rank, described))
    lists: dict[str, list[tuple[str, ...]]] = {}
    """The lists of names that contain a name. Ranks may differ in which tensors they describe together."""
    for names in holders:
        for name in names:
            lists.setdefault(name, []).append(names)
    nbytes = torch.zeros(len(ranks), dtype=torch.int64)
    columns: dict[tuple[int, ...], _Column] = {}
    splits: dict[tuple[Box, ...], Split] = {}
    tensors: dict[str, TensorEntry] = {}
    for name in sorted(lists):
        key = tuple(map(id, lists[name]))
        if key not in columns:
            columns[key] = _Column(name, sorted(pair for names in lists[name] for pair in holders[names]), splits)
        tensors[name] = columns[key].assign(nbytes, spread)
    return tensors, nbytes.tolist()


class _Column:
    """Tensors of which the same ranks hold the same boxes. `name` is one of them, for errors."""

    def __init__(self, name: str, held: list[tuple[int, Described]], splits: dict[tuple[Box, ...], Split]):
        _, self._first = held[0]
        holders: dict[Box, list[int]] = {}
        for rank, mine in held:
            if mine[:2] != self._first[:2]:
                raise CheckpointError(
                    f"{name!r} differs between ranks: rank {rank} has {mine.dtype} of shape {mine.shape}, and another "
                    f"rank has {self._first.dtype} of shape {self._first.shape}."
                )
            for box in mine.boxes:
                if box.numel:
                    holders.setdefault(box, []).append(rank)
        split = self._split = splits.setdefault(tuple(holders), Split(holders))
        if split.overlap is not None or split.numel != prod(self._first.shape):
            overlap = "" if split.overlap is None else f", and {split.overlap[0]} and {split.overlap[1]} overlap"
            raise CheckpointError(
                f"The ranks together hold {split.numel} elements of {name!r}, which has "
                f"{prod(self._first.shape)}{overlap}. Call it on all ranks, with a model and an optimizer that are "
                "sharded in the same way on all of them."
            )
        most = max(map(len, holders.values()), default=1)
        # One row per box. Rows of fewer ranks repeat the first one.
        self._holders = integers([[*each, *each[:1] * (most - len(each))] for each in holders.values()])
        self._holders = self._holders.view(len(holders), most)
        self._holds_several = len({rank for each in holders.values() for rank in each}) < sum(
            map(len, holders.values())
        )
        self._sizes = split.aligned_sizes(DTYPES[self._first.dtype].itemsize)

    def assign(self, nbytes: torch.Tensor, spread: bool) -> TensorEntry:
        """Return the entry of one of the tensors. Add the boxes to `nbytes`, the sizes of the ranks' files."""
        writers = self._holders[:, 0]
        if spread and not self._first.plain and self._holders.shape[1] > 1:
            least = nbytes[self._holders].argmin(1, keepdim=True)  # of equal sizes, the first
            writers = self._holders.gather(1, least).flatten()
        offsets = nbytes[writers]
        if self._holds_several:
            offsets += _before_in_file(writers, self._sizes)
        nbytes.index_add_(0, writers, self._sizes)
        return TensorEntry(self._first.dtype, self._first.shape, StoredBoxes(self._split, writers, offsets))


def _before_in_file(writers: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
    """Return, for each box, the sum of the sizes of the boxes before it that have the same writer."""
    ordered, order = writers.sort(stable=True)
    before = sizes[order].cumsum(0) - sizes[order]
    begins = torch.cat([ordered.new_ones(1), ordered.diff()]) != 0
    return torch.empty_like(sizes).index_copy_(0, order, before - (before * begins).cummax(0).values)
