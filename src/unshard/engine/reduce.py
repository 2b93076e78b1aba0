"""Reduces a unit's gradients: pack and cast, reduce-scatter, then what is left to do on the shard."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..comm.interface import Transport, Work
from ..layout.rows import Grouping, Item, Region, arrange, place
from ..torch_private import chunk_cat_into, foreach_copy, foreach_div, foreach_zero
from .buffers import Buffer, bodies, pieces
from .faces import Slot
from .grad_shard import GradShard
from .master import Master
from .precision import division
from .residence import Residence


@dataclass(frozen=True)
class Pack:
    """A packed region as a table of ranks by columns, the parameters in it, and zeros for its last columns."""

    table: torch.Tensor
    members: tuple[int, ...]
    filler: dict[torch.dtype, list[torch.Tensor]]

    def fill(self, gradients: dict[int, torch.Tensor]) -> None:
        columns = [gradients[index] for index in self.members]
        chunk_cat_into(self.table, columns + self.filler[columns[0].dtype], self.table.shape[0])


class Reduction:
    """How the gradients of one set of parameters are reduced. One exists per set that ever had gradients.

    The reduce-scatter writes straight into the gradient shard where dtype and device allow it, otherwise into
    `reduced`, from where one call casts or copies it.
    """

    def __init__(
        self,
        master: Master,
        members: tuple[int, ...],
        slots: list[Slot],
        transport: Transport,
        device: torch.device,
        residence: Residence,
    ):
        segments = master.segments
        itemsizes = segments.itemsizes("reduce")
        items = [Item(item.cut, item.segment, itemsizes[item.segment]) for item in master.items]
        grouping = Grouping.GROUPED if transport.reduces_groups else Grouping.BY_SEGMENT
        self._regions = arrange(items, members, grouping)
        self._master, self._slots, self._transport, self._residence = master, slots, transport, residence
        kinds = [segments.kinds[region.runs[0].segment] for region in self._regions]
        self._average, self._before, self._after = division(transport.world, {kind.reduce for kind in kinds})
        self._direct = not residence.away and all(kind.reduce == kind.original for kind in kinds)
        whole = place(self._regions, itemsizes, transport.world, transport.piece_alignment)
        self._whole = Buffer(whole.nbytes, device)
        self._inputs = pieces(self._whole, whole, self._regions, segments, "reduce")
        self._rows: list[tuple[int, torch.Tensor]] = []
        self._pads: list[torch.Tensor] = []
        self._packs: list[Pack] = []
        for region, tensor in zip(self._regions, self._inputs, strict=True):
            self._add_packed(region, tensor) if region.packed else self._add_row(region, tensor)
        self._whole.release()
        single = place(self._regions, itemsizes, 1, transport.piece_alignment)
        self._reduced = Buffer(single.nbytes, device)
        self._reduced_pieces = pieces(self._reduced, single, self._regions, segments, "reduce")
        self._reduced_bodies = bodies(self._reduced_pieces, self._regions)
        self._reduced.release()
        self._shards: list[GradShard] = []

    def _add_row(self, region: Region, tensor: torch.Tensor) -> None:
        index = region.members[0]
        cut = self._master.cuts[index]
        self._rows.append((index, tensor[: cut.numel].view(cut.shape)))
        if cut.numel < tensor.numel():
            self._pads.append(tensor[cut.numel :])

    def _add_packed(self, region: Region, tensor: torch.Tensor) -> None:
        run, world = region.runs[0], self._transport.world
        table = tensor.view(world, -1)
        missing = table.shape[1] - run.numel
        kind = self._master.segments.kinds[run.segment]
        filler = {
            dtype: [torch.zeros(world * missing, dtype=dtype, device=tensor.device)] if missing else []
            for dtype in (kind.compute, kind.reduce)  # kept sums arrive in the reduce dtype
        }
        self._packs.append(Pack(table, run.members, filler))

    def start(self, gradients: dict[int, torch.Tensor]) -> Pending:
        """Pack `gradients` (by parameter) and issue the reduce-scatter; the caller may then drop them."""
        self._whole.take()
        if self._pads:
            foreach_zero(self._pads)
        if self._rows:
            foreach_copy([view for _, view in self._rows], [gradients[index] for index, _ in self._rows])
        for pack in self._packs:
            pack.fill(gradients)
        if self._before != 1.0:
            foreach_div(self._inputs, self._before)
        shard = self._idle_shard()
        if self._direct:
            shard.take()
            outputs = shard.pieces
        else:
            self._reduced.take()
            outputs = self._reduced_pieces
        work = self._transport.reduce_scatter(outputs, self._inputs, average=self._average)
        return Pending(self, shard, work)

    def finish(self, pending: Pending) -> None:
        """Wait, scale and cast on the shard, hand the gradients to the parameters."""
        pending.work.wait()
        self._whole.release()
        shard = pending.shard
        outputs = shard.pieces if self._direct else self._reduced_pieces
        if self._after != 1.0:
            foreach_div(outputs, self._after)
        if not self._direct:
            shard.take()
            foreach_copy(shard.bodies, self._reduced_bodies)
            self._reduced.release()
        shard.deliver()

    def drop(self, pending: Pending) -> None:
        """Wait and forget the result."""
        pending.work.wait()
        self._whole.release()
        self._reduced.release()
        if pending.shard.idle:
            pending.shard.release()

    def _idle_shard(self) -> GradShard:
        """A gradient shard nobody looks at. Usually there is one; accumulation needs a second."""
        for shard in self._shards:
            if shard.idle:
                return shard
        # Shards that a user holds live on through what the user holds; we need not keep track of them.
        self._shards = [shard for shard in self._shards if shard.attached]
        self._shards.append(GradShard(self._master, self._regions, self._slots, self._transport, self._residence))
        return self._shards[-1]

    def release_idle(self) -> None:
        """Give back the memory of gradients that were cleared."""
        for shard in self._shards:
            if shard.idle:
                shard.release()


@dataclass(frozen=True)
class Pending:
    """A reduction under way."""

    reduction: Reduction
    shard: GradShard
    work: Work
