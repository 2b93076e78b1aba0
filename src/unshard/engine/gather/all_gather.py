"""The plan of an all-gather: what is cast, sent and copied out; and slices, which a second plan gathers from."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor import Shard as ShardPlacement

from ...comm.interface import Done, Label, Transport, Work
from ...layout.collective_tensors import Region, RegionRange, lay_out
from ...layout.rows import RowSharding
from ...policies import MixedPrecisionPolicy
from ...torch_private import foreach_copy, local_of, make_dtensor, no_transforms
from .. import step_recording
from ..dtype_rules import Segments, sent_dtype
from ..params.buffers import Buffer, ShardLayout, UnshardedBuffer
from ..params.offload import HostCopy, IssuedOnSideStream, Upload
from ..params.param import ManagedParam
from ..side_stream import GatherStreams, gather_streams


class AllGatherPlan:
    """From a shard into the unsharded buffer. `outputs` and `inputs` are what the collective takes.

    Large parameters are gathered straight into the unsharded buffer. Packed ones are gathered into `staging`, which is
    emptied as soon as they are copied out. Where the dtype changes, the cast writes into this rank's own piece of the
    output and the all-gather works in place, so that no second copy of the shard exists.

    The param group runs a `plain` plan itself: take the buffers, cast, all-gather, and later `copy_out`.
    """

    def __init__(
        self, shard: ShardLayout, buffer: UnshardedBuffer, transport: Transport, host_copy: HostCopy | None = None
    ):
        """`host_copy`: how an offloaded shard is reached."""
        self._transport, self._shard, self.buffer = transport, shard, buffer
        traits, itemsizes = transport.traits, shard.segments.itemsizes("compute")
        packed = [region for region in shard.regions if region.packed]
        staged = lay_out(packed, itemsizes, transport.world, traits.piece_alignment)
        self.staging = Buffer(staged.nbytes, buffer.device, transport.pool)
        self.inputs: list[torch.Tensor] = []
        self.outputs: list[torch.Tensor] = []
        self.cast_from: list[torch.Tensor] = []
        self.cast_to: list[torch.Tensor] = []
        self.members = [region.members for region in shard.regions]
        """The parameters in each input."""
        # An offloaded shard is copied into the output's place, and so is one that the transport takes from there only.
        in_place = host_copy is not None or traits.in_place_only
        buffer.take()
        ranges = iter(staged.ranges)
        for number, region in enumerate(shard.regions):
            if region.packed:
                self._add(number, region, self.staging, next(ranges), in_place)
            else:
                self._add(number, region, buffer, self._place_in_buffer(region), in_place)
        self._leave_out_what_is_there()
        self._packed = list(zip(packed, staged.ranges, strict=True))
        self.copies = [self._copy_out(region, at) for region, at in self._packed]
        self._takes_late = bool(packed) and len(packed) == len(shard.regions) and buffer.device.type != "cpu"
        """Whether the unsharded buffer has no memory before `copy_out`. On the host it has: memory is not short there,
        and a backward that reads it too early can be refused; reading an empty storage ends the process."""
        self._copies_without_tables: list[Callable[[], object]] | None = None
        self._copied_out = False
        """Whether a side stream copies the packed parameters out."""
        self.streams = gather_streams(buffer.device) if traits.gathers_on_any_stream else None
        """Where recorded steps cast, gather and copy out; None: on the compute stream."""
        self._upload = None if host_copy is None else Upload(shard, self.cast_from, buffer.device, host_copy)
        self.plain = self._upload is None and bool(self.outputs)
        """Whether nothing but casts comes before the collective."""
        self.staging.release()
        buffer.release()

    def start(self, label: Label) -> Work:
        """Issue the all-gather. Until `copy_out` nobody may touch the buffers."""
        if not self.outputs:
            return self.start_with(Done, self._transport.traits.gathers_on_any_stream)
        issue = partial(self._transport.all_gather, self.outputs, self.inputs, label=label)
        return self.start_with(issue, self._transport.traits.gathers_on_any_stream)

    def start_on(self, streams: GatherStreams, label: Label) -> Work:
        """As the param group does for a plain plan, but on side streams: while other units compute. Costs host time.

        It comes after what the compute stream has queued so far, which may have had the memory before.
        """
        self.take()
        if self.copies:
            self.buffer.take()
        issued = IssuedOnSideStream()

        def issue() -> None:
            self._cast_one_by_one()
            work = self._transport.all_gather(self.outputs, self.inputs, label=label)
            issued.work = streams.copy_out.queue(partial(self._copy_out_after, work)) if self.copies else work

        issued.event = streams.gather.queue(issue)
        return issued

    def _cast_one_by_one(self) -> None:
        """Takes less time on the device than the kernel for lists, and more on the host."""
        with no_transforms():  # inside torch.func.jvp, torch refuses to copy to one tensor, but not to a list
            for to, source in zip(self.cast_to, self.cast_from, strict=True):
                to.copy_(source)

    def _copy_out_after(self, work: Work) -> None:
        work.wait()
        for copy in self._recorded_copies():
            copy()
        self._copied_out = True

    def take(self) -> None:
        """Have the memory that the collective writes into."""
        if not self._takes_late:
            self.buffer.take()
        if self.copies:
            self.staging.take()

    def start_with(self, issue: Callable[[], Work], on_side_stream: bool) -> Work:
        """Fill the inputs, then `issue` the collective.

        `on_side_stream`: it may be issued from the stream that copies an offloaded shard to the device.
        """
        self.take()
        if self._upload is not None:
            if on_side_stream:
                return self._upload.start(self.cast_to, issue)
            self._upload.start(self.cast_to).wait()
        elif self.cast_to:
            foreach_copy(self.cast_to, self.cast_from)
        return issue()

    def copy_out(self) -> None:
        """After the collective: copy packed parameters to their places."""
        if not self._copied_out:
            self.buffer.take()
            for copy in self._recorded_copies() if step_recording.active else self.copies:
                copy()
        self.forget()

    def forget(self) -> None:
        """Of an all-gather that is copied out, or was recorded and never ran."""
        self._copied_out = False
        self.staging.release()

    def _recorded_copies(self) -> list[Callable[[], object]]:
        """Piece by piece: a kernel that takes all pieces at once reads where they are from host memory."""
        if self._copies_without_tables is None:
            self._copies_without_tables = [self._copy_out_pieces(region, at) for region, at in self._packed]
        return self._copies_without_tables

    def upload_early(self) -> None:
        """Copy an offloaded shard to the device before the all-gather asks for it."""
        if self._upload is not None:
            self._upload.start_early()

    def forget_upload(self) -> None:
        """What was copied early is out of date."""
        if self._upload is not None:
            self._upload.forget()

    # -- making it ------------------------------------------------------------------------------------------

    def _leave_out_what_is_there(self) -> None:
        """Nothing is copied where the unsharded buffer is the shard itself."""
        pairs = zip(self.cast_to, self.cast_from, strict=True)
        needed = [(to, source) for to, source in pairs if to.data_ptr() != source.data_ptr()]
        self.cast_to, self.cast_from = [to for to, _ in needed], [source for _, source in needed]

    def _place_in_buffer(self, region: Region) -> RegionRange:
        run = region.runs[0]
        itemsize = self._shard.segments.kinds[run.segment].compute.itemsize
        offset = self.buffer.offsets[run.members[0]] - run.starts[0] * itemsize
        return RegionRange(offset, run.numel * itemsize, self._transport.world, (0,))

    def _add(self, number: int, region: Region, buffer: Buffer, at: RegionRange, in_place: bool) -> None:
        """Input and output of one region, and the casts into this rank's piece where the input is not the shard."""
        kinds = [self._shard.segments.kinds[run.segment] for run in region.runs]
        carrier = self._transport.carrier(_common_dtype(kind.compute for kind in kinds))
        self.outputs.append(buffer.tensor(carrier, at.offset, (at.piece * at.copies // carrier.itemsize,)))
        if all(kind.original == kind.compute for kind in kinds) and not in_place:
            self.inputs.append(self._shard.piece_bytes(number).view(carrier))
            return
        own = at.offset + self._transport.rank * at.piece
        self.inputs.append(buffer.tensor(carrier, own, (at.piece // carrier.itemsize,)))
        self.cast_from += self._shard.run_tensors(number)
        self.cast_to += [
            buffer.tensor(kind.compute, own + start, (run.numel,))
            for run, kind, start in zip(region.runs, kinds, at.runs, strict=True)
        ]

    def _copy_out(self, region: Region, at: RegionRange) -> Callable[[], object]:
        """What copies a packed region's columns to the parameters they become."""
        needs_copy = any(self._shard.shardings[index].needs_copy for index in region.members)
        if needs_copy or not self._without_gaps(region, at):
            return self._copy_out_pieces(region, at)
        return self._copy_out_columns(region, at)

    def _sharding(self, index: int) -> RowSharding:
        """How a parameter of a packed region is cut."""
        sharding = self._shard.shardings[index]
        assert isinstance(sharding, RowSharding)
        return sharding

    def _without_gaps(self, region: Region, at: RegionRange) -> bool:
        """Whether the runs leave no gaps. They do where wide elements come after narrow ones."""
        ends = [
            start + run.numel * self._shard.segments.kinds[run.segment].compute.itemsize
            for run, start in zip(region.runs, at.runs, strict=True)
        ]
        return list(at.runs) == [0, *ends[:-1]]

    def _copy_out_pieces(self, region: Region, at: RegionRange) -> Callable[[], object]:
        """Piece by piece, where parameters are cut along another dimension than the first, or lie with gaps."""
        sources, targets = [], []
        for run, start in zip(region.runs, at.runs, strict=True):
            dtype = self._shard.segments.kinds[run.segment].compute
            for index, first in zip(run.members, run.starts, strict=True):
                sharding = self._sharding(index)
                padded = (
                    *sharding.shape[: sharding.dim],
                    sharding.chunk * sharding.world,
                    *sharding.shape[sharding.dim + 1 :],
                )
                unsharded = self.buffer.tensor(dtype, self.buffer.offsets[index], padded)
                for rank, target in enumerate(unsharded.chunk(sharding.world, sharding.dim)):
                    offset = at.offset + rank * at.piece + start + first * dtype.itemsize
                    sources.append(self.staging.tensor(dtype, offset, target.shape))
                    targets.append(target)
        return partial(foreach_copy, targets, sources)

    def _copy_out_columns(self, region: Region, at: RegionRange) -> Callable[[], object]:
        """In the elements of the region or, for several dtypes, in bytes; one call."""
        kinds = [self._shard.segments.kinds[run.segment] for run in region.runs]
        dtype = _common_dtype(kind.compute for kind in kinds)
        sizes, targets = [], []
        for run, kind in zip(region.runs, kinds, strict=True):
            for index in run.members:
                nbytes = self._sharding(index).piece * kind.compute.itemsize
                sizes.append(nbytes // dtype.itemsize)
                targets.append(self.buffer.tensor(dtype, self.buffer.offsets[index], (at.copies, sizes[-1])))
        table = self.staging.tensor(dtype, at.offset, (at.copies, at.piece // dtype.itemsize))
        return partial(torch.split_with_sizes_copy, table[:, : sum(sizes)], sizes, dim=1, out=targets)


def _common_dtype(dtypes: Iterable[torch.dtype]) -> torch.dtype:
    """The dtype they share, or bytes."""
    kinds = set(map(sent_dtype, dtypes))
    return kinds.pop() if len(kinds) == 1 else torch.uint8


@dataclass(frozen=True)
class Slicing:
    """The smaller group: how its ranks are reached, and the mesh (copies, slices) on which the slices are DTensors."""

    transport: Transport
    mesh: DeviceMesh


class Slice(ShardLayout):
    """A shard in the compute dtypes whose memory comes and goes."""

    def __init__(self, shardings: list[RowSharding], segments: Segments, transport: Transport, device: torch.device):
        super().__init__(shardings, segments, transport, range(len(shardings)))
        self.buffer = Buffer(self.buffer_layout.nbytes, device)
        self._flat = self.buffer.tensor(torch.uint8, 0, (self.buffer.nbytes,))


class Slices:
    """Keeps 1/k of the unit on each of k ranks, from which backward gathers it again.

    The modules hold slices as DTensors to look at, not to write: the next forward gathers from the shard.
    """

    def __init__(self, params: Sequence[ManagedParam], shard: ShardLayout, buffer: UnshardedBuffer, slicing: Slicing):
        transport = slicing.transport
        shardings = [RowSharding(sharding.shape, transport.world) for sharding in shard.shardings]
        dtypes = [shard.segments.dtypes(index).compute for index in range(len(shardings))]
        slice_shard = Slice(
            shardings, Segments(dtypes, [MixedPrecisionPolicy()] * len(dtypes)), transport, buffer.device
        )
        self._buffer = slice_shard.buffer
        self.plan = AllGatherPlan(slice_shard, buffer, transport)
        begins = dict(slice_shard.ranges())
        self._locals: list[torch.Tensor] = []
        self._pieces: list[torch.Tensor] = []
        buffer.take()
        for index, param in enumerate(params):
            assert param.unsharded_view is not None
            self._pieces.append(param.unsharded_view.narrow(0, *shardings[index].rows(slice_shard.rank)))
            local = torch.empty(
                shardings[index].local_shape(slice_shard.rank), dtype=dtypes[index], device=buffer.device
            )
            # Made at offset 0 and only then put in its place, as gradients are: see `ShardedGrad`.
            placements = (Replicate(), ShardPlacement(0))
            dtensor = make_dtensor(local, slicing.mesh, placements, torch.Size(shardings[index].shape))
            param.sliced = nn.Parameter(dtensor, requires_grad=False)
            local = local_of(param.sliced)
            if local.numel():
                place = self._buffer.tensor(local.dtype, begins[index], local.shape)
                local.set_(place.untyped_storage(), place.storage_offset(), place.shape, place.stride())
            self._locals.append(local)
        buffer.release()
        self._buffer.release()

    def keep(self) -> None:
        """Copy this rank's slice out of the unsharded buffer."""
        self._buffer.take()
        foreach_copy(self._locals, self._pieces)

    def release(self) -> None:
        self._buffer.release()
