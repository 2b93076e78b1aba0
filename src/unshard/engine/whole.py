"""A part made whole in one precision: the full buffer, the full faces in it, and the ways that lead there."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ..comm.interface import Done, Transport, Work
from ..errors import StateError, UnsupportedError
from ..torch_private import outside_transforms, wrap_like
from . import observer
from .extension import Extension, Extensions
from .faces import Slot, mark_full
from .full import FullBuffer, Uncut
from .gather import Gather
from .master import Master
from .precision import Precision
from .sharded import Sharded
from .slices import Slices, Slicing
from .upload import Way
from .writes import Samples


class Whole:
    """Made at the first gather. The slots hold its faces while its precision is the part's."""

    def __init__(
        self,
        sharded: Sharded,
        transport: Transport,
        mesh: DeviceMesh | None,
        device: torch.device,
        precision: Precision,
        slicing: Slicing | None,
    ):
        self._slots = sharded.slots
        self._transport = transport
        master, extended = sharded.master, sorted(sharded.extended)
        _check(self._slots, extended, slicing)
        if precision is Precision.STORED:
            master, slicing = master.stored(), None
        members = [index for index in range(len(self._slots)) if index not in sharded.extended]
        lanes = sharded.residence.lanes
        with torch.no_grad(), torch.inference_mode(False), outside_transforms():
            self._full = FullBuffer.over(master, members, device, transport.pool)
            way = None if lanes is None else Way(lanes.up, sharded.writes, Samples(master.locals))
            self._gather = Gather(master, self._full, transport, way)
            self._full.take()
            self._faces = [self._face(master, index) for index in members]
            self._full.release()
            self._extensions: Extensions | None = None
            if extended:
                made = [self._extension(master, index, mesh, device, precision) for index in extended]
                self._extensions = Extensions(made, transport)
            self.enter()
            self.slices = Slices(self._slots, master, self._full, slicing) if slicing is not None else None
        self._under_way: tuple[Gather, Work] | None = None

    def _face(self, master: Master, index: int) -> tuple[Slot, torch.Tensor, nn.Parameter]:
        slot = self._slots[index]
        anchor = self._full.parameter(master, index)
        face = nn.Parameter(wrap_like(anchor, slot.whole_spec), requires_grad=slot.sharded.requires_grad)
        mark_full(face, slot.name)
        return slot, anchor, face

    def _extension(
        self, master: Master, index: int, mesh: DeviceMesh | None, device: torch.device, precision: Precision
    ) -> Extension:
        slot, dtype = self._slots[index], master.segments.dtypes(index).compute
        policy = slot.policy if precision is Precision.POLICY else slot.policy.without_casts
        return Extension(slot, self._transport, mesh, policy, dtype, device)

    @property
    def held(self) -> bool:
        """Whether the full buffer has memory."""
        return self._full.held

    @property
    def stays(self) -> bool:
        """Whether the full buffer is what lies at rest."""
        return isinstance(self._full, Uncut)

    def enter(self) -> None:
        """Be the precision that the slots show."""
        for slot, anchor, face in self._faces:
            slot.anchor, slot.full = anchor, face
        if self._extensions is not None:
            self._extensions.enter()

    def faces(self) -> list[tuple[Slot, nn.Parameter]]:
        extensions = [] if self._extensions is None else self._extensions.faces()
        return [(slot, face) for slot, _, face in self._faces] + extensions

    def start(self, from_slices: bool) -> None:
        """Issue the gather, from the master shards or from the slices kept since forward."""
        gather, transport = self._gather, self._transport
        if from_slices:
            assert self.slices is not None
            gather, transport = self.slices.gather, self.slices.transport
        if self._extensions is not None:
            work = gather.start(self._extensions.start, in_lane=False)  # users' code allocates
        else:
            work = gather.start(transport.gather if gather.outputs else _nothing)
        self._under_way = gather, work
        if observer.current is not None:
            observer.current.gathering(self._slots, gather.members, gather.inputs)

    def send(self) -> None:
        """Let shards on the host set out for the device."""
        self._gather.send()

    def recall(self) -> None:
        """What was sent is out of date."""
        self._gather.recall()

    def wait(self) -> None:
        """Until what is gathered is in its place; nothing, if no gather is under way."""
        if self._under_way is not None:
            gather, work = self._under_way
            self._under_way = None
            work.wait()
            gather.finish()

    def finish(self) -> None:
        """Everything after the gather that only a user of the parameters needs."""
        if self._extensions is not None:
            self._extensions.finish()
        if self.slices is not None:
            self.slices.release()
        if observer.current is not None:
            observer.current.whole(self._slots)

    def slice(self) -> None:
        """Keep a slice; the full buffer is emptied."""
        assert self.slices is not None
        with torch.no_grad():
            self.slices.keep()
        self._full.release()

    def release(self) -> None:
        """Empty everything."""
        self._full.release()
        if self._extensions is not None:
            self._extensions.release()
        if self.slices is not None:
            self.slices.release()


def _nothing(outputs: list[torch.Tensor], inputs: list[torch.Tensor]) -> Work:
    return Done()


def _check(slots: list[Slot], extended: list[int], slicing: Slicing | None) -> None:
    for slot in slots:
        if slot.sharded.requires_grad and not slot.sharded.is_floating_point():
            raise StateError(f"Parameter {slot.name!r} is {slot.sharded.dtype} and cannot require grad.")
    if extended and slicing is not None:
        names = ", ".join(slots[index].name for index in extended)
        raise UnsupportedError(
            f"Parameters with their own gather protocol ({names}) cannot be resharded to a smaller group: pass "
            "True or False for reshard_after_forward."
        )
