"""Gradients before their reduction: packed into the reduce-scatter input, or accumulated on this rank."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch

from ..layout.collective_tensors import Region, lay_out
from ..torch_private import chunk_cat_into, foreach_add, foreach_copy, foreach_zero, storage_use_count
from . import side_stream
from .params.buffers import Buffer, Shard
from .states import sent_dtype

Gradients = dict[int, torch.Tensor] | list[torch.Tensor]
"""By number of the parameter; a list if every parameter has one."""


@dataclass(frozen=True)
class Pack:
    """A packed region of the reduce-scatter input: a table with one row per rank; `filler` zeroes its last columns."""

    table: torch.Tensor
    members: tuple[int, ...]
    filler: dict[torch.dtype, list[torch.Tensor]]
    needs_copy: dict[int, int]
    """The dim along which parameters are sharded, if it is not 0."""

    def fill(self, gradients: Gradients) -> None:
        columns = [gradients[index] for index in self.members]
        if self.needs_copy:
            columns = [self._turned(index, column) for index, column in zip(self.members, columns, strict=True)]
        self._fill(columns + self.filler[columns[0].dtype])

    def _fill(self, columns: list[torch.Tensor]) -> None:
        if side_stream.recording:
            self._fill_by_pieces(columns)
        else:
            chunk_cat_into(self.table, columns, self.table.shape[0])

    def _fill_by_pieces(self, columns: list[torch.Tensor]) -> None:
        """Replace `chunk_cat_into`, whose kernel reads addresses from host memory, which a replay cannot repeat."""
        world, start = self.table.shape[0], 0
        targets, sources, pads = [], [], []
        for column in columns:
            rows = -(-column.shape[0] // world)
            width = rows * column[:1].numel()
            pieces = column.split(rows) if rows else ()
            for rank in range(world):
                place = self.table[rank, start : start + width]
                if rank < len(pieces):
                    piece = pieces[rank]
                    targets.append(place[: piece.numel()].view(piece.shape))
                    sources.append(piece)
                    place = place[piece.numel() :]
                if place.numel():
                    pads.append(place)
            start += width
        foreach_copy(targets, sources)
        if pads:
            foreach_zero(pads)

    def _turned(self, index: int, gradient: torch.Tensor) -> torch.Tensor:
        """Return the gradient with the chunks of all ranks along dim 0."""
        dim = self.needs_copy.get(index)
        return gradient if dim is None else torch.cat(gradient.chunk(self.table.shape[0], dim))


class ComplexPack(Pack):
    """The same for complex gradients, as pairs of reals: neither the table nor its kernel has complex numbers."""

    def fill(self, gradients: Gradients) -> None:
        columns = [self._turned(index, gradients[index]) for index in self.members]
        reals = [torch.view_as_real(column.resolve_conj()) for column in columns]
        self._fill(reals + self.filler[reals[0].dtype])


class Packing:
    """Copies gradients to their places in `tensors`, one per region. Made once, while these have memory."""

    def __init__(self, tensors: list[torch.Tensor], regions: Sequence[Region], shard: Shard, world: int):
        self.tensors = tensors
        self._shard, self._world = shard, world
        self._rows: list[torch.Tensor] = []
        self._members: list[int] = []
        self._pads: list[torch.Tensor] = []
        self._packs: list[Pack] = []
        for region, tensor in zip(regions, tensors, strict=True):
            self._add_packed(region, tensor) if region.packed else self._add_row(region, self._numbers(region, tensor))

    def _numbers(self, region: Region, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor of a collective as complex numbers, if its parameters are complex."""
        is_complex = self._shard.segments.kinds[region.runs[0].segment].original.is_complex
        return torch.view_as_complex(tensor.view(-1, 2)) if is_complex else tensor

    def _add_row(self, region: Region, tensor: torch.Tensor) -> None:
        """Add one parameter, or several in a row."""
        end = 0
        for index, start in zip(region.runs[0].members, region.runs[0].starts, strict=True):
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

    def _add_packed(self, region: Region, tensor: torch.Tensor) -> None:
        run, world = region.runs[0], self._world
        table = tensor.view(world, -1)
        kind = self._shard.segments.kinds[run.segment]
        is_complex = kind.original.is_complex
        missing = table.shape[1] - run.numel * (2 if is_complex else 1)
        filler = {
            dtype: [torch.zeros(world * missing, dtype=dtype, device=tensor.device)] if missing else []
            for dtype in map(sent_dtype, (kind.compute, kind.reduce))  # accumulated sums are in the reduce dtype
        }
        shardings = self._shard.shardings
        needs_copy = {index: shardings[index].dim for index in run.members if shardings[index].needs_copy}
        self._packs.append((ComplexPack if is_complex else Pack)(table, run.members, filler, needs_copy))

    def fill(self, gradients: Gradients) -> list[int]:
        """Copy and cast `gradients` to their places; return the parameters without one, whose places are zeroed."""
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


class UnreducedGradients:
    """Sums of gradients that backwards did not synchronise, in one flat buffer; nearly always in the reduce dtype."""

    def __init__(self, shard: Shard, device: torch.device):
        itemsizes = shard.segments.itemsizes("kept")
        items = [
            replace(item, sharding=item.sharding.unsharded, itemsize=itemsizes[item.segment]) for item in shard.items
        ]
        regions = shard.layout.unsharded_regions(items, range(len(items)))
        buffer_layout = lay_out(regions, itemsizes, items[0].sharding.world if items else 1)
        self.buffer = Buffer(buffer_layout.nbytes, device)
        self._views = {}
        for region, at in zip(regions, buffer_layout.ranges, strict=True):
            run = region.runs[0]
            for index, start in zip(run.members, run.starts, strict=True):
                dtype, sharding = shard.segments.dtypes(index).kept, shard.shardings[index]
                self._views[index] = self.buffer.tensor(
                    dtype, at.offset + start * dtype.itemsize, sharding.shape, sharding.stride
                )
        self._flats: dict[int, torch.Tensor] = {}
        self._uses = storage_use_count(self.buffer.storage)
        self.buffer.release()
        self.present: set[int] = set()
        """Indices of the parameters that have sums."""

    def add(self, gradients: dict[int, torch.Tensor]) -> None:
        self.buffer.take()
        new = [index for index in gradients if index not in self.present]
        old = [index for index in gradients if index in self.present]
        if new:
            foreach_copy([self._views[i] for i in new], [gradients[i] for i in new])
        if old:
            foreach_add([self._views[i] for i in old], [gradients[i] for i in old])
        self.present.update(new)

    def sums(self) -> dict[int, torch.Tensor]:
        return {index: self._views[index] for index in sorted(self.present)}

    def flat(self, length: int) -> torch.Tensor:
        """Return the sums of a flat unit as one tensor, with zeros for parameters without one."""
        if length not in self._flats:
            dtype = next(iter(self._views.values())).dtype
            self._flats[length] = self.buffer.tensor(dtype, 0, (length,))
            self._uses += 1
        flat = self._flats[length]
        if len(self.present) < len(self._views):
            kept = [view.clone() for view in self.sums().values()]
            flat.zero_()
            foreach_copy(list(self.sums().values()), kept)
        return flat

    def forget(self, indices: Iterable[int]) -> None:
        self.present.difference_update(indices)

    def clear(self) -> bool:
        """Drop all sums; return False if a user holds the memory."""
        self.present.clear()
        if self.buffer.held and storage_use_count(self.buffer.storage) > self._uses:
            return False
        self.buffer.release()
        return True
