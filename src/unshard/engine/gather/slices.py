"""What a rank keeps of a unit between forward and backward when it is resharded to a smaller group."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor import Shard as ShardPlacement

from ...comm.interface import Transport
from ...layout.rows import RowSharding
from ...policies import MixedPrecisionPolicy
from ...torch_private import foreach_copy, local_of, make_dtensor
from ..dtype_rules import Segments
from ..params.buffers import Buffer, UnshardedBuffer
from ..params.param import ManagedParam
from ..params.shard import ShardLayout
from .all_gather import AllGatherPlan


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
