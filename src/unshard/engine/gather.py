"""Makes a unit whole: cast, collective, copy-out of what was packed. Every tensor it needs is made once."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from ..comm.interface import Transport, Work
from ..layout.rows import Cut, Place, Region, place
from ..torch_private import foreach_copy
from .buffers import Buffer
from .full import FullBuffer
from .shard import Shard
from .upload import Upload, Way

Collective = Callable[[list[torch.Tensor], list[torch.Tensor]], Work]


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
    """The same where parameters are cut along another dimension, or lie with gaps: piece by piece into their views."""

    sources: list[torch.Tensor]
    targets: list[torch.Tensor]

    def run(self) -> None:
        foreach_copy(self.targets, self.sources)


class Gather:
    """The way from a shard into the full buffer. `outputs` and `inputs` are what the collective takes.

    Large parameters are gathered straight into the full buffer. Packed ones arrive in `staging`, which is given
    back as soon as they are copied out. Where the dtype changes, the cast writes into this rank's own place in
    the output and the gather works in place, so that no second copy of the shard exists.
    """

    def __init__(self, shard: Shard, full: FullBuffer, transport: Transport, way: Way | None = None):
        """`way`: leads to the shard, if that is on the host."""
        away = way is not None
        self._transport, self._shard, self._full = transport, shard, full
        packed = [region for region in shard.regions if region.packed]
        staged = place(packed, shard.segments.itemsizes("compute"), transport.world, transport.piece_alignment)
        self._staging = Buffer(staged.nbytes, full.device, transport.pool)
        self.inputs: list[torch.Tensor] = []
        self.outputs: list[torch.Tensor] = []
        self._cast_from: list[torch.Tensor] = []
        self._cast_to: list[torch.Tensor] = []
        full.take()
        spots = iter(staged.places)
        for number, region in enumerate(shard.regions):
            if region.packed:
                self._connect(number, region, self._staging, next(spots), away)
            else:
                self._connect(number, region, full, self._place_in_full(region), away)
        self._leave_out_what_is_there()
        self._copies = [self._copy_out(r, spot) for r, spot in zip(packed, staged.places, strict=True)]
        self._upload = None if way is None else Upload(shard, self._cast_from, full.device, way)
        self._staging.release()
        full.release()

    def _leave_out_what_is_there(self) -> None:
        """Nothing is copied where the full buffer is the master shard itself."""
        pairs = zip(self._cast_to, self._cast_from, strict=True)
        needed = [(to, source) for to, source in pairs if to.data_ptr() != source.data_ptr()]
        self._cast_to, self._cast_from = [to for to, _ in needed], [source for _, source in needed]

    @property
    def members(self) -> list[tuple[int, ...]]:
        """The parameters in each input."""
        return [region.members for region in self._shard.regions]

    def send(self) -> None:
        """Let a shard on the host set out for the device."""
        if self._upload is not None:
            self._upload.send()

    def recall(self) -> None:
        if self._upload is not None:
            self._upload.recall()

    def start(self, collective: Collective, in_lane: bool = True) -> Work:
        """Have memory and the cast shard in it, and issue the collective. Until `finish` nobody may touch the buffers.

        `in_lane`: the collective may be issued from where a shard on the host arrives.
        """
        self._full.take()
        if self._copies:
            self._staging.take()
        if self._upload is not None:
            if in_lane and self._transport.stays_in_lane:
                return self._upload.start(self._cast_to, lambda: collective(self.outputs, self.inputs))
            self._upload.start(self._cast_to).wait()
        elif self._cast_to:
            foreach_copy(self._cast_to, self._cast_from)
        return collective(self.outputs, self.inputs)

    def finish(self) -> None:
        """After the collective: copy packed parameters to their places."""
        if self._copies:
            for copy in self._copies:
                copy.run()
            self._staging.release()

    def _place_in_full(self, region: Region) -> Place:
        run = region.runs[0]
        itemsize = self._shard.segments.kinds[run.segment].compute.itemsize
        offset = self._full.offsets[run.members[0]] - run.starts[0] * itemsize
        return Place(offset, run.numel * itemsize, self._transport.world, (0,))

    def _connect(self, number: int, region: Region, buffer: Buffer, spot: Place, away: bool) -> None:
        """Input and output of one region, and the casts into this rank's place where the input is not the shard."""
        kinds = [self._shard.segments.kinds[run.segment] for run in region.runs]
        carrier = self._transport.carrier(_common_dtype(kind.compute for kind in kinds))
        self.outputs.append(buffer.tensor(carrier, spot.offset, (spot.piece * spot.copies // carrier.itemsize,)))
        if all(kind.original == kind.compute for kind in kinds) and not away and not self._transport.in_place_only:
            self.inputs.append(self._shard.piece_bytes(number).view(carrier))
            return
        mine = spot.offset + self._transport.rank * spot.piece
        self.inputs.append(buffer.tensor(carrier, mine, (spot.piece // carrier.itemsize,)))
        self._cast_from += self._shard.run_tensors(number)
        self._cast_to += [
            buffer.tensor(kind.compute, mine + start, (run.numel,))
            for run, kind, start in zip(region.runs, kinds, spot.runs, strict=True)
        ]

    def _copy_out(self, region: Region, spot: Place) -> CopyOut | CrossedCopyOut:
        crossed = any(self._shard.cuts[index].crossed for index in region.members)
        if crossed or not self._end_to_end(region, spot):
            return self._crossed_copy_out(region, spot)
        return self._plain_copy_out(region, spot)

    def _cut(self, index: int) -> Cut:
        """How a parameter of a packed region is cut."""
        cut = self._shard.cuts[index]
        assert isinstance(cut, Cut)
        return cut

    def _end_to_end(self, region: Region, spot: Place) -> bool:
        """Whether the runs leave no gaps. They do where wide elements come after narrow ones."""
        ends = [
            start + run.numel * self._shard.segments.kinds[run.segment].compute.itemsize
            for run, start in zip(region.runs, spot.runs, strict=True)
        ]
        return list(spot.runs) == [0, *ends[:-1]]

    def _crossed_copy_out(self, region: Region, spot: Place) -> CrossedCopyOut:
        sources, targets = [], []
        for run, start in zip(region.runs, spot.runs, strict=True):
            dtype = self._shard.segments.kinds[run.segment].compute
            for index, first in zip(run.members, run.starts, strict=True):
                cut = self._cut(index)
                whole = self._full.tensor(dtype, self._full.offsets[index], _padded(cut))
                for rank, target in enumerate(whole.chunk(cut.world, cut.dim)):
                    offset = spot.offset + rank * spot.piece + start + first * dtype.itemsize
                    sources.append(self._staging.tensor(dtype, offset, target.shape))
                    targets.append(target)
        return CrossedCopyOut(sources, targets)

    def _plain_copy_out(self, region: Region, spot: Place) -> CopyOut:
        """Columns of a packed region, in its elements or, for several dtypes, in bytes."""
        kinds = [self._shard.segments.kinds[run.segment] for run in region.runs]
        dtype = _common_dtype(kind.compute for kind in kinds)
        sizes, targets = [], []
        for run, kind in zip(region.runs, kinds, strict=True):
            for index in run.members:
                nbytes = self._cut(index).piece * kind.compute.itemsize
                sizes.append(nbytes // dtype.itemsize)
                targets.append(self._full.tensor(dtype, self._full.offsets[index], (spot.copies, sizes[-1])))
        source = self._staging.tensor(dtype, spot.offset, (spot.copies, spot.piece // dtype.itemsize))
        return CopyOut(source[:, : sum(sizes)], sizes, targets)


def _common_dtype(dtypes: Iterable[torch.dtype]) -> torch.dtype:
    """The dtype they share, or bytes."""
    kinds = set(dtypes)
    return kinds.pop() if len(kinds) == 1 else torch.uint8


def _padded(cut: Cut) -> tuple[int, ...]:
    return (*cut.shape[: cut.dim], cut.chunk * cut.world, *cut.shape[cut.dim + 1 :])
