"""What a rank keeps of a unit between forward and backward when it is resharded to a smaller group."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor import Shard as ShardPlacement

from ..comm.interface import Transport
from ..layout.rows import Cut
from ..policies import MixedPrecisionPolicy
from ..torch_private import foreach_copy, local_of, make_dtensor
from .buffers import Buffer
from .faces import Slot
from .full import FullBuffer
from .gather import Gather
from .precision import Segments
from .shard import Shard


@dataclass(frozen=True)
class Slicing:
    """The smaller group: how its ranks are reached, and the mesh (copies, slices) on which the slices are DTensors."""

    transport: Transport
    mesh: DeviceMesh


class Slice(Shard):
    """A shard in the compute dtypes whose memory comes and goes."""

    def __init__(self, cuts: list[Cut], segments: Segments, transport: Transport, device: torch.device):
        super().__init__(cuts, segments, transport, range(len(cuts)))
        self.buffer = Buffer(self.placement.nbytes, device)
        self._flat = self.buffer.tensor(torch.uint8, 0, (self.buffer.nbytes,))


class Slices:
    """Keeps 1/k of the unit on each of k ranks, and makes the unit whole again from there.

    The slices' faces are DTensors to look at, not to write: the next forward gathers from the master shard.
    """

    def __init__(self, slots: Sequence[Slot], master: Shard, full: FullBuffer, slicing: Slicing):
        transport = slicing.transport
        cuts = [Cut(cut.shape, transport.world) for cut in master.cuts]
        dtypes = [master.segments.dtypes(index).compute for index in range(len(cuts))]
        shard = Slice(cuts, Segments(dtypes, [MixedPrecisionPolicy()] * len(dtypes)), transport, full.device)
        self.transport = transport
        self._buffer = shard.buffer
        self.gather = Gather(shard, full, transport)
        begins = dict(shard.spots())
        self._locals: list[torch.Tensor] = []
        self._pieces: list[torch.Tensor] = []
        full.take()
        for index, slot in enumerate(slots):
            assert slot.anchor is not None
            self._pieces.append(slot.anchor.narrow(0, *cuts[index].rows(shard.rank)))
            local = torch.empty(cuts[index].local_shape(shard.rank), dtype=dtypes[index], device=full.device)
            # Made at offset 0 and only then put in its place, as gradient faces are: see `GradShard`.
            placements = (Replicate(), ShardPlacement(0))
            face = make_dtensor(local, slicing.mesh, placements, torch.Size(cuts[index].shape))
            slot.sliced = nn.Parameter(face, requires_grad=False)
            local = local_of(slot.sliced)
            if local.numel():
                place = self._buffer.tensor(local.dtype, begins[index], local.shape)
                local.set_(place.untyped_storage(), place.storage_offset(), place.shape, place.stride())
            self._locals.append(local)
        full.release()
        self._buffer.release()

    def keep(self) -> None:
        """Copy this rank's slice out of the full buffer."""
        self._buffer.take()
        foreach_copy(self._locals, self._pieces)

    def release(self) -> None:
        self._buffer.release()
