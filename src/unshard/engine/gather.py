"""Makes a unit whole: cast, collective, copy-out of what was packed. Every tensor it needs is made once."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from ..comm.interface import Done, Transport, Work
from ..layout.rows import Grouping, Placement, Region, arrange, place
from ..torch_private import foreach_copy
from .buffers import Buffer, pieces
from .master import Master


@dataclass(frozen=True)
class CopyOut:
    """A packed region's columns and the parameters they become."""

    source: torch.Tensor
    sizes: list[int]
    targets: list[torch.Tensor]


class Gather:
    """The full buffer of a unit and the way into it.

    Large parameters are gathered straight into the full buffer. Packed ones arrive in `staging`, which is given
    back as soon as they are copied out. Where the dtype changes, the cast writes into this rank's own place in
    the output and the gather works in place, so that no second copy of the shard exists.
    """

    def __init__(self, master: Master, transport: Transport, device: torch.device, away: bool):
        self._transport = transport
        self._master = master
        world, itemsizes = transport.world, master.segments.itemsizes("compute")
        singles = tuple(_single(master, index) for index in range(len(master.cuts)))
        self._singles = [region for region in singles if region is not None]
        own_places = place(self._singles, itemsizes, world)
        self.full = Buffer(own_places.nbytes, device)
        packed = [region for region in master.regions if region.packed]
        staged = place(packed, itemsizes, world, transport.piece_alignment)
        self.staging = Buffer(staged.nbytes, device)
        self._full_offset = {
            region.members[0]: spot.offset for region, spot in zip(self._singles, own_places.places, strict=True)
        }
        self._inputs: list[torch.Tensor] = []
        self._outputs: list[torch.Tensor] = []
        self._cast_from: list[torch.Tensor] = []
        self._cast_to: list[torch.Tensor] = []
        self._connect(packed, staged, away)
        self._copies = [self._copy_out(r, s, staged) for s, r in enumerate(packed)]
        self.release()

    def start(self) -> Work:
        """Issue the gather. Until the work is waited for the buffers must not be touched."""
        self.full.take()
        self.staging.take()
        if self._cast_to:
            foreach_copy(self._cast_to, self._cast_from)
        return self._transport.gather(self._outputs, self._inputs) if self._outputs else Done()

    def finish(self, work: Work) -> None:
        """Wait, and copy packed parameters to their places."""
        work.wait()
        for copy in self._copies:
            torch.split_with_sizes_copy(copy.source, copy.sizes, dim=1, out=copy.targets)
        self.staging.release()

    def release(self) -> None:
        self.full.release()
        self.staging.release()

    def full_faces(self) -> list[nn.Parameter]:
        """Parameters over the full buffer, the same objects for the life of the unit."""
        self.full.take()
        faces = []
        for index, cut in enumerate(self._master.cuts):
            dtype = self._master.segments.dtypes(index).compute
            tensor = self.full.tensor(dtype, self._full_offset.get(index, 0), cut.shape)
            faces.append(nn.Parameter(tensor, requires_grad=False))
        self.full.release()
        return faces

    def _connect(self, packed: list[Region], staged: Placement, away: bool) -> None:
        """Inputs, outputs and casts of every region, in the order of the master's regions."""
        outputs = iter(pieces(self.staging, staged, packed, self._master.segments, "compute"))
        runs = self._master.run_tensors()
        staged_places = iter(staged.places)
        for number, region in enumerate(self._master.regions):
            if region.packed:
                spot = next(staged_places)
                output, buffer, offset, piece = next(outputs), self.staging, spot.offset, spot.piece
                starts = spot.runs
            else:
                index = region.members[0]
                dtype = self._master.segments.dtypes(index).compute
                offset, piece = self._full_offset[index], region.runs[0].numel * dtype.itemsize
                output = self.full.tensor(dtype, offset, (piece // dtype.itemsize * self._transport.world,))
                buffer, starts = self.full, (0,)
            carrier = self._transport.carrier(output.dtype)
            output = output.view(carrier)
            mine = offset + self._transport.rank * piece
            same = all(
                self._master.segments.kinds[run.segment].original == self._master.segments.kinds[run.segment].compute
                for run in region.runs
            )
            if same and not away and not self._transport.in_place_only:
                self._inputs.append(self._master.piece_bytes(number).view(carrier))
            else:
                self._inputs.append(buffer.tensor(carrier, mine, (piece // carrier.itemsize,)))
                self._cast_from += runs[number]
                self._cast_to += [
                    buffer.tensor(self._master.segments.kinds[run.segment].compute, mine + start, (run.numel,))
                    for run, start in zip(region.runs, starts, strict=True)
                ]
            self._outputs.append(output)

    def _copy_out(self, region: Region, number: int, staged: Placement) -> CopyOut:
        """Columns of a packed region, in its elements or, for several dtypes, in bytes."""
        world, spot = self._transport.world, staged.places[number]
        kinds = {self._master.segments.kinds[run.segment].compute for run in region.runs}
        dtype = kinds.pop() if len(kinds) == 1 else torch.uint8
        sizes, targets, column = [], [], 0
        for run, start in zip(region.runs, spot.runs, strict=True):
            itemsize = self._master.segments.kinds[run.segment].compute.itemsize
            if start != column:
                raise AssertionError("runs of a packed region are not end to end")
            for index in run.members:
                nbytes = self._master.cuts[index].piece * itemsize
                sizes.append(nbytes // dtype.itemsize)
                targets.append(self.full.tensor(dtype, self._full_offset[index], (world, sizes[-1])))
                column += nbytes
        source = self.staging.tensor(dtype, spot.offset, (world, spot.piece // dtype.itemsize))
        return CopyOut(source[:, : sum(sizes)], sizes, targets)


def _single(master: Master, index: int) -> Region | None:
    """The parameter in a region of its own: where its full face lies."""
    regions = arrange(master.items, (index,), Grouping.BY_SEGMENT)
    return Region(regions[0].runs, packed=False) if regions else None
