"""Reduces a unit's gradients: pack and cast, reduce-scatter, all-reduce over replicas, the rest on the shard."""

from __future__ import annotations

import zlib
from collections.abc import Collection
from dataclasses import dataclass
from enum import Enum
from typing import Protocol
from weakref import WeakKeyDictionary

import torch

from ..comm.interface import Done, Transport, Work
from ..comm.order import Event
from ..layout.rows import Grouping, place
from ..torch_private import foreach_add, foreach_copy, foreach_div
from . import observer
from .buffers import Buffer, ShardBuffer, pieces
from .faces import Slot
from .grad_shard import GradShard
from .lane import Lane, Mark, reduce_lane
from .master import Master
from .options import Options
from .packing import Packing
from .precision import Division, division
from .sharded import Sharded


class Stage(Enum):
    """What a reduction under way waits for."""

    SCATTER = "reduce-scatter"
    ALL_REDUCE = "all-reduce"
    HOME = "copy to the host"


class Outcome(Enum):
    """What became of a reduction."""

    GOES_ON = "goes on"
    DELIVERED = "delivered"
    PARTIAL = "kept as a partial sum"


class Named(Protocol):
    name: str


@dataclass
class Pending:
    """A reduction under way."""

    reduction: Reduction
    shard: GradShard
    outputs: ShardBuffer
    work: Work
    stage: Stage
    division: Division
    options: Options
    absent: Collection[Slot] = ()
    """Parameters without gradient, where all of the unit is reduced all the same."""
    mark: Mark | None = None
    """Where the copy to the host ends."""


