"""A unit: the parameters that are gathered and reduced together."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ..comm.interface import Transport
from ..policies import MixedPrecisionPolicy
from .faces import Slot
from .options import Options
from .part import Part
from .precision import Precision
from .states import PARAM_MOVES, ParamState, Phase, refuse_move

ROOT = "(root)"
"""The name of the unit of the outermost module, which has none of its own."""


class Unit:
    """Parameters, their buffers and their state. Knows neither modules above it nor other units.

    It has a part for every set of ranks that its parameters are cut over: one, unless a user sends some elsewhere.
    """

    def __init__(self, parts: list[Part], device: torch.device, policy: MixedPrecisionPolicy, options: Options):
        self.name = ""
        self.parts = parts
        self.device, self.policy, self.options = device, policy, options
        self.phase = Phase.IDLE
        self.params = ParamState.SHARDED
        self.precision = Precision.POLICY
        self._writes_before: int | None = None
        self._hidden = False

    def __str__(self) -> str:
        rank = self.parts[0].shards.rank if self.parts else 0
        return f"Unit {self.name!r} on rank {rank}"

    @property
    def slots(self) -> list[Slot]:
        return [slot for part in self.parts for slot in part.slots]

    def gather(self) -> None:
        """Issue the gather if the unit is at rest or sliced; its buffers are in flight until `use`."""
        sliced = self.params is ParamState.SLICED
        if not sliced:
            if self.params is not ParamState.SHARDED:
                return
            for part in self.parts:
                part.get_ready(self.name)
            self._writes_before = None
        started = 0
        try:
            for part in self.parts:
                part.start(self.name, sliced)
                started += 1
        except BaseException:
            for part in self.parts[:started]:
                part.abandon()
                part.rest()
            raise
        self._move(ParamState.GATHERING)

    def send(self) -> None:
        """Let shards on the host set out for the device, because a gather will follow soon."""
        if self.params is ParamState.SHARDED:
            for part in self.parts:
                part.send()

    def use(self) -> None:
        """Be whole, with the full faces on the modules."""
        if self.params is ParamState.FULL:
            if self._hidden:
                self._show()
            return
        if self.params is not ParamState.GATHERING:
            self.gather()
        for part in self.parts:
            part.finish()
        self._move(ParamState.FULL)

    def hide(self) -> None:
        """Stay whole, with the sharded faces on the modules until the next use."""
        if self.params is ParamState.FULL:
            self._hidden = True
            for part in self.parts:
                part.hide()

    def _show(self) -> None:
        self._hidden = False
        for part in self.parts:
            part.show()

    def reshard(self) -> None:
        """Rest: the full buffer empty, the sharded faces on the modules."""
        if self.params is ParamState.SHARDED:
            return
        gathering = self.params is ParamState.GATHERING
        for part in self.parts:
            if gathering:
                part.abandon()
            part.rest()
        self._hidden = False
        self._move(ParamState.SHARDED)

    def precision_in(self, training: bool) -> Precision:
        """What a forward in training or evaluation mode computes in."""
        full = self.policy.full_precision_in_eval and not training
        return Precision.STORED if full else Precision.POLICY

    def compute_dtype_in(self, precision: Precision) -> torch.dtype | None:
        """What inputs have to be cast to; `None` if there is no such dtype."""
        if precision is Precision.POLICY or self.policy.param_dtype is None:
            return self.policy.param_dtype
        stored = {slot.sharded.dtype for slot in self.slots if slot.sharded.is_floating_point()}
        return stored.pop() if len(stored) == 1 else None

    def select(self, precision: Precision) -> None:
        """Compute in `precision` from now on, which takes another gather."""
        if precision is self.precision:
            return
        if self.phase is Phase.BACKWARD and self.params is not ParamState.SHARDED:
            # Graphs of both precisions in one backward: the first one may still need what is gathered.
            self.use()
            self._move(ParamState.SHARDED)
        else:
            self.reshard()
        for part in self.parts:
            part.select(precision)
        self.precision = precision

    def slice(self) -> None:
        """Keep a slice of the whole unit until backward, as an integer `reshard_after_forward` asks."""
        if self.precision is not Precision.POLICY:
            self.reshard()  # slices are made for training
            return
        for part in self.parts:
            part.slice()
        self._move(ParamState.SLICED)

    def keep(self) -> None:
        """Stay whole or sliced for a while: from now on writes to the parameters at rest make the unit stale.

        Asked for only then, because counting the writes costs as much as the rest of a gather.
        """
        if self._writes_before is None:
            self._writes_before = self._writes()

    @property
    def stale(self) -> bool:
        """Whether a parameter at rest was written while the unit was kept."""
        held = self.params is ParamState.FULL or self.params is ParamState.SLICED
        return held and self._writes_before is not None and self._writes_before != self._writes()

    def _writes(self) -> int:
        return sum([part.sharded.writes() for part in self.parts])

    def settle(self) -> None:
        """Adopt parameters that were rebound from outside; only at rest."""
        self.refuse_assigned_data()
        for part in self.parts:
            part.settle(self.name)

    def refuse_assigned_data(self) -> None:
        """Assignments to `.data` of sharded parameters that have no effect."""
        for part in self.parts:
            part.sharded.refuse_assigned_data(self.name)

    def change_transport(self, change: Callable[[Part], Transport]) -> None:
        """Send each part through another transport from now on."""
        self.reshard()
        for part in self.parts:
            part.change_transport(self.name, change(part))

    # -- gradients ------------------------------------------------------------------------------------------

    @property
    def has_gradients(self) -> bool:
        """Whether autograd, or backwards that did not synchronise, left gradients that can be reduced now."""
        for part in self.parts:
            if part.gradients.arrived or part.gradients.waits(self.options):
                return True
        return False

    @property
    def gradients_arrived(self) -> bool:
        """Whether autograd left gradients that nobody has taken."""
        return any(part.gradients.arrived for part in self.parts)

    @property
    def stays_whole(self) -> bool:
        """Whether it is whole at rest, too."""
        return all(part.stays_whole for part in self.parts)

    def reduce(self, last: bool = False) -> None:
        for part in self.parts:
            part.gradients.reduce(self, self.options, last)

    def advance_reduce(self) -> bool:
        """Take the next step of the reduction under way, waiting for it; true when the gradients are there."""
        done = [part.gradients.advance(self) for part in self.parts]
        return all(done)

    def release_gradients(self) -> None:
        """Give back the memory of gradients that `zero_grad` cleared."""
        for part in self.parts:
            part.gradients.release_idle()

    def clear_gradients(self, set_to_none: bool) -> None:
        """Those that the sharded parameters have."""
        for parameter in (slot.sharded for slot in self.slots):
            if set_to_none:
                parameter.grad = None
            elif parameter.grad is not None:
                parameter.grad.zero_()

    def forget_sums(self) -> None:
        """Drop what backwards that did not synchronise have summed up."""
        for part in self.parts:
            part.gradients.forget_sums(self)

    def reset(self) -> None:
        """Return to rest after a forward or backward that did not end; drops gradients not yet handed out."""
        for part in self.parts:
            part.gradients.drop(self)
        self.reshard()
        self.phase = Phase.IDLE

    def _move(self, to: ParamState) -> None:
        if to not in PARAM_MOVES[self.params]:
            refuse_move(self, self.params, to)
        self.params = to
