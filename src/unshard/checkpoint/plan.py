"""Which rank writes which box of which tensor, and where: computed alike on all ranks from what each of them holds."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import NamedTuple

from ..errors import CheckpointError
from ..state.boxes import Box, first_overlap
from ..state.model import HeldTensor
from .values import DTYPES, name_of_dtype

ALIGNMENT = 64
"""Boxes begin at multiples of so many bytes, so that they can be read as tensors where they lie."""


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
    boxes: tuple[StoredBox, ...]

    @property
    def itemsize(self) -> int:
        return DTYPES[self.dtype].itemsize

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.itemsize


class Described(NamedTuple):
    """What a rank holds of a tensor, for the other ranks."""

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
    """The numbers of files are ranks."""
    nbytes: list[int]
    """Of each rank's file."""


def make_plan(ranks: list[dict[str, Described]], spread: bool = True) -> Plan:
    """Each element is written once.

    What several ranks hold is written by the one with the fewest bytes so far, or, without `spread`, by the lowest
    rank. A plain tensor is always written by the lowest rank.
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
                    f"The ranks have different tensors {name!r}: rank {rank} has the dtype {mine.dtype} and the shape "
                    f"{mine.shape}, another rank {first.dtype} and {first.shape}."
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
            "with a model and an optimizer that are sharded alike on all of them."
        )
