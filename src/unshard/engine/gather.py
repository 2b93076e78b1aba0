"""Makes a unit whole: cast, collective, copy-out of what was packed. Every tensor it needs is made once."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from ..comm.interface import Done, Transport, Work
from ..layout.rows import Cut, Grouping, Place, Region, arrange, place
from ..torch_private import foreach_copy
from .buffers import Buffer
from .master import Master


@dataclass(frozen=True)
class CopyOut:
    """A packed region's columns and the parameters they become."""

    source: torch.Tensor
    sizes: list[int]
    targets: list[torch.Tensor]

    def run(self) -> None:
        torch.split_with_sizes_copy(self.source, self.sizes, dim=1, out=self.targets)


@dataclass(frozen=True)
class CrossedCopyOut:
    """The same where some parameters are cut along another dimension: piece by piece into strided views of them."""

    sources: list[torch.Tensor]
    targets: list[torch.Tensor]

    def run(self) -> None:
        foreach_copy(self.targets, self.sources)


class Gather:
    """The full buffer of a unit and the way into it.

    Large parameters are gathered straight into the full buffer. Packed ones arrive in `staging`, which is given
    back as soon as they are copied out. Where the dtype changes, the cast writes into this rank's own place in
    the output and the gather works in place, so that no second copy of the shard exists.
    """

    def __init__(self, master: Master, transport: Transport, device: torch.device, away: bool):
        self._transport, self._master = transport, master
        itemsizes = master.segments.itemsizes("compute")
        singles = [region for index in range(len(master.cuts)) for region in _single(master, index)]
        packed = [region for region in master.regions if region.packed]
        whole = place(singles, itemsizes, transport.world)
        staged = place(packed, itemsizes, transport.world, transport.piece_alignment)
        self.full = Buffer(whole.nbytes, device)
        self.staging = Buffer(staged.nbytes, device)
        self._full_places = {r.members[0]: spot for r, spot in zip(singles, whole.places, strict=True)}
        self._inputs: list[torch.Tensor] = []
        self._outputs: list[torch.Tensor] = []
        self._cast_from: list[torch.Tensor] = []
        self._cast_to: list[torch.Tensor] = []
        spots = iter(staged.places)
        for number, region in enumerate(master.regions):
            if region.packed:
                self._connect(number, region, self.staging, next(spots), away)
            else:
                self._connect(number, region, self.full, self._full_places[region.members[0]], away)
        self._copies = [self._copy_out(r, spot) for r, spot in zip(packed, staged.places, strict=True)]
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
            copy.run()
        self.staging.release()

    def release(self) -> None:
        self.full.release()
        self.staging.release()

    def places(self) -> list[torch.Tensor]:
        """Each parameter's place in the full buffer."""
        self.full.take()
        tensors = []
        for index, cut in enumerate(self._master.cuts):
            offset = self._full_places[index].offset if cut.numel else 0
            tensors.append(self.full.tensor(self._master.segments.dtypes(index).compute, offset, cut.shape))
        self.full.release()
        return tensors

    def _connect(self, number: int, region: Region, buffer: Buffer, spot: Place, away: bool) -> None:
        """Input and output of one region, and the casts into this rank's place where the input is not the master."""
        kinds = [self._master.segments.kinds[run.segment] for run in region.runs]
        carrier = self._transport.carrier(_common_dtype(kind.compute for kind in kinds))
        self._outputs.append(buffer.tensor(carrier, spot.offset, (spot.piece * spot.copies // carrier.itemsize,)))
        if all(kind.original == kind.compute for kind in kinds) and not away and not self._transport.in_place_only:
            self._inputs.append(self._master.piece_bytes(number).view(carrier))
            return
        mine = spot.offset + self._transport.rank * spot.piece
        self._inputs.append(buffer.tensor(carrier, mine, (spot.piece // carrier.itemsize,)))
        self._cast_from += self._master.run_tensors(number)
        self._cast_to += [
            buffer.tensor(kind.compute, mine + start, (run.numel,))
            for run, kind, start in zip(region.runs, kinds, spot.runs, strict=True)
        ]

    def _copy_out(self, region: Region, spot: Place) -> CopyOut | CrossedCopyOut:
        if any(self._master.cuts[index].crossed for index in region.members):
            return self._crossed_copy_out(region, spot)
        return self._plain_copy_out(region, spot)

    def _crossed_copy_out(self, region: Region, spot: Place) -> CrossedCopyOut:
        sources, targets = [], []
        for run, start in zip(region.runs, spot.runs, strict=True):
            dtype = self._master.segments.kinds[run.segment].compute
            for index, first in zip(run.members, run.starts, strict=True):
                cut = self._master.cuts[index]
                whole = self.full.tensor(dtype, self._full_places[index].offset, _padded(cut))
                for rank, target in enumerate(whole.chunk(cut.world, cut.dim)):
                    offset = spot.offset + rank * spot.piece + start + first * dtype.itemsize
                    sources.append(self.staging.tensor(dtype, offset, target.shape))
                    targets.append(target)
        return CrossedCopyOut(sources, targets)

    def _plain_copy_out(self, region: Region, spot: Place) -> CopyOut:
        """Columns of a packed region, in its elements or, for several dtypes, in bytes."""
        kinds = [self._master.segments.kinds[run.segment] for run in region.runs]
        dtype = _common_dtype(kind.compute for kind in kinds)
        sizes, targets, column = [], [], 0
        for run, kind, start in zip(region.runs, kinds, spot.runs, strict=True):
            if start != column:
                raise AssertionError("runs of a packed region are not end to end")
            for index in run.members:
                nbytes = self._master.cuts[index].piece * kind.compute.itemsize
                sizes.append(nbytes // dtype.itemsize)
                targets.append(self.full.tensor(dtype, self._full_places[index].offset, (spot.copies, sizes[-1])))
                column += nbytes
        source = self.staging.tensor(dtype, spot.offset, (spot.copies, spot.piece // dtype.itemsize))
        return CopyOut(source[:, : sum(sizes)], sizes, targets)


def _common_dtype(dtypes: Iterable[torch.dtype]) -> torch.dtype:
    """The dtype they share, or bytes."""
    kinds = set(dtypes)
    return kinds.pop() if len(kinds) == 1 else torch.uint8


def _padded(cut: Cut) -> tuple[int, ...]:
    return (*cut.shape[: cut.dim], cut.chunk * cut.world, *cut.shape[cut.dim + 1 :])


def _single(master: Master, index: int) -> list[Region]:
    """The parameter in a region of its own, where its full face lies; none if it has no elements."""
    return [Region(region.runs, packed=False) for region in arrange(master.items, (index,), Grouping.BY_SEGMENT)]
