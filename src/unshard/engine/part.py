"""A part of a unit: its parameters that are cut over the same ranks. Nearly every unit has one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress

import torch
from torch.distributed.device_mesh import DeviceMesh

from ..comm.abandoned import abandon
from ..comm.interface import Transport
from ..comm.order import Event
from ..errors import OrderError
from ..torch_private import current_backward
from .arrivals import REFS, settle
from .faces import Slot
from .gradients import Gradients
from .precision import Precision
from .residence import Residence
from .sharded import Sharded
from .slices import Slicing
from .whole import Whole


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
        slicing: Slicing | None = None,
        serial: int = 0,
        keep: Callable[[list[Slot], Transport, Residence], Sharded] = Sharded,
    ):
        self.shards, self.replicas = shards, replicas
        self.mesh, self.slicing = mesh, slicing
        """The shards' own mesh, of one dimension, if any; the smaller group that keeps slices, if any."""
        self.sharded = keep(list(slots), shards, residence)
        self.gradients = Gradients(self.sharded, shards, replicas, device)
        self._faces = self.sharded.faces()
        self._device = device
        self._precision = Precision.POLICY
        self._whole: Whole | None = None
        self._wholes: dict[Precision, Whole] = {}
        """What was made so far; `_whole` is the one of the precision in use, if it is among them."""
        self.serial = serial
        self._gathering = {precision: Event(serial=serial) for precision in Precision}
        self._gathering_slices = Event(serial=serial)

    @property
    def slots(self) -> list[Slot]:
        return self.sharded.slots

    @property
    def held(self) -> bool:
        """Whether memory of whole parameters is in use."""
        return any(whole.held for whole in self._wholes.values())

    @property
    def stays_whole(self) -> bool:
        """Whether what lies at rest is whole, so that nothing is ever gathered."""
        return self._whole is not None and self._whole.stays

    # -- parameters -----------------------------------------------------------------------------------------

    def start(self, unit: str, from_slices: bool) -> None:
        """Issue the gather, from the master shards or from the slices kept since forward."""
        whole = self._whole
        assert whole is not None
        if from_slices and whole.slices is not None:
            transport = whole.slices.transport
            transport.announce(self._gathering_slices, lambda: f"gather the slices of unit {unit!r}")
            whole.start(from_slices=True)
        else:
            stored = " as it is stored (eval)" if self._precision is Precision.STORED else ""
            self.shards.announce(self._gathering[self._precision], lambda: f"gather unit {unit!r}{stored}")
            whole.start(from_slices=False)

    def send(self) -> None:
        """Let shards on the host set out for the device, because a gather will follow soon. Only at rest."""
        if self._whole is not None and self.sharded.residence.away and self.sharded.settled:
            self._whole.send()

    def finish(self) -> None:
        """Wait, and put the full faces on the modules."""
        whole = self._wait()
        whole.finish()
        if self.sharded.extended:
            self._look_at_faces()  # a gather protocol may make another full face each time
        if current_backward() == -1:  # a backward goes through what its forward used
            self._faces.follow_freezing()
        self._faces.show_full()

    def abandon(self) -> None:
        """Wait for a gather that nobody wants any more; `rest` follows."""
        if self._whole is not None:
            with suppress(OrderError):  # nobody wants the values, and whoever does next will be told
                self._wait()

    def _wait(self) -> Whole:
        whole = self._whole
        assert whole is not None
        try:
            whole.wait()
        except OrderError:
            # The collective is still under way and will never end: its buffers are left to it.
            abandon(whole)
            self._forget_wholes()
            raise
        return whole

    def rest(self) -> None:
        """The full buffer empty, the sharded faces on the modules."""
        self._faces.show_sharded()
        for whole in self._wholes.values():
            whole.release()

    def show(self) -> None:
        """The full faces on the modules again."""
        self._faces.show_full()

    def hide(self) -> None:
        """The sharded faces on the modules, while the full buffer is kept."""
        self._faces.show_sharded()

    def slice(self) -> None:
        """Keep a slice, with its faces on the modules; the full buffer is emptied."""
        assert self._whole is not None
        self._whole.slice()
        self._faces.show_sliced()

    def select(self, precision: Precision) -> None:
        """Be gathered in `precision` from now on. What was gathered in another one stays until `rest`."""
        self._faces.show_sharded()
        self._precision = precision
        self._whole = self._wholes.get(precision)
        if self._whole is not None:
            self._enter(self._whole)

    def _enter(self, whole: Whole) -> None:
        whole.enter()
        self._look_at_faces()
        number = {slot: index for index, slot in enumerate(self.slots)}
        others = [each for each in self._wholes.values() if each is not whole]
        self.gradients.others = [(number[slot], face) for each in others for slot, face in each.faces()]
        stored = self._precision is Precision.STORED
        self.gradients.varied = bool(others) or stored
        self.gradients.as_stored = stored and not self.sharded.master.segments.reduces_stored_alike

    def _look_at_faces(self) -> None:
        """The slots were given other faces."""
        self._faces.refresh()
        self.gradients.look_at(self._faces.full)

    def _forget_wholes(self) -> None:
        self._whole, self._wholes = None, {}
        self.gradients.others = []

    def settle(self, unit: str) -> None:
        """Adopt parameters that were rebound from outside; only at rest."""
        if REFS:
            settle()
        if self.sharded.settled:
            return
        for whole in self._wholes.values():
            whole.recall()
        if self.sharded.settle(unit):
            self._forget_wholes()
            self._faces = self.sharded.faces()  # fewer, if parameters were tied
        self._look_at_faces()
        # Conversions reach into the `.grad` objects too, so the gradient faces are no longer ours.
        self.gradients.forget_buffers(unit)

    def change_transport(self, unit: str, transport: Transport) -> None:
        """Send through another transport from now on; it may need another layout. Only at rest."""
        self.settle(unit)
        self.gradients.forget_buffers(unit)
        self.shards = transport
        self.sharded.change_transport(transport)
        self.gradients.change_transport(transport)
        self._forget_wholes()

    def hook_reductions(self, unit: str, change: Callable[[Transport], Transport]) -> None:
        """Reduce through another transport: over the ranks that shard or, where nothing is cut, over the replicas."""
        self.gradients.forget_buffers(unit)
        if self.shards.world > 1:
            self.gradients.change_transport(change(self.shards))
        else:
            self.gradients.change_replicas(change(self.replicas))

    def get_ready(self, unit: str) -> None:
        """Everything before a gather from the master shard that is not the gather itself; nearly always nothing."""
        # A backward needs the values that its forward had, and only has to find the parameters that get the gradients.
        if current_backward() == -1 or not self.sharded.registered:
            self.settle(unit)
        if self._whole is None and self.sharded.find_extended():
            self.gradients.forget_buffers(unit)
            self._forget_wholes()
        if not self.sharded.placed:
            self.sharded.refuse_misplaced(unit)
        if self._whole is None:
            self._whole = Whole(self.sharded, self.shards, self.mesh, self._device, self._precision, self.slicing)
            self._wholes[self._precision] = self._whole
            self._enter(self._whole)
