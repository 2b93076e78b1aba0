"""A unit: the parameters that are gathered and reduced together."""

from __future__ import annotations

from contextlib import suppress

import torch
from torch import nn

from ..comm.abandoned import abandon
from ..comm.interface import Transport, Work
from ..comm.order import Event
from ..errors import OrderError, StateError
from ..policies import MixedPrecisionPolicy
from ..torch_private import outside_transforms
from .faces import Faces, Slot
from .gather import Gather
from .gradients import Gradients
from .options import Options
from .residence import Residence
from .sharded import Sharded
from .states import PARAM_MOVES, ParamState, Phase, moved


class Unit:
    """Parameters, their buffers and their state. Knows neither modules above it nor other units."""

    def __init__(
        self,
        slots: list[Slot],
        shards: Transport,
        replicas: Transport,
        device: torch.device,
        residence: Residence,
        policy: MixedPrecisionPolicy,
        options: Options,
    ):
        self.name = ""
        self.device, self.policy, self.options = device, policy, options
        self.sharded = Sharded(slots, shards, residence, policy)
        self.gradients = Gradients(self.sharded, shards, replicas, device)
        self.phase = Phase.IDLE
        self.params = ParamState.SHARDED
        self._transport, self._replicas = shards, replicas
        self._faces = Faces(slots)
        self._gather: Gather | None = None
        self._work: Work | None = None
        self._event = Event()
        self._writes_before = 0

    def __str__(self) -> str:
        return f"Unit {self.name!r} on rank {self._transport.rank}"

    @property
    def slots(self) -> list[Slot]:
        return self.sharded.slots

    def gather(self) -> None:
        """Issue the gather if the unit is at rest; its buffers are in flight until `use`."""
        if self.params is not ParamState.SHARDED:
            return
        self.settle()
        if not self.sharded.placed:
            self.sharded.refuse_misplaced(self.name)
        if self._gather is None:
            self._gather = self._make_gather()
        self._transport.announce(self._event, self._describe)
        self._writes_before = self.sharded.writes()
        self._work = self._gather.start()
        self._move(ParamState.GATHERING)

    def use(self) -> None:
        """Be whole, with the full faces on the modules."""
        self.gather()
        if self.params is ParamState.GATHERING:
            self._finish_gather()
            self._faces.show_full()
            self._move(ParamState.FULL)

    def reshard(self) -> None:
        """Rest: the full buffer empty, the sharded faces on the modules."""
        if self.params is ParamState.SHARDED:
            return
        if self.params is ParamState.GATHERING:
            with suppress(OrderError):  # nobody wants the values, and whoever does next will be told
                self._finish_gather()
        else:
            self._faces.show_sharded()
        if self._gather is not None:
            self._gather.release()
        if self.params is not ParamState.SHARDED:
            self._move(ParamState.SHARDED)

    @property
    def stale(self) -> bool:
        """Whether a parameter at rest was written after the gather that made the unit whole."""
        return self.params is ParamState.FULL and self._writes_before != self.sharded.writes()

    def settle(self) -> None:
        """Adopt parameters that were rebound from outside; only at rest."""
        if self.sharded.settled:
            return
        if self.sharded.settle(self.name):
            self._gather = None
        # Conversions reach into the `.grad` objects too, so the gradient faces are no longer ours.
        self.gradients.forget_buffers(self)

    def change_transport(self, transport: Transport) -> None:
        """Send through another transport from now on; it may need another layout."""
        self.reshard()
        self.settle()
        self.gradients.forget_buffers(self)
        self._transport = transport
        self.sharded.change_transport(transport)
        self.gradients.change_transport(transport)
        self._gather = None

    @property
    def transports(self) -> tuple[Transport, Transport]:
        """Over the shards, and over the replicas."""
        return self._transport, self._replicas

    def reduce(self, last: bool = False) -> None:
        self.gradients.reduce(self, self.options, last)

    def advance_reduce(self) -> bool:
        """Take the next step of the reduction under way, waiting for it; true when the gradients are there."""
        return self.gradients.advance(self)

    def reset(self) -> None:
        """Return to rest after a forward or backward that did not end; drops gradients not yet handed out."""
        self.gradients.drop(self)
        self.reshard()
        self.phase = Phase.IDLE

    def _make_gather(self) -> Gather:
        for slot in self.slots:
            if slot.sharded.requires_grad and not slot.sharded.is_floating_point():
                raise StateError(f"Parameter {slot.name!r} is {slot.sharded.dtype} and cannot require grad.")
        with torch.no_grad(), torch.inference_mode(False), outside_transforms():
            gather = Gather(self.sharded.master, self._transport, self.device, self.sharded.residence.away)
            for slot, anchor in zip(self.slots, gather.places(), strict=True):
                slot.anchor, slot.full = anchor, nn.Parameter(anchor, requires_grad=slot.sharded.requires_grad)
        return gather

    def _finish_gather(self) -> None:
        work, self._work = self._work, None
        assert work is not None and self._gather is not None
        try:
            self._gather.finish(work)
        except OrderError:
            # The collective is still under way and will never end: its buffers are left to it.
            abandon(self._gather)
            self._gather = None
            self._move(ParamState.SHARDED)
            raise

    def _describe(self) -> str:
        return f"gather unit {self.name!r}"

    def _move(self, to: ParamState) -> None:
        self.params = moved(self, self.params, to, PARAM_MOVES)
