"""The gradients of a unit: taken from autograd, kept or reduced, handed to the sharded parameters."""

from __future__ import annotations

import torch

from ..comm.interface import Transport
from .accumulate import LocalGradients
from .faces import Slot
from .options import Options
from .reduce import Pending, Reduction
from .sharded import Sharded
from .states import GRAD_MOVES, GradState, moved


class Gradients:
    def __init__(self, sharded: Sharded, transport: Transport, device: torch.device):
        self.state = GradState.EMPTY
        self._sharded = sharded
        self._transport = transport
        self._device = device
        self._reductions: dict[tuple[int, ...], Reduction] = {}
        self._local: LocalGradients | None = None
        self._pending: Pending | None = None

    @property
    def _slots(self) -> list[Slot]:
        return self._sharded.slots

    @property
    def arrived(self) -> bool:
        """Whether autograd left a gradient that was not taken yet."""
        return any(slot.full is not None and slot.full.grad is not None for slot in self._slots)

    @property
    def keeps_sums(self) -> bool:
        """Whether unsynchronised backwards left sums that are still to be reduced."""
        return self.state is GradState.LOCAL

    def reduce(self, unit: object, options: Options, last: bool) -> None:
        """Issue the reduction of what autograd left, or keep it for a later one.

        `last`: the backward is over, so sums kept by earlier backwards are reduced even if nothing was added.
        """
        gradients = self._take()
        kept, synchronise = self.state is GradState.LOCAL, options.synchronise
        if options.reduce_unused and synchronise:
            self._add_unused(gradients)
        if not gradients and not (kept and last and synchronise):
            return
        with torch.no_grad():
            if kept or not synchronise:
                gradients = self._keep(unit, gradients)
            if synchronise:
                self._start(unit, gradients)

    def _take(self) -> dict[int, torch.Tensor]:
        """Gradients by parameter; the full faces are cleared."""
        gradients = {}
        for index, slot in enumerate(self._slots):
            full = slot.full
            if full is not None and (grad := full.grad) is not None:
                if slot.cut.numel:
                    gradients[index] = grad
                full.grad = None
        return gradients

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
                gradients[index] = torch.zeros(full.shape, dtype=full.dtype, device=full.device)
        ordered = sorted(gradients.items())
        gradients.clear()
        gradients.update(ordered)  # the order of members must be the same on every rank

    def _keep(self, unit: object, gradients: dict[int, torch.Tensor]) -> dict[int, torch.Tensor]:
        if self._local is None:
            self._local = LocalGradients(self._sharded.master, self._device)
        self._local.add(gradients)
        self.state = moved(unit, self.state, GradState.LOCAL, GRAD_MOVES)
        return self._local.sums()

    def _start(self, unit: object, gradients: dict[int, torch.Tensor]) -> None:
        members = tuple(gradients)
        if members not in self._reductions:
            self._reductions[members] = Reduction(
                self._sharded.master,
                members,
                self._slots,
                self._transport,
                self._device,
                self._sharded.residence,
            )
        self.state = moved(unit, self.state, GradState.REDUCING, GRAD_MOVES)
        self._pending = self._reductions[members].start(gradients)
        if self._local is not None:
            self._local.clear()

    def finish(self, unit: object) -> None:
        """Wait for the reduction under way and hand out the gradients."""
        if self.state is GradState.REDUCING:
            pending, self._pending = self._pending, None
            assert pending is not None
            with torch.no_grad():
                pending.reduction.finish(pending)
            self.state = moved(unit, self.state, GradState.REDUCED, GRAD_MOVES)

    def release_idle(self) -> None:
        """Give back the memory of gradients that `zero_grad` cleared."""
        if self.state is GradState.REDUCED:
            for reduction in self._reductions.values():
                reduction.release_idle()

    def drop(self, unit: object) -> None:
        """Forget everything that was not handed out."""
        if self.state is GradState.REDUCING:
            pending, self._pending = self._pending, None
            assert pending is not None
            pending.reduction.drop(pending)
            self.state = moved(unit, self.state, GradState.EMPTY, GRAD_MOVES)
        if self.state is GradState.LOCAL:
            assert self._local is not None
            self._local.clear()
            self.state = moved(unit, self.state, GradState.EMPTY, GRAD_MOVES)
        for slot in self._slots:
            if slot.full is not None:
                slot.full.grad = None

    def forget_buffers(self, unit: object) -> None:
        """After the unit was laid out anew, or its gradients converted, nothing made before fits."""
        self.drop(unit)
        self._reductions = {}
        self._local = None
