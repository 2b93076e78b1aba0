"""A part of a unit: its parameters that are cut over the same ranks. Nearly every unit has one."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ..comm.abandoned import abandon
from ..comm.interface import Done, Transport, Work
from ..comm.order import Event
from ..errors import OrderError, StateError, UnsupportedError
from ..policies import MixedPrecisionPolicy
from ..torch_private import outside_transforms, wrap_like
from .extension import Extension, Extensions
from .faces import Faces, Slot, mark_full
from .full import FullBuffer
from .gather import Gather
from .gradients import Gradients
from .residence import Residence
from .sharded import Sharded
from .slices import Slices, Slicing


class Part:
    """Shards, the way to make them whole and back, and gradients. The unit says when."""

    def __init__(
        self,
        slots: Sequence[Slot],
        shards: Transport,
        replicas: Transport,
        mesh: DeviceMesh | None,
        device: torch.device,
        residence: Residence,
        policy: MixedPrecisionPolicy,
        slicing: Slicing | None = None,
        serial: int = 0,
    ):
        self.shards, self.replicas = shards, replicas
        self.mesh, self.slicing = mesh, slicing
        """The shards' own mesh, of one dimension, if any; the smaller group that keeps slices, if any."""
        self.sharded = Sharded(list(slots), shards, residence, policy)
        self.gradients = Gradients(self.sharded, shards, replicas, device)
        self._faces = Faces(self.slots)
        self._device, self._policy = device, policy
        self._full: FullBuffer | None = None
        self._gather: Gather | None = None
        self._extensions: Extensions | None = None
        self._slices: Slices | None = None
        self._under_way: tuple[Gather, Work] | None = None
        self.serial = serial
        self._gathering, self._gathering_slices = Event(serial=serial), Event(serial=serial)

    @property
    def slots(self) -> list[Slot]:
        return self.sharded.slots

    # -- parameters -----------------------------------------------------------------------------------------

    def start(self, unit: str, from_slices: bool) -> None:
        """Issue the gather, from the master shards or from the slices kept since forward."""
        if from_slices and self._slices is not None:
            gather, transport = self._slices.gather, self._slices.transport
            transport.announce(self._gathering_slices, lambda: f"gather the slices of unit {unit!r}")
        else:
            assert self._gather is not None
            gather, transport = self._gather, self.shards
            transport.announce(self._gathering, lambda: f"gather unit {unit!r}")
        gather.prepare()
        if self._extensions is not None:
            work = self._extensions.start(gather.outputs, gather.inputs)
        else:
            work = transport.gather(gather.outputs, gather.inputs) if gather.outputs else Done()
        self._under_way = gather, work

    def finish(self) -> None:
        """Wait, and put the full faces on the modules."""
        self._wait()
        if self._extensions is not None:
            self._extensions.finish()
        if self._slices is not None:
            self._slices.release()
        self._faces.show_full()

    def abandon(self) -> None:
        """Wait for a gather that nobody wants any more; `rest` follows."""
        if self._under_way is not None:
            with suppress(OrderError):  # nobody wants the values, and whoever does next will be told
                self._wait()

    def _wait(self) -> None:
        assert self._under_way is not None
        gather, work = self._under_way
        self._under_way = None
        try:
            work.wait()
        except OrderError:
            # The collective is still under way and will never end: its buffers are left to it.
            abandon(gather, self._full, self._extensions, self._slices)
            self._full = self._gather = self._extensions = self._slices = None
            raise
        gather.finish()

    def rest(self) -> None:
        """The full buffer empty, the sharded faces on the modules."""
        self._faces.show_sharded()
        if self._full is not None:
            self._full.release()
        if self._extensions is not None:
            self._extensions.release()
        if self._slices is not None:
            self._slices.release()

    def slice(self) -> None:
        """Keep a slice, with its faces on the modules; the full buffer is emptied."""
        assert self._slices is not None and self._full is not None
        with torch.no_grad():
            self._slices.keep()
        self._faces.show_sliced()
        self._full.release()

    def settle(self, unit: str) -> None:
        """Adopt parameters that were rebound from outside; only at rest."""
        if self.sharded.settled:
            return
        if self.sharded.settle(unit):
            self._gather = None
            self._faces = Faces(self.slots)  # fewer, if parameters were tied
        # Conversions reach into the `.grad` objects too, so the gradient faces are no longer ours.
        self.gradients.forget_buffers(unit)

    def change_transport(self, unit: str, transport: Transport) -> None:
        """Send through another transport from now on; it may need another layout. Only at rest."""
        self.settle(unit)
        self.gradients.forget_buffers(unit)
        self.shards = transport
        self.sharded.change_transport(transport)
        self.gradients.change_transport(transport)
        self._gather = None

    def get_ready(self, unit: str) -> None:
        """Everything before a gather from the master shard that is not the gather itself; nearly always nothing."""
        self.settle(unit)
        if self._gather is None and self.sharded.find_extended():
            self.gradients.forget_buffers(unit)
        if not self.sharded.placed:
            self.sharded.refuse_misplaced(unit)
        if self._gather is None:
            self._make_gather()

    def _make_gather(self) -> None:
        for slot in self.slots:
            if slot.sharded.requires_grad and not slot.sharded.is_floating_point():
                raise StateError(f"Parameter {slot.name!r} is {slot.sharded.dtype} and cannot require grad.")
        master, extended = self.sharded.master, self.sharded.extended
        if extended and self.slicing is not None:
            names = ", ".join(self.slots[index].name for index in sorted(extended))
            raise UnsupportedError(
                f"Parameters with their own gather protocol ({names}) cannot be resharded to a smaller group: pass "
                "True or False for reshard_after_forward."
            )
        members = [index for index in range(len(self.slots)) if index not in extended]
        with torch.no_grad(), torch.inference_mode(False), outside_transforms():
            full = FullBuffer(master, members, self._device, self.shards.pool)
            self._gather = Gather(master, full, self.shards, self.sharded.residence.away)
            full.take()
            for index in members:
                slot = self.slots[index]
                slot.anchor = full.parameter(master, index)
                face = wrap_like(slot.anchor, slot.whole_spec)
                slot.full = nn.Parameter(face, requires_grad=slot.sharded.requires_grad)
                mark_full(slot.full, slot.name)
            full.release()
            self._full = full
            self._extensions = self._make_extensions(sorted(extended)) if extended else None
            if self.slicing is not None:
                self._slices = Slices(self.slots, master, full, self.slicing)

    def _make_extensions(self, members: list[int]) -> Extensions:
        dtypes = self.sharded.master.segments.dtypes
        made = [
            Extension(self.slots[i], self.shards, self.mesh, self._policy, dtypes(i).compute, self._device)
            for i in members
        ]
        return Extensions(made, self.shards)