class Reduction:
    """How the gradients of one set of parameters are reduced. One exists per set that ever had gradients.

    The reduce-scatter writes straight into the gradient shard where dtype and device allow it, otherwise into
    `reduced`, from where one call casts or copies it. `partial` holds sums over the shards that still wait for their
    all-reduce over the replicas.

    On a device the reduce buffer is a lane's memory: given back as soon as the reduce-scatter is queued, though the
    device needs it for longer, so that what the computation allocates meanwhile does not come on top of it.
    """

    def __init__(
        self,
        sharded: Sharded,
        master: Master,
        members: tuple[int, ...],
        shards: Transport,
        replicas: Transport,
        device: torch.device,
        events: tuple[Event, Event],
    ):
        """`events` are the reduce-scatter and the all-reduce, as other ranks know them."""
        segments, itemsizes = master.segments, master.segments.itemsizes("wire")
        # An exchange takes one tensor, so few of them.
        exchanged = any(kind.wire != kind.reduce for kind in segments.kinds)
        grouping = Grouping.GROUPED if shards.reduces_groups and not exchanged else Grouping.BY_SEGMENT
        # By the sizes of the gather: then in the same order, which flat optimizers need.
        self._regions = master.layout.arrange(master.items, members, grouping, shards.few)
        self._master, self._sharded, self._slots = master, sharded, sharded.slots
        self._transport, self._replicas = shards, replicas
        kinds = [segments.kinds[region.runs[0].segment] for region in self._regions]
        self._dtypes = frozenset(kind.reduce for kind in kinds)
        self._cast = any(kind.reduce != kind.gradient for kind in kinds)
        lanes = sharded.residence.lanes
        self._lane = None if lanes is None else lanes.down
        self._direct = self._lane is None and not self._cast
        self._in_place = shards.reduces_in_place and not exchanged
        whole = place(self._regions, itemsizes, shards.world, shards.piece_alignment)
        self._whole = Buffer(0 if self._in_place else whole.nbytes, device, shards.pool)
        self._packing: Packing | None = None
        if not self._in_place:
            self._packing = self._packing_in(pieces(self._whole, whole, self._regions, segments, "wire"))
        self._packings: WeakKeyDictionary[GradShard, Packing] = WeakKeyDictionary()
        self._whole.release()
        self._reduced = ShardBuffer(self._regions, segments, "reduce", shards.piece_alignment, device, shards.pool)
        self._partial = ShardBuffer(self._regions, segments, "reduce", shards.piece_alignment, device)
        self._shards: list[GradShard] = []
        self._members, self._owner = members, ""
        self._scattering, self._all_reducing = events
        self._aside = reduce_lane(device) if shards.waits_in_stream and not self._in_place else None
        if self._aside is not None:
            self._computed, self._packed, self._scattered = Mark(device), Mark(device), Mark(device)

    def _packing_in(self, tensors: list[torch.Tensor]) -> Packing:
        return Packing(tensors, self._regions, self._master, self._transport.world)

    def _packing_for(self, pending: Pending) -> Packing:
        """Where gradients are written: the reduce buffer, or at once where their sum will be."""
        if self._packing is None and not self._direct:
            self._packing = self._packing_in(self._reduced.pieces)
        if self._packing is not None:
            return self._packing
        shard = pending.shard
        packing = self._packings.get(shard)
        if packing is None:
            packing = self._packings[shard] = shard.viewing(lambda: self._packing_in(shard.buffer.pieces))
        return packing

    def announce(self, unit: Named) -> None:
        """To be called before `start`."""
        self._owner = unit.name
        self._transport.announce(self._scattering, lambda: f"reduce-scatter {self._described()}")

    def _described(self) -> str:
        """Whose gradients these are, in few words that differ if the parameters do."""
        mine = [self._slots[index].name for index in self._members]
        others = [slot.name for slot in self._slots if slot.name not in mine]
        unit = f"the gradients of unit {self._owner!r}"
        if not others:
            return unit
        return f"{unit} without {_few(others)}" if len(others) <= len(mine) else f"{unit}, only {_few(mine)}"

    def start(self, gradients: dict[int, torch.Tensor], options: Options, last: bool = False) -> Pending:
        """Pack `gradients` (by parameter), drop them and issue the reduce-scatter.

        `last`: no other unit's backward follows.
        """
        pending, watcher = self._pending(options), observer.current
        # With nothing to compute meanwhile, the memory that the computation has left is good enough.
        if self._aside is not None and watcher is None and not last and options.reduce_buffers == 1:
            self._start_aside(pending, gradients, self._aside)
            return pending
        inputs = self._pack(pending, gradients)
        if watcher is None:
            gradients.clear()  # before the result takes memory
        self._scatter(pending, inputs)
        if watcher is not None:
            watcher.reducing(self._slots, self._region_members(), gradients, inputs, pending.outputs.pieces)
        elif self._in_place and self._goes_straight_home(pending):
            self._finish(pending)  # one rank alone has its sum at once
        return pending

    def _start_aside(self, pending: Pending, gradients: dict[int, torch.Tensor], lane: Lane) -> None:
        self._computed.put()
        with lane.after(self._computed):
            inputs = self._pack(pending, gradients)
            self._packed.put()
        self._packed.wait()
        gradients.clear()  # the computation has their memory next, and before that the result
        pending.outputs.take()
        self._computed.put()
        with lane.after(self._computed):
            self._scatter(pending, inputs)
            pending.work.wait()
            self._whole.release()
            if self._goes_straight_home(pending):
                self._finish(pending)
            else:
                pending.work = self._scattered.put()

    def _goes_straight_home(self, pending: Pending) -> bool:
        """Whether the copy to the host can follow the sum, which else it does when the next unit has computed.

        Not if anything comes in between, nor to ordinary memory: this thread would wait for the copy.
        """
        alone = self._replicas.world == 1 and pending.options.all_reduce_hook is None
        return alone and self._lane is not None and pending.shard.pinned

    def _pack(self, pending: Pending, gradients: dict[int, torch.Tensor]) -> list[torch.Tensor]:
        (pending.outputs if self._in_place else self._whole).take()
        packing = self._packing_for(pending)
        absent = packing.fill(gradients)
        if absent:
            pending.absent = {self._slots[index] for index in absent}
        if pending.division.before != 1.0:
            foreach_div(packing.tensors, pending.division.before)
        return packing.tensors

    def _scatter(self, pending: Pending, inputs: list[torch.Tensor]) -> None:
        pending.outputs.take()
        average = pending.division.scatter_average
        pending.work = self._transport.reduce_scatter(pending.outputs.pieces, inputs, average=average)

    def _region_members(self) -> list[tuple[int, ...]]:
        return [region.members for region in self._regions]

    @property
    def has_partial(self) -> bool:
        return self._partial.held

    def resume(self, options: Options) -> Pending:
        """A reduction of nothing but the partial sums kept so far."""
        pending = self._pending(options)
        pending.outputs.take()
        for flat in pending.outputs.flats:
            flat.zero_()
        return pending

    def _pending(self, options: Options) -> Pending:
        shard = self._idle_shard()
        outputs = shard.buffer if self._direct else self._reduced
        how = division(
            self._transport.world,
            self._replicas.world,
            self._dtypes,
            options.divide_factor,
            options.force_sum,
            options.divide_in_halves,
        )
        return Pending(self, shard, outputs, Done(), Stage.SCATTER, how, options)

    def advance(self, pending: Pending) -> Outcome:
        """Wait for the collective under way and take the next step."""
        pending.work.wait()
        outputs, options = pending.outputs, pending.options
        if pending.stage is Stage.HOME:
            return self._at_home(pending)
        if pending.stage is Stage.SCATTER:
            self._whole.release()
            if self._replicas.world > 1:
                return self._next_over_replicas(pending)
        if options.all_reduce_hook is not None:
            for flat in outputs.flats:
                options.all_reduce_hook(flat)
        return self._finish(pending)

    def _finish(self, pending: Pending) -> Outcome:
        """The sum is there: divide it and bring it to where gradients stay."""
        outputs = pending.outputs
        if pending.division.after != 1.0:
            foreach_div(outputs.flats, pending.division.after)
        if self._lane is not None:
            return self._send_home(pending, self._lane)
        if not self._direct:
            pending.shard.buffer.take()
            foreach_copy(pending.shard.buffer.bodies, outputs.bodies)
            outputs.release()
        pending.shard.deliver(pending.absent)
        return Outcome.DELIVERED

    def _send_home(self, pending: Pending, lane: Lane) -> Outcome:
        """Copy the gradients to the host, while the next unit computes."""
        host, device = pending.shard.buffer, pending.outputs
        if self._cast:
            pending.mark = lane.carry(host.bodies, device.bodies)
        else:
            pending.mark = lane.carry([host.whole], [device.whole])
        pending.work = pending.mark
        pending.stage = Stage.HOME
        return Outcome.GOES_ON

    def _at_home(self, pending: Pending) -> Outcome:
        assert pending.mark is not None
        pending.outputs.release()
        pending.shard.arrive = pending.mark.synchronize
        pending.shard.deliver(pending.absent)
        return Outcome.DELIVERED

    def _next_over_replicas(self, pending: Pending) -> Outcome:
        outputs, partial = pending.outputs, self._partial
        if not pending.options.all_reduce:
            if partial.held:
                foreach_add(partial.flats, outputs.flats)
            else:
                partial.take()
                foreach_copy(partial.flats, outputs.flats)
            outputs.release()
            return Outcome.PARTIAL
        if partial.held:
            foreach_add(outputs.flats, partial.flats)
            partial.release()
        self._replicas.announce(self._all_reducing, lambda: f"all-reduce, over the replicas, {self._described()}")
        pending.work = self._replicas.all_reduce(outputs.flats, average=pending.division.all_reduce_average)
        pending.stage = Stage.ALL_REDUCE
        if observer.current is not None:
            observer.current.all_reducing(self._slots, self._region_members(), outputs.pieces)
        return Outcome.GOES_ON

    def drop(self, pending: Pending) -> None:
        """Wait and forget the result."""
        pending.work.wait()
        self._whole.release()
        self._reduced.release()
        if pending.shard.idle:
            pending.shard.buffer.release()

    def drop_partial(self) -> None:
        self._partial.release()

    def _idle_shard(self) -> GradShard:
        """A gradient shard nobody looks at. Usually there is one; accumulation needs a second."""
        for shard in self._shards:
            if shard.idle:
                return shard
        # Shards that a user holds live on through what the user holds; we need not keep track of them.
        self._shards = [shard for shard in self._shards if shard.attached]
        self._shards.append(self._sharded.grad_shard(self._master, self._regions, self._transport))
        return self._shards[-1]

    def attached_shards(self) -> list[GradShard]:
        """Those with gradients that parameters have."""
        return [shard for shard in self._shards if shard.attached]

    def release_idle(self) -> None:
        """Give back the memory of gradients that were cleared."""
        for shard in self._shards:
            if shard.idle:
                shard.buffer.release()


def _few(names: list[str]) -> str:
    if len(names) <= 3:
        return ", ".join(names)
    return f"{', '.join(names[:3])} and {len(names) - 3} more (check sum {zlib.crc32(repr(names).encode()):08x})"
