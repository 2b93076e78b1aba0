"""The gradients of a unit: taken from autograd, kept or reduced, handed to the sharded parameters."""

from __future__ import annotations

from collections import deque
from itertools import repeat
from operator import is_not

import torch
from torch import nn

from ..comm.abandoned import abandon
from ..comm.interface import Transport
from ..comm.order import Event
from ..errors import OrderError
from . import observer
from .accumulate import LocalGradients
from .faces import Slot
from .grad_shard import GradShard, gradient_of
from .master import Master
from .options import Options
from .parallel import local_gradient
from .reduce import Named, Outcome, Pending, Reduction
from .sharded import Sharded
from .states import GRAD_MOVES, GradState, moved


class Gradients:
    def __init__(self, sharded: Sharded, shards: Transport, replicas: Transport, device: torch.device):
        self.state = GradState.EMPTY
        self._sharded = sharded
        self._transport, self._replicas = shards, replicas
        self._device = device
        self._reductions: dict[tuple[tuple[int, ...], bool], Reduction] = {}
        # These outlive the reductions: ranks may lay a unit out anew that others do not.
        self._events: dict[tuple[tuple[int, ...], bool], tuple[Event, Event]] = {}
        self._local: LocalGradients | None = None
        self._pending: list[Pending] = []
        self._full: list[nn.Parameter] = []
        self._particular: list[int] = []
        self.others: list[tuple[int, nn.Parameter]] = []
        """Full faces of a precision that is not in use, where a graph of an earlier forward may leave gradients."""
        self.varied = False
        """Whether gradients may come in other dtypes than the policy's."""
        self.as_stored = False
        """Whether they are reduced in the stored dtypes, because the unit computes in those."""

    def look_at(self, full: list[nn.Parameter]) -> None:
        """The full faces in use, one for each slot: there autograd leaves gradients."""
        self._full = full
        slots = enumerate(self._slots)
        self._particular = [index for index, slot in slots if slot.whole_spec is not None or not slot.cut.numel]

    @property
    def _slots(self) -> list[Slot]:
        return self._sharded.slots

    @property
    def arrived(self) -> bool:
        """Whether autograd left a gradient that was not taken yet."""
        if any(map(is_not, map(gradient_of, self._full), repeat(None))):  # a loop in C: asked in every step
            return True
        return self.varied and any(face.grad is not None for _, face in self.others)

    def change_transport(self, transport: Transport) -> None:
        self._transport = transport
        self._events = {}  # another process group counts for itself

    def change_replicas(self, transport: Transport) -> None:
        self._replicas = transport
        self._events = {}

    def waits(self, options: Options) -> bool:
        """Whether earlier backwards left sums that the end of this one has to reduce."""
        kept = self.state is GradState.LOCAL and options.synchronise
        return kept or (self._has_partial and options.synchronise and options.all_reduce)

    @property
    def _has_partial(self) -> bool:
        """Beside sums that a reduction under way will take."""
        if self._replicas.world == 1:
            return False
        under_way = [pending.reduction for pending in self._pending]
        return any(each.has_partial and each not in under_way for each in self._reductions.values())

    def reduce(self, unit: Named, options: Options, last: bool) -> None:
        """Issue the reduction of what autograd left, or keep it for a later one.

        `last`: the backward is over, so sums kept by earlier backwards are reduced even if nothing was added.
        """
        gradients = self._take()
        if options.reduce_unused and options.synchronise:
            self._add_unused(gradients)
        if self._sharded.extended and not self.varied:
            self._equalise(gradients)
        if not gradients and not (last and self.waits(options)):
            return
        if torch.is_grad_enabled():  # a backward that builds a graph; entering `no_grad` each time costs
            with torch.no_grad():
                self._go_on(unit, gradients, options, last)
        else:
            self._go_on(unit, gradients, options, last)

    def _go_on(self, unit: Named, gradients: dict[int, torch.Tensor], options: Options, last: bool) -> None:
        if self.state is GradState.LOCAL and self._local is not None:
            self._local.forget(self._sharded.hide_sums())
        if self.state is GradState.LOCAL or (gradients and not options.synchronise):
            gradients = self._keep(unit, gradients)
        if options.synchronise:
            self._start(unit, gradients, options, last)
        elif self._local is not None:
            self._sharded.show_sums(self._local)

    def _take(self) -> dict[int, torch.Tensor]:
        """Gradients by parameter; the full faces are cleared."""
        found = enumerate(map(gradient_of, self._full))
        gradients = {index: grad for index, grad in found if grad is not None}
        for index in self._particular:
            if index in gradients:
                self._localise(index, gradients)
        deque(map(setattr, self._full, repeat("grad"), repeat(None)), maxlen=0)
        if self.varied:
            self._take_others(gradients)
        return gradients

    def _localise(self, index: int, gradients: dict[int, torch.Tensor]) -> None:
        """What this rank reduces of a gradient: of a DTensor the local tensor, of nothing nothing."""
        slot = self._slots[index]
        if not slot.cut.numel:
            del gradients[index]
        elif slot.whole_spec is not None:
            gradients[index] = local_gradient(gradients[index], slot.whole_spec, slot.partial_dims)

    def _take_others(self, gradients: dict[int, torch.Tensor]) -> None:
        """Add what graphs of the other precision left. All in the reduce dtype: to be packed they must have one."""
        for index, face in self.others:
            if (grad := face.grad) is not None:
                slot = self._slots[index]
                if slot.whole_spec is not None:
                    grad = local_gradient(grad, slot.whole_spec, slot.partial_dims)
                if slot.cut.numel:
                    both = index in gradients
                    gradients[index] = self._to_reduce(index, gradients[index]) + grad if both else grad
                face.grad = None
        for index in gradients:
            gradients[index] = self._to_reduce(index, gradients[index])
        ordered = sorted(gradients.items())
        gradients.clear()
        gradients.update(ordered)

    def _to_reduce(self, index: int, gradient: torch.Tensor) -> torch.Tensor:
        return gradient.to(self._master().segments.dtypes(index).reduce)

    def _master(self) -> Master:
        return self._sharded.master.stored() if self.as_stored else self._sharded.master

    @torch.no_grad()
    def _equalise(self, gradients: dict[int, torch.Tensor]) -> None:
        """Gradients of equal dtypes in every segment, because they are packed together.

        Whatever tensor a user's protocol made whole, its gradient travels as the others do; if it came in the reduce
        dtype they take that one.
        """
        segments, extended = self._sharded.master.segments, self._sharded.extended & gradients.keys()
        precise = {segments.of[i] for i in extended if gradients[i].dtype == segments.dtypes(i).reduce}
        for index, gradient in gradients.items():
            kinds = segments.dtypes(index)
            gradients[index] = gradient.to(kinds.reduce if segments.of[index] in precise else kinds.compute)

    def _add_unused(self, gradients: dict[int, torch.Tensor]) -> None:
        """Zeros for trainable parameters that this rank did not use and another one may have."""
        kept = self._local.sums() if self._local is not None else {}
        for index, slot in enumerate(self._slots):
            full = slot.full
            if (
                index not in gradients
                and index not in kept
                and slot.cut.numel
                and full is not None
                and full.requires_grad
            ):
                kinds = self._sharded.master.segments.dtypes(index)
                dtype = kinds.reduce if self.varied else kinds.compute
                gradients[index] = torch.zeros(slot.cut.shape, dtype=dtype, device=self._device)
        ordered = sorted(gradients.items())
        gradients.clear()
        gradients.update(ordered)  # the order of members must be the same on every rank

    def _keep(self, unit: object, gradients: dict[int, torch.Tensor]) -> dict[int, torch.Tensor]:
        if self._local is None:
            self._local = LocalGradients(self._sharded.master, self._device)
        self._local.add(gradients)
        self.state = moved(unit, self.state, GradState.LOCAL, GRAD_MOVES)
        sums = self._local.sums()
        if observer.current is not None:
            observer.current.keeping(self._slots, sums)
        return sums

    def _start(self, unit: Named, gradients: dict[int, torch.Tensor], options: Options, last: bool) -> None:
        members = self._sharded.reduced_with(gradients)
        if members:
            self._reduction(members).announce(unit)
        self.state = moved(unit, self.state, GradState.REDUCING, GRAD_MOVES)
        if members:
            self._pending.append(self._reduction(members).start(gradients, options, last))
        if last and options.all_reduce:
            mine = members, self.as_stored
            others = [each for key, each in self._reductions.items() if key != mine and each.has_partial]
            self._pending += [each.resume(options) for each in others]
        self._drop_sums()

    def _drop_sums(self) -> None:
        if self._local is not None and not self._local.clear():
            self._local = None  # somebody looks at them

    def _reduction(self, members: tuple[int, ...]) -> Reduction:
        """The reduction for a set of parameters: usually all of them, fewer when some were not used."""
        key = members, self.as_stored
        reduction = self._reductions.get(key)
        if reduction is None:
            events = self._events.setdefault(key, (Event(reduces=True), Event(reduces=True)))
            reduction = self._reductions[key] = Reduction(
                self._sharded, self._master(), members, self._transport, self._replicas, self._device, events
            )
        return reduction

    def advance(self, unit: object) -> bool:
        """Wait for the collectives under way and take the next step; true when nothing is left to do."""
        if self.state is not GradState.REDUCING:
            return True
        if torch.is_grad_enabled():
            with torch.no_grad():
                return self._advance(unit)
        return self._advance(unit)

    def _advance(self, unit: object) -> bool:
        partial, under_way = False, []
        for pending in self._pending:
            outcome = pending.reduction.advance(pending)
            if outcome is Outcome.GOES_ON:
                under_way.append(pending)
            partial = partial or outcome is Outcome.PARTIAL
        self._pending = under_way
        if under_way:
            return False
        self.state = moved(unit, self.state, GradState.PARTIAL if partial else GradState.REDUCED, GRAD_MOVES)
        return True

    def shards(self) -> list[GradShard]:
        """The gradients that parameters have."""
        return [shard for reduction in self._reductions.values() for shard in reduction.attached_shards()]

    def release_idle(self) -> None:
        """Give back the memory of gradients that `zero_grad` cleared."""
        if self.state is GradState.REDUCED:
            for reduction in self._reductions.values():
                reduction.release_idle()

    def forget_sums(self, unit: object) -> None:
        """Drop what backwards that did not synchronise have summed up."""
        if self.state in (GradState.LOCAL, GradState.PARTIAL):
            self.drop(unit)

    def drop(self, unit: object) -> None:
        """Forget everything that was not handed out."""
        for pending in self._pending:
            try:
                pending.reduction.drop(pending)
            except OrderError:
                # The collective is still under way and will never end: its buffers are left to it.
                abandon(pending)
                self._reductions = {
                    key: each for key, each in self._reductions.items() if each is not pending.reduction
                }
        self._pending = []
        for reduction in self._reductions.values():
            reduction.drop_partial()
        self._sharded.hide_sums()
        self._drop_sums()
        if self.state not in (GradState.EMPTY, GradState.REDUCED):
            self.state = moved(unit, self.state, GradState.EMPTY, GRAD_MOVES)
        for slot in self._slots:
            if slot.full is not None:
                slot.full.grad = None
        for _, face in self.others:
            face.grad = None

    def forget_buffers(self, unit: object) -> None:
        """After the unit was laid out anew, or its gradients converted, nothing made before fits."""
        self.drop(unit)
        self._reductions = {}
        self._local = None
