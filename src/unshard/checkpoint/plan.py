"""The plan of a save: which rank writes which box of which tensor at which offset. All ranks compute the same plan."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import NamedTuple

from ..errors import CheckpointError
from ..state.boxes import Box, first_overlap
from ..state.model import HeldTensor
from .values import DTYPES, name_of_dtype

ALIGNMENT = 64
"""Boxes start at multiples of this number of bytes, so that a mapped file can be viewed as tensors."""


def aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


class StoredBox(NamedTuple):
    file: int
    offset: int
    box: Box


@dataclass(frozen=True)
class TensorEntry:
    dtype: str
    shape: tuple[int, ...]
    boxes: tuple[StoredBox, ...] = ()

    @property
    def itemsize(self) -> int:
        return DTYPES[self.dtype].itemsize

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.itemsize


class Described(NamedTuple):
    """The boxes of a tensor that a rank holds, for the other ranks."""

    dtype: str
    shape: tuple[int, ...]
    plain: bool
    boxes: tuple[Box, ...]


def describe(tensors: list[HeldTensor]) -> dict[str, Described]:
    found: dict[str, Described] = {}
    for each in tensors:
        if each.name in found:
            raise CheckpointError(f"Two tensors have the name {each.name!r}.")
        if not each.name.isprintable() or len(each.name) > 4096:
            raise CheckpointError(f"{each.name[:100]!r} cannot be the name of a tensor in a checkpoint.")
        dtype = name_of_dtype(each.dtype, repr(each.name))
        found[each.name] = Described(dtype, each.part.shape, each.plain, each.part.boxes)
    return found


@dataclass(frozen=True)
class Plan:
    tensors: dict[str, TensorEntry]
    """File numbers are ranks."""
    nbytes: list[int]
    """Size of each rank's file."""


def make_plan(ranks: list[dict[str, Described]], spread: bool = True) -> Plan:
    """Assign each element to one rank.

    If several ranks hold a box, the one with the fewest bytes so far writes it; without `spread`, the lowest one does.
    The lowest rank always writes plain tensors.
    """
    nbytes = [0] * len(ranks)
    tensors: dict[str, TensorEntry] = {}
    for name in sorted({name for rank in ranks for name in rank}):
        holders: dict[Box, list[int]] = {}
        first: Described | None = None
        for rank, held in enumerate(ranks):
            mine = held.get(name)
            if mine is None:
                continue
            if first is None:
                first = mine
            if mine[:2] != first[:2]:
                raise CheckpointError(
                    f"{name!r} differs between ranks: rank {rank} has {mine.dtype} of shape {mine.shape}, and another "
                    f"rank has {first.dtype} of shape {first.shape}."
                )
            for box in mine.boxes:
                if box.numel:
                    holders.setdefault(box, []).append(rank)
        assert first is not None
        _require_all_elements(name, first, list(holders))
        stored = []
        for box, having in holders.items():
            writer = having[0] if first.plain or not spread else min(having, key=nbytes.__getitem__)
            stored.append(StoredBox(writer, nbytes[writer], box))
            nbytes[writer] += aligned(box.numel * DTYPES[first.dtype].itemsize)
        tensors[name] = TensorEntry(first.dtype, first.shape, tuple(stored))
    return Plan(tensors, nbytes)


def _require_all_elements(name: str, tensor: Described, boxes: list[Box]) -> None:
    found = sum(box.numel for box in boxes)
    overlap = first_overlap(boxes)
    if overlap is not None or found != prod(tensor.shape):
        raise CheckpointError(
            f"The ranks together hold {found} elements of {name!r}, which has {prod(tensor.shape)}"
            f"{'' if overlap is None else f', and {overlap[0]} and {overlap[1]} overlap'}. Call it on all ranks, "
            "with a model and an optimizer that are sharded in the same way on all of them."
        )
