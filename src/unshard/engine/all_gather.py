"""Plans of all-gathers, and slices.

An `AllGatherPlan` creates the tensors that an all-gather casts, sends and copies. Backward can gather from `Slices`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor import Shard as ShardPlacement

from ..comm.interface import Done, Label, Transport, Work
from ..layout.collective_tensors import Region, RegionRange, lay_out
from ..layout.shardings import RowSharding
from ..policies import MixedPrecisionPolicy
from ..torch_private import foreach_copy, local_of, make_dtensor, no_transforms
from . import side_stream
from .extension import Extensions
from .params.buffers import Buffer, ShardLayout, UnshardedBuffer, pairs_to_copy
from .params.offload import IssuedOnSideStream, Upload
from .params.param import ManagedParam
from .side_stream import SideStream, gather_streams
from .states import Segments, sent_dtype


class AllGatherPlan:
    """Gathers a shard into the unsharded buffer. The constructor creates every tensor that an all-gather uses.

    Large parameters are gathered directly into the unsharded buffer. Packed parameters are gathered into the buffer
    `staging`. This buffer is freed as soon as the parameters are copied to the unsharded buffer. If the compute dtype
    differs from the stored dtype, the shard is cast directly into this rank's piece of the output. The all-gather then
    runs in place.
    """

    def __init__(
        self,
        shard: ShardLayout,
        buffer: UnshardedBuffer,
        transport: Transport,
        upload: Upload | None = None,
        extensions: Extensions | None = None,
        side_streams: bool = True,
    ):
        """Create the tensors of the all-gather.

        `extensions` are gathered together with the shard. If `side_streams` is False, recorded steps run the all-gather
        on the compute stream.
        """
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
        """For each input, the indices of the parameters in it."""
        # An offloaded shard is uploaded into this rank's piece of the output. Some transports read only that piece.
        in_place = upload is not None or traits.in_place_only
        buffer.take()
        ranges = iter(staged.ranges)
        for number, region in enumerate(shard.regions):
            if region.packed:
                self._add(number, region, self.staging, next(ranges), in_place)
            else:
                run = region.runs[0]
                itemsize = itemsizes[run.segment]
                offset = buffer.offsets[run.members[0]] - run.starts[0] * itemsize
                at = RegionRange(offset, run.numel * itemsize, transport.world, (0,))
                self._add(number, region, buffer, at, in_place)
        self._packed = list(zip(packed, staged.ranges, strict=True))
        self.copies = [self._copy_out(region, at) for region, at in self._packed]
        on_device = buffer.device.type != "cpu" or side_stream.simulated
        self._takes_late = bool(packed) and len(packed) == len(shard.regions) and on_device
        """True if the unsharded buffer is allocated only in `copy_out`.

        This is always False on the CPU, where a backward that reads an unallocated buffer would crash the process
        before the engine could raise an error.
        """
        self._copies_without_tables: list[Callable[[], object]] | None = None
        self._copied_out = False
        """True if a side stream is already copying the packed parameters out."""
        any_stream = traits.gathers_on_any_stream and extensions is None  # the code of extensions allocates memory
        self._streams = gather_streams(buffer.device) if side_streams and any_stream and self.outputs else None
        """The streams on which recorded steps cast, gather and copy out, or None to use the compute stream."""
        self._upload, self._upload_issues, self._extensions = upload, any_stream, extensions
        self._special = upload is not None or extensions is not None or not self.outputs
        """True if the all-gather needs an upload or a gather protocol first, or if there is nothing to gather."""
        self._uploaded = [] if upload is None else upload.views(self.cast_from)
        self.staging.release()
        buffer.release()

    def start(self, label: Label) -> Work:
        """Fill the inputs and issue the all-gather. Nothing may use the buffers until `copy_out` has been called."""
        # Memory is taken on the compute stream, which also frees it. Side streams wait for the compute stream before
        # they write, because the compute stream may still read earlier contents of the memory.
        if not self._takes_late:
            self.buffer.take()
        if self.copies:
            self.staging.take()
        if self._special or side_stream.recording:
            return self._start_special(label)
        if self.cast_to:
            foreach_copy(self.cast_to, self.cast_from)
        return self._transport.all_gather(self.outputs, self.inputs, label=label)

    def _start_special(self, label: Label) -> Work:
        """Run `start` for offloaded shards, gather protocols, recorded steps, and units with nothing to gather."""
        sender = self._extensions or (self._transport if self.outputs else None)
        issue = Done if sender is None else partial(sender.all_gather, self.outputs, self.inputs, label=label)
        if self._upload is not None:
            if self._upload_issues:
                return self._upload.start(self.cast_to, self._uploaded, issue)
            self._upload.start(self.cast_to, self._uploaded).wait()
        elif side_stream.recording and self._streams is not None:
            return self._start_recorded(*self._streams, issue)
        elif self.cast_to:
            foreach_copy(self.cast_to, self.cast_from)
        return issue()

    def _start_recorded(self, gather: SideStream, copy_out: SideStream, issue: Callable[[], Work]) -> Work:
        """Cast, gather and copy out on side streams, so that replays overlap this work with the compute stream."""
        if self.copies:
            self.buffer.take()  # here, on the compute stream: the copy-out stream only writes

        def cast_and_issue() -> Work:
            # Single copies take less time on the device than the kernel for lists, and more on the host.
            with no_transforms():  # inside torch.func.jvp, torch refuses to copy to one tensor, but not to a list
                for to, source in zip(self.cast_to, self.cast_from, strict=True):
                    to.copy_(source)
            work = issue()
            # The copy-out stream waits for the gather stream, which in turn need not wait for the copies.
            return copy_out.queue(partial(copy_out_after, work)) if self.copies else work

        def copy_out_after(work: Work) -> None:
            work.wait()
            for copy in self._recorded_copies():
                copy()
            self._copied_out = True

        return IssuedOnSideStream(gather, cast_and_issue)

    def copy_out(self) -> None:
        """Copy packed parameters to the unsharded buffer and free `staging`.

        Call this method after waiting for the all-gather.
        """
        if not self._copied_out:
            self.buffer.take()
            for copy in self._recorded_copies() if side_stream.recording else self.copies:
                copy()
        self.forget()

    def forget(self) -> None:
        """Free the staging memory.

        Call this method after packed parameters are copied out, or after an all-gather that failed or was only
        recorded.
        """
        self._copied_out = False
        self.staging.release()

    def _recorded_copies(self) -> list[Callable[[], object]]:
        # Recorded steps avoid `split_with_sizes_copy`, because its kernel reads addresses from host memory. By the time
        # of a replay, that memory may contain something else.
        if self._copies_without_tables is None:
            self._copies_without_tables = [self._copy_out_pieces(region, at) for region, at in self._packed]
        return self._copies_without_tables

    def upload_early(self) -> None:
        """Start to copy an offloaded shard to the device before the next all-gather is issued."""
        if self._upload is not None:
            self._upload.start_early()

    def forget_upload(self) -> None:
        """Discard the copy that `upload_early` made. Call this method when the shard has changed."""
        if self._upload is not None:
            self._upload.forget()

    # -- construction ---------------------------------------------------------------------------------------

    def _add(self, number: int, region: Region, buffer: Buffer, at: RegionRange, in_place: bool) -> None:
        """Add the input and output of a region.

        The input is part of the shard, or this rank's piece of the output. If it is the piece of the output, this
        method also adds the casts that copy from the shard into that piece.
        """
        kinds = [self._shard.segments.kinds[run.segment] for run in region.runs]
        carrier = self._transport.carrier(_common_dtype(kind.compute for kind in kinds))
        self.outputs.append(buffer.tensor(carrier, at.offset, (at.piece * at.copies // carrier.itemsize,)))
        if all(kind.original == kind.compute for kind in kinds) and not in_place:
            self.inputs.append(self._shard.piece_bytes(number).view(carrier))
            return
        own = at.offset + self._transport.rank * at.piece
        self.inputs.append(buffer.tensor(carrier, own, (at.piece // carrier.itemsize,)))
        sources = self._shard.run_tensors(number)
        for run, kind, start, source in zip(region.runs, kinds, at.runs, sources, strict=True):
            to = buffer.tensor(kind.compute, own + start, (run.numel,))
            if to.data_ptr() != source.data_ptr():  # else the unsharded buffer is the shard
                self.cast_to.append(to)
                self.cast_from.append(source)

    def _copy_out(self, region: Region, at: RegionRange) -> Callable[[], object]:
        ends = [
            start + run.numel * self._shard.segments.kinds[run.segment].compute.itemsize
            for run, start in zip(region.runs, at.runs, strict=True)
        ]
        gaps = list(at.runs) != [0, *ends[:-1]]  # wide elements after narrow ones need gaps
        if gaps or any(self._shard.shardings[index].needs_copy for index in region.members):
            return self._copy_out_pieces(region, at)
        return self._copy_out_columns(region, at)

    def _sharding(self, index: int) -> RowSharding:
        sharding = self._shard.shardings[index]
        assert isinstance(sharding, RowSharding)
        return sharding

    def _copy_out_pieces(self, region: Region, at: RegionRange) -> Callable[[], object]:
        """Return a function that copies each parameter. Gaps and shards along dims other than 0 require this."""
        pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
        for run, start in zip(region.runs, at.runs, strict=True):
            dtype = self._shard.segments.kinds[run.segment].compute
            table = self.staging.tensor(dtype, at.offset, (at.copies, at.piece // dtype.itemsize))
            for index, first in zip(run.members, run.starts, strict=True):
                sharding, begin = self._sharding(index), start // dtype.itemsize + first
                shape, dim = sharding.shape, sharding.dim
                chunks = (*shape[:dim], sharding.world, sharding.chunk, *shape[dim + 1 :])
                target = self.buffer.tensor(dtype, self.buffer.offsets[index], chunks).movedim(dim, 0)
                source = table[:, begin : begin + sharding.piece].view(target.shape)
                pairs += pairs_to_copy(target, source)
        return partial(foreach_copy, [target for target, _ in pairs], [source for _, source in pairs])

    def _copy_out_columns(self, region: Region, at: RegionRange) -> Callable[[], object]:
        """Return a function that copies a whole region in one call. Mixed dtypes are copied as bytes."""
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
    """Return the dtype in which all of `dtypes` are sent, or uint8 if they are sent in different dtypes."""
    kinds = set(map(sent_dtype, dtypes))
    return kinds.pop() if len(kinds) == 1 else torch.uint8


@dataclass(frozen=True)
class Slicing:
    """The transport of the ranks that together keep all slices of a unit, and the mesh of the slices' DTensors.

    The mesh has two dimensions: the copies of the unit, and the slices of each copy.
    """

    transport: Transport
    mesh: DeviceMesh


class Slices:
    """Keeps 1/k of the unsharded parameters on each of k ranks after forward. Backward gathers from these slices.

    Modules hold the slices as DTensors. Programs may read the slices but must not write them, because the next forward
    gathers from the shard.
    """

    def __init__(self, params: Sequence[ManagedParam], shard: ShardLayout, buffer: UnshardedBuffer, slicing: Slicing):
        transport = slicing.transport
        shardings = [RowSharding(sharding.shape, transport.world) for sharding in shard.shardings]
        dtypes = [shard.segments.dtypes(index).compute for index in range(len(shardings))]
        segments = Segments(dtypes, [MixedPrecisionPolicy()] * len(dtypes))
        layout = ShardLayout(shardings, segments, transport, range(len(shardings)))
        self._buffer = Buffer(layout.buffer_layout.nbytes, buffer.device)
        layout.memory = self._buffer.tensor(torch.uint8, 0, (self._buffer.nbytes,))
        # Recorded steps gather slices on the compute stream, too: `release` frees them as soon as that stream has
        # waited for the all-gather.
        self.plan = AllGatherPlan(layout, buffer, transport, side_streams=False)
        begins = dict(layout.ranges())
        self._locals: list[torch.Tensor] = []
        self._pieces: list[torch.Tensor] = []
        buffer.take()
        for index, param in enumerate(params):
            assert param.unsharded_view is not None
            self._pieces.append(param.unsharded_view.narrow(0, *shardings[index].rows(layout.rank)))
            local = torch.empty(shardings[index].local_shape(layout.rank), dtype=dtypes[index], device=buffer.device)
            # Make the DTensor at offset 0 and move it: torch neither copies nor saves DTensors made with an offset.
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
