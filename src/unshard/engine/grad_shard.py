"""The gradient shard: this rank's piece of the reduced gradient, and the `.grad` objects over it, made once."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch
from torch.distributed.tensor import DTensor

from ..comm.interface import Transport
from ..layout.rows import Region
from ..torch_private import (
    foreach_add,
    local_of,
    make_dtensor,
    post_accumulate_hooks,
    spec_of,
    storage_uses,
)
from . import observer
from .buffers import ShardBuffer
from .faces import Slot
from .master import Master
from .residence import Residence


class GradShard:
    """A flat buffer in the original dtypes with one gradient face per parameter.

    The faces' local tensors lie at offsets of one storage that can be emptied; the DTensors around them were
    made at offset 0, where saving and copying work.
    """

    def __init__(
        self,
        master: Master,
        regions: Sequence[Region],
        slots: list[Slot],
        transport: Transport,
        residence: Residence,
    ):
        segments = master.segments
        self.buffer = ShardBuffer(regions, segments, "original", transport.piece_alignment, residence.device)
        self._slots: list[Slot] = []
        self.faces: list[DTensor] = []
        self.locals: list[torch.Tensor] = []
        self.buffer.take()
        for region, spot in zip(regions, self.buffer.placement.places, strict=True):
            run = region.runs[0]
            dtype = segments.kinds[run.segment].original
            for index, start in zip(run.members, run.starts, strict=True):
                offset = spot.offset + start * dtype.itemsize
                self._add_face(slots[index], dtype, offset, transport.rank)
        self.buffer.release()
        self._entries = list(zip(self._slots, self.faces, self.locals, strict=True))
        self._idle_uses = self._uses()
        self._known_idle = True

    def _add_face(self, slot: Slot, dtype: torch.dtype, offset: int, rank: int) -> None:
        spec = spec_of(slot.sharded)
        local = torch.empty(slot.cut.local_shape(rank), dtype=dtype, device=self.buffer.device)
        face = make_dtensor(local, spec.mesh, spec.placements, slot.sharded.shape)
        if local.numel():
            moved = self.buffer.tensor(dtype, offset, local.shape)
            local.set_(moved.untyped_storage(), moved.storage_offset(), moved.shape, moved.stride())
        self._slots.append(slot)
        self.faces.append(face)
        self.locals.append(local)

    def _uses(self) -> int:
        """Grows by one for whoever holds a face, its local tensor or any view of either."""
        held = sum(map(sys.getrefcount, self.faces)) + sum(map(sys.getrefcount, self.locals))
        return held + storage_uses(self.buffer.storage)

    @property
    def attached(self) -> bool:
        """Whether a face is some parameter's `.grad`."""
        for slot, face, _ in self._entries:  # no generator: asked in every step
            if slot.sharded.grad is face:
                return True
        return False

    @property
    def idle(self) -> bool:
        """Whether it may be written or emptied without anybody seeing: a user may still hold last step's `.grad`.

        Once it is, it stays so until it is delivered: nobody can get hold of it.
        """
        if not self._known_idle:
            self._known_idle = not self.attached and self._uses() == self._idle_uses
        return self._known_idle

    def deliver(self) -> None:
        """Become each parameter's `.grad`, or be added to the one it has; then call the user's hooks on it."""
        self._known_idle = False
        existing, new, attached = [], [], False
        for slot, face, local in self._entries:
            sharded = slot.sharded
            grad = sharded.grad
            if grad is None:
                sharded.grad = face
                attached = True
            else:
                existing.append(local_of(grad) if isinstance(grad, DTensor) else grad)
                new.append(local)
        if existing:
            foreach_add(existing, new)
        if not attached:
            self.buffer.release()
        for slot in self._slots:
            if hooks := post_accumulate_hooks(slot.sharded):
                for hook in list(hooks.values()):
                    hook(slot.sharded)
        if observer.current is not None:
            observer.current.delivered(self._slots)
