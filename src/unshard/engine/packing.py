"""Copies gradients to the places from which a collective sends them: with a kernel of our own, or with torch's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from ..layout.collective_tensors import DtypeRun, Region
from ..torch_private import chunk_cat_into, foreach_copy, foreach_zero
from . import observer, side_stream
from .params.buffers import Shard, pairs_to_copy
from .states import sent_dtype

Gradients = dict[int, torch.Tensor] | list[torch.Tensor]
"""Gradients by parameter index, or a list if every parameter has a gradient."""


@dataclass(frozen=True)
class Pack:
    """A packed region of the reduce-scatter input. `table` has one row per rank. `filler` zeroes the last columns."""

    table: torch.Tensor
    members: tuple[int, ...]
    filler: dict[torch.dtype, list[torch.Tensor]]
    dims: list[int]
    """The dim along which each member is sharded. The list is empty if all members are real and sharded along dim 0."""

    def fill(self, gradients: Gradients) -> None:
        columns = list(map(gradients.__getitem__, self.members))
        if self.dims:
            columns = [self._turned(column, dim) for column, dim in zip(columns, self.dims, strict=True)]
        columns += self.filler[columns[0].dtype]
        if side_stream.recording:
            self._fill_by_pieces(columns)
        else:
            chunk_cat_into(self.table, columns, self.table.shape[0])

    def _turned(self, gradient: torch.Tensor, dim: int) -> torch.Tensor:
        """Return `gradient` with its chunks concatenated along dim 0 and complex numbers viewed as pairs of reals."""
        turned = gradient
        if dim:  # one copy, however many ranks there are
            chunks = self.table.shape[0], gradient.shape[dim] // self.table.shape[0]
            turned = gradient.unflatten(dim, chunks).movedim(dim, 0).flatten(0, 1)
        # Neither the table nor its kernel has complex numbers.
        return torch.view_as_real(turned.resolve_conj()) if turned.is_complex() else turned

    def _fill_by_pieces(self, columns: list[torch.Tensor]) -> None:
        """Fill the table without `chunk_cat_into`. In a replay, its kernel would read stale addresses from the host."""
        world, start = self.table.shape[0], 0
        targets, sources, pads = [], [], []
        for column in columns:
            if not column.numel():
                continue
            rows = -(-column.shape[0] // world)
            full = column.shape[0] // rows  # ranks with as many rows; the next one may have fewer, others have none
            chunks, rest = column[: full * rows].unflatten(0, (full, rows)), column[full * rows :]
            place = self.table[:, start : start + chunks[0].numel()]
            start += place.shape[1]
            for target, source in pairs_to_copy(place[:full].view(chunks.shape), chunks):
                targets.append(target)
                sources.append(source)
            if rest.numel():
                targets.append(place[full, : rest.numel()].view(rest.shape))
                sources.append(rest)
                pads.append(place[full, rest.numel() :])
                full += 1
            if full < world:
                pads.append(place[full:])
        foreach_copy(targets, sources)
        if pads:
            foreach_zero(pads)


class Packing:
    """Copies gradients to their places in `tensors`, one tensor per region. Create it while the tensors have memory."""

    largest: torch.Tensor | None = None
    """If an observer reads gradients and a kernel has packed them: the largest absolute value of each parameter's
    gradient. It is NaN if any value is NaN."""

    def __init__(self, tensors: list[torch.Tensor], regions: Sequence[Region], shard: Shard, world: int):
        self.tensors = tensors
        self._shard, self._world = shard, world
        self._rows: list[torch.Tensor] = []
        self._members: list[int] = []
        self._pads: list[torch.Tensor] = []
        self._packs: list[Pack] = []
        for region, tensor in zip(regions, tensors, strict=True):
            self._add_packed(region.runs[0], tensor) if region.packed else self._add_row(region.runs[0], tensor)

    def _add_row(self, run: DtypeRun, tensor: torch.Tensor) -> None:
        end = 0
        if self._shard.segments.kinds[run.segment].original.is_complex:
            tensor = torch.view_as_complex(tensor.view(-1, 2))
        for index, start in zip(run.members, run.starts, strict=True):
            sharding = self._shard.shardings[index]
            if start > end:
                self._pads.append(tensor[end:start])
            end = start + sharding.numel
            row = tensor[start:end]
            self._rows.append(
                row.view(sharding.shape) if sharding.stride is None else row.as_strided(sharding.shape, sharding.stride)
            )
            self._members.append(index)
        if end < tensor.numel():
            self._pads.append(tensor[end:])

    def _add_packed(self, run: DtypeRun, tensor: torch.Tensor) -> None:
        world, kind = self._world, self._shard.segments.kinds[run.segment]
        table, is_complex = tensor.view(world, -1), kind.original.is_complex
        missing = table.shape[1] - run.numel * (2 if is_complex else 1)
        filler = {
            dtype: [torch.zeros(world * missing, dtype=dtype, device=tensor.device)] if missing else []
            for dtype in map(sent_dtype, (kind.compute, kind.reduce))  # accumulated sums are in the reduce dtype
        }
        dims = [self._shard.shardings[index].dim for index in run.members]
        self._packs.append(Pack(table, run.members, filler, dims if is_complex or any(dims) else []))

    def fill(self, gradients: Gradients) -> list[int]:
        """Copy and cast `gradients` to their places. Zero all other places. Return the indices of missing gradients."""
        rows, members, absent = self._rows, self._members, []
        if self._pads:
            foreach_zero(self._pads)
        if rows and not self._packs and len(gradients) < len(members):
            absent = [index for index in members if index not in gradients]
            foreach_zero([row for index, row in zip(members, rows, strict=True) if index not in gradients])
            rows = [row for index, row in zip(members, rows, strict=True) if index in gradients]
            members = [index for index in members if index in gradients]
        if rows:
            foreach_copy(rows, list(map(gradients.__getitem__, members)))
        for pack in self._packs:
            pack.fill(gradients)
        return absent


def packing_of(tensors: list[torch.Tensor], regions: Sequence[Region], shard: Shard, world: int) -> Packing:
    """Return a packing that uses the kernel if the device and the regions allow it."""
    kernel = pack_kernel_on(tensors[0].device) if tensors and not side_stream.recording else None
    if kernel is not None and kernel.supports(tensors, regions, shard):
        return kernel.KernelPacking(tensors, regions, shard, world)
    return Packing(tensors, regions, shard, world)


@cache
def pack_kernel_on(device: torch.device) -> Any:
    """Return the module `pack_kernel`, or None if Triton is missing or cannot compile for `device`."""
    if device.type != "cuda" or torch.version.hip is not None:
        return None
    try:
        from . import pack_kernel

        pack_kernel.try_out(device)
    except Exception as error:  # whatever a missing compiler, an old device or a full disk raises
        observer.log.info("Gradients are packed without Triton: %s: %s", type(error).__name__, error)
        return None
    return pack_kernel
