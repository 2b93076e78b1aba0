"""Reduction of gradients, which are packed, reduce-scattered, all-reduced over replicas, divided and delivered."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from enum import Enum
from typing import Any
from weakref import WeakKeyDictionary

import torch

from ..comm.interface import Done, Label, Transport, Work
from ..layout.collective_tensors import Grouping, lay_out
from ..torch_private import foreach_add, foreach_copy, foreach_div
from . import observer, side_stream
from .packing import Gradients, Packing, packing_of
from .params.buffers import Buffer, Shard, ShardBuffer, pieces
from .params.param import ManagedParam
from .params.sharded import ShardedParams
from .sharded_grad import ShardedGrad
from .side_stream import SideStream, StreamEvent, reduce_stream
from .states import Division, Options, division, sent_dtype


class Stage(Enum):
    """The operation that a reduction in flight waits for, or how the reduction ended."""

    REDUCE_SCATTER = "reduce-scatter"
    ALL_REDUCE = "all-reduce"
    COPY_TO_HOST = "copy to the host"
    DELIVERED = "given to the parameters"
    PARTIAL = "kept as a partial sum"


@dataclass
class ReductionInFlight:
    """One reduction, from its reduce-scatter until its gradients are delivered or stored as partial sums."""

    reduction: Reduction
    grad: ShardedGrad
    outputs: ShardBuffer
    division: Division
    options: Options
    work: Work
    stage: Stage = Stage.REDUCE_SCATTER
    absent: Collection[ManagedParam] = ()
    """Parameters without a gradient, which are reduced as zeros. See `ShardedGrad.deliver`."""
    copied: StreamEvent | None = None
    """Marks the end of the copy to the host."""
    packed_gradients: Gradients | None = None
    """Keeps gradients alive that a side stream may still read. Used only while a step is recorded."""


class Reduction:
    """Reduces the gradients of one set of parameters. Each set that has ever had gradients has its own `Reduction`.

    If dtype and device allow it, the reduce-scatter writes directly into the sharded gradient. Otherwise it writes into
    `_reduced`, and one call casts or copies the result. `partial` holds sums over the shards that still need an
    all-reduce over the replicas.

    On a device, a side stream owns the reduce-scatter input. The host frees the input as soon as the reduce-scatter is
    queued, because only later work on the same stream can reuse the memory. If the compute stream owned the input, the
    input would stay allocated until that stream has waited, at the same time as the next unit's gradients.
    """

    def __init__(
        self,
        sharded: ShardedParams,
        shard: Shard,
        members: tuple[int, ...],
        shards: Transport,
        replicas: Transport,
        device: torch.device,
        labels: tuple[Label, Label],
    ):
        """`labels` name the reduce-scatter and the all-reduce, in this order."""
        segments, traits = shard.segments, shards.traits
        # If wire and reduce dtype differ, an all-to-all, which takes one tensor, replaces the reduce-scatter.
        exchanged = any(kind.wire != kind.reduce for kind in segments.kinds)
        grouping = Grouping.GROUPED if traits.reduces_groups and not exchanged else Grouping.BY_SEGMENT
        # Packed by the sizes in the compute dtype, as in the all-gather. So the order matches the shard, which flat
        # optimizers rely on.
        self._regions = shard.layout.collective_regions(shard.items, members, grouping, traits.packing)
        self._shard, self._sharded, self._params = shard, sharded, sharded.params
        self._transport, self._replicas = shards, replicas
        self._reduce_scatter_label, self._all_reduce_label = labels
        kinds = [segments.kinds[region.runs[0].segment] for region in self._regions]
        self._dtypes = frozenset(sent_dtype(kind.reduce) for kind in kinds)
        self._cast = any(kind.reduce != kind.gradient for kind in kinds)
        streams = sharded.offload.copy_streams
        self._to_host = None if streams is None else streams.down
        self._direct = self._to_host is None and not self._cast
        self._in_place = traits.reduces_in_place and not exchanged
        buffer_layout = lay_out(self._regions, segments.itemsizes("wire"), shards.world, traits.piece_alignment)
        self._input = Buffer(0 if self._in_place else buffer_layout.nbytes, device, shards.pool)
        self._packing: Packing | None = None
        if not self._in_place:
            self._packing = self._make_packing(pieces(self._input, buffer_layout, self._regions, segments, "wire"))
        self._packings: WeakKeyDictionary[ShardedGrad, Packing] = WeakKeyDictionary()
        self._input.release()
        self._reduced = ShardBuffer(self._regions, segments, "reduce", traits.piece_alignment, device, shards.pool)
        self.partial = ShardBuffer(self._regions, segments, "reduce", traits.piece_alignment, device)
        self.has_partial = False
        self.grads: list[ShardedGrad] = []
        """Usually one sharded gradient. `_idle_grad` adds more while users hold older gradients."""
        self._side_stream = reduce_stream(device) if traits.waits_in_stream and not self._in_place else None
        if self._side_stream is not None:
            # Recorded again in every step: at most one reduction of these parameters is in flight.
            self._computed, self._packed, self._reduce_scattered = (StreamEvent(device) for _ in range(3))
        self._divisors: tuple[object, ...] | None = None
        self._division = Division(True, True, 1.0, 1.0)

    def start(self, gradients: Gradients, options: Options, last: bool) -> ReductionInFlight:
        """Pack and clear `gradients`, then issue the reduce-scatter. `last` is True if backward is over."""
        flight, watcher = self._new_flight(options), observer.current
        # At the end nothing overlaps, so the compute stream is as good. An observer may read tensors on that stream.
        if (
            self._side_stream is not None
            and not observer.on_compute_stream
            and not last
            and options.reduce_buffers == 1
        ):
            self._start_on_side_stream(flight, gradients, self._side_stream, watcher)
            return flight
        (flight.outputs if self._in_place else self._input).take()
        packing = self._packing or self._packing_in(flight)
        self._pack(flight, packing, gradients)
        if watcher is not None:
            watcher.packed(self._params, gradients, packing.largest)
            read = gradients if observer.on_compute_stream else {}
            given = dict(read if isinstance(read, dict) else enumerate(read))
        gradients.clear()  # frees them before the output takes memory
        flight.outputs.take()
        flight.work = self._transport.reduce_scatter(
            flight.outputs.pieces,
            packing.tensors,
            label=self._reduce_scatter_label,
            average=flight.division.scatter_average,
        )
        if watcher is not None:
            if observer.on_compute_stream:
                members = [region.members for region in self._regions]
                watcher.reducing(self._params, members, given, packing.tensors, flight.outputs.pieces)
            flight.work = observer.watched("reduce-scatter", self._params, flight.work)
        elif self._in_place and self._copies_at_once(flight):
            self._finish(flight)  # one rank: nothing to wait for
        return flight

    def _start_on_side_stream(
        self, flight: ReductionInFlight, gradients: Gradients, stream: SideStream, watcher: Any
    ) -> None:
        packing: Packing = self._packing  # type: ignore[assignment]  # None only without a side stream
        # 1. The side stream packs after the compute stream has computed the gradients.
        self._computed.record()
        with stream.after(self._computed):
            self._input.take()
            self._pack(flight, packing, gradients)
            self._packed.record()
        # 2. The compute stream owns the gradients. It waits until they are packed before they are freed: without the
        # wait, the next kernel could get their memory and overwrite them. A recorded step keeps them alive until
        # `advance` instead, so that the next unit's backward need not wait.
        if side_stream.recording:
            flight.packed_gradients = gradients.copy()
        else:
            self._packed.wait()
            if watcher is not None:
                watcher.packed(self._params, gradients, packing.largest)
        gradients.clear()
        # 3. The compute stream owns the outputs, too, and may still use whatever had their memory before. So the
        # reduce-scatter waits for a second event of the compute stream.
        flight.outputs.take()
        self._computed.record()
        with stream.after(self._computed):
            flight.work = self._transport.reduce_scatter(
                flight.outputs.pieces,
                packing.tensors,
                label=self._reduce_scatter_label,
                average=flight.division.scatter_average,
            )
            flight.work.wait()  # the side stream waits, not the host
            self._input.release()  # whatever reuses the memory is on this stream, behind the collective
            if self._copies_at_once(flight):
                self._finish(flight)
            else:
                flight.work = self._reduce_scattered.record()
        if watcher is not None:
            # The compute stream has just passed `_computed` again, so an event that is recorded there now completes
            # when the reduce-scatter can start.
            flight.work = observer.watched("reduce-scatter", self._params, flight.work)

    def _pack(self, flight: ReductionInFlight, packing: Packing, gradients: Gradients) -> None:
        absent = packing.fill(gradients)
        if absent:
            flight.absent = {self._params[index] for index in absent}
        if flight.division.before != 1.0:
            foreach_div(packing.tensors, flight.division.before)

    def _make_packing(self, tensors: list[torch.Tensor]) -> Packing:
        return packing_of(tensors, self._regions, self._shard, self._transport.world)

    def _packing_in(self, flight: ReductionInFlight) -> Packing:
        """Return the packing that writes directly into the output, for reductions on a single rank."""
        if not self._direct:
            self._packing = self._make_packing(self._reduced.pieces)
            return self._packing
        grad = flight.grad
        packing = self._packings.get(grad)
        if packing is None:
            packing = self._packings[grad] = grad.viewing(lambda: self._make_packing(grad.buffer.pieces))
        return packing

    def _copies_at_once(self, flight: ReductionInFlight) -> bool:
        """Return True if the copy to the host can be queued directly after the reduce-scatter.

        Otherwise, `advance` queues the copy after the next unit's backward. This happens if an all-reduce or a hook
        comes first. It also happens if the host memory is not pinned, because this thread would then wait for the copy.
        """
        options = flight.options
        alone = self._replicas.world == 1 and options.all_reduce_hook is None and not options.hold
        return alone and self._to_host is not None and flight.grad.pinned

    def resume(self, options: Options) -> ReductionInFlight:
        """All-reduce the partial sums without new gradients. `advance` adds the partial sums to outputs of zeros."""
        flight = self._new_flight(options)
        flight.outputs.take()
        for flat in flight.outputs.flats:
            flat.zero_()
        return flight

    def _new_flight(self, options: Options) -> ReductionInFlight:
        divisors = options.divide_factor, options.force_sum, options.divide_in_halves
        if divisors != self._divisors:
            self._divisors = divisors
            self._division = division(self._transport.world, self._replicas.world, self._dtypes, *divisors)
        grad = self._idle_grad()
        outputs = grad.buffer if self._direct else self._reduced
        return ReductionInFlight(self, grad, outputs, self._division, options, Done(), absent=options.absent)

    def advance(self, flight: ReductionInFlight) -> Stage:
        """Wait for the operation in flight and start the next one. Return the new stage of the reduction."""
        flight.work.wait()  # on a device only the compute stream waits
        flight.packed_gradients = None
        outputs, options = flight.outputs, flight.options
        if flight.stage is Stage.COPY_TO_HOST:
            assert flight.copied is not None
            outputs.release()  # the compute stream, which owns the memory, has waited for the copy
            # The host has not waited: whoever reads the gradients before the end of backward must.
            flight.grad.wait_for_copy = flight.copied.synchronize
            flight.grad.deliver(flight.absent)
            return Stage.DELIVERED
        if flight.stage is Stage.REDUCE_SCATTER:
            self._input.release()
            if self._replicas.world > 1 or options.hold or self.has_partial:
                return self._reduce_over_replicas(flight)
        if options.all_reduce_hook is not None:
            for flat in outputs.flats:
                options.all_reduce_hook(flat)
        return self._finish(flight)

    def _finish(self, flight: ReductionInFlight) -> Stage:
        """Divide the sum and cast or copy it to the sharded gradient."""
        outputs, grad = flight.outputs, flight.grad
        if flight.division.after != 1.0:
            foreach_div(outputs.flats, flight.division.after)
        if self._to_host is not None:
            return self._copy_to_host(flight, self._to_host)
        if not self._direct:
            grad.buffer.take()
            foreach_copy(grad.buffer.bodies, outputs.bodies)
            outputs.release()
        grad.deliver(flight.absent)
        return Stage.DELIVERED

    def _copy_to_host(self, flight: ReductionInFlight, stream: SideStream) -> Stage:
        """Queue the copy on a side stream, where it overlaps with the next unit's backward.

        `flight.outputs` may be freed only after the compute stream has waited for the copy. `advance` does both.
        """
        host, device = flight.grad.buffer, flight.outputs
        if self._cast:
            flight.copied = stream.copy(host.bodies, device.bodies)
        else:
            flight.copied = stream.copy([host.all_bytes], [device.all_bytes])
        flight.work = flight.copied
        flight.stage = Stage.COPY_TO_HOST
        return flight.stage

    def _reduce_over_replicas(self, flight: ReductionInFlight) -> Stage:
        outputs, partial = flight.outputs, self.partial
        if not flight.options.all_reduce or flight.options.hold:
            if self.has_partial:
                foreach_add(partial.flats, outputs.flats)
            else:
                partial.take()
                foreach_copy(partial.flats, outputs.flats)
                self.has_partial = True
            outputs.release()
            return Stage.PARTIAL
        if self.has_partial:
            foreach_add(outputs.flats, partial.flats)
            partial.release()
            self.has_partial = False
        average = flight.division.all_reduce_average
        flight.work = self._replicas.all_reduce(outputs.flats, label=self._all_reduce_label, average=average)
        flight.stage = Stage.ALL_REDUCE
        if observer.current is not None:
            members = [region.members for region in self._regions]
            observer.current.all_reducing(self._params, members, outputs.pieces)
            flight.work = observer.watched("all-reduce", self._params, flight.work)
        return flight.stage

    def release(self) -> None:
        """Free all memory except the sharded gradients. Call this only if nothing is in flight."""
        for buffer in (self._input, self._reduced, self.partial):
            buffer.release()
        self.has_partial = False

    def _idle_grad(self) -> ShardedGrad:
        """Return an idle sharded gradient. Create one if all are set as `.grad` or held by a user."""
        for grad in self.grads:
            if grad.idle:
                return grad
        # A user who holds an old `.grad` keeps its memory alive.
        self.grads = [grad for grad in self.grads if grad.attached]
        self.grads.append(self._sharded.make_sharded_grad(self._shard, self._regions, self._transport))
        return self.grads[-1]
