"""The sharded faces of a unit that is laid end to end, over its master shard."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import nn

from ..comm.interface import Transport
from ..errors import ParameterError, StateError
from ..layout.flat import END_TO_END
from ..layout.rows import Layout, Region
from .accumulate import LocalGradients
from .faces import Faces, Home, Slot
from .flat_faces import FlatFace, FlatFaces, FlatGradShard, VeiledFaces, veil_for
from .grad_shard import GradShard
from .living import Living
from .master import Master
from .precision import Segments
from .residence import Residence
from .sharded import Sharded
from .writes import count_writes


class FlatSharded(Sharded):
    """Plain tensors instead of DTensors: one parameter for the unit, or the original ones as rows of elements.

    The slots come with their rank's elements in `local`.
    """

    living: ClassVar[Living[Sharded]] = Living()
    layout: ClassVar[Layout] = END_TO_END

    def __init__(
        self,
        slots: list[Slot],
        transport: Transport,
        residence: Residence,
        *,
        homes: list[Home],
        length: int,
        originals: bool,
    ):
        """`homes` is where the unit's one parameter is registered; `originals`: users see the others instead."""
        self.originals = originals
        nothing = torch.empty(0, dtype=slots[0].sharded.dtype, device=residence.device)
        needed = any(slot.sharded.requires_grad for slot in slots)
        self.flat = FlatFace(homes, nn.Parameter(nothing, requires_grad=needed), nothing, length)
        self._resting: Sequence[Slot | FlatFace] = slots if originals else [self.flat]
        self._bound = False
        self._all = tuple(index for index, slot in enumerate(slots) if slot.cut.numel)
        self._shown: list[tuple[tuple[int, ...], Slot | FlatFace, torch.Tensor, torch.Tensor | None]] = []
        self._veils: dict[Slot, torch.Tensor] = {}
        self._places: list[tuple[dict[str, Any], str, Slot | FlatFace, int]] = []
        super().__init__(slots, transport, residence)

    # -- what is where --------------------------------------------------------------------------------------

    @property
    def has_own_faces(self) -> bool:
        return self.originals

    @property
    def homes(self) -> list[Home]:
        return [home for face in self._resting for home in face.homes]

    @property
    def settled(self) -> bool:
        """Whether every parameter is the object, and lies at the address, that it was given."""
        return self.registered and all(face.sharded.data_ptr() == address for *_, face, address in self._places)

    @property
    def registered(self) -> bool:
        """Whether every parameter is the object that it was, wherever it lies."""
        return all(parameters.get(name) is face.sharded for parameters, name, face, _ in self._places)

    def settle(self, unit: str) -> bool:
        """Adopt parameters that were given other memory from outside; true if the unit was laid out anew."""
        with torch.no_grad(), torch.inference_mode(False):
            for face in self._resting:
                self._adopt(face, unit)  # type: ignore[arg-type]
            if not self.originals:
                for slot in self.slots:
                    slot.sharded = self.flat.sharded
            self._refuse_several_dtypes(unit)
            if self._dtypes() == self.master.segments.originals:
                self._bind(self.master)
                return False
            self.master = self._lay_out()
            return True

    def refuse_assigned_data(self, unit: str) -> None:
        """It is adopted: a plain tensor lies where its data does."""

    def find_extended(self) -> bool:
        return False

    @property
    def has_elements(self) -> bool:
        """Whether this rank's piece is more than padding."""
        return any(local.numel() for local in self.master.locals)

    def _dtypes(self) -> list[torch.dtype]:
        return [slot.sharded.dtype for slot in self.slots]

    def _lay_out(self) -> Master:
        segments = Segments(self._dtypes(), [slot.policy for slot in self.slots])
        cuts, members = [slot.cut for slot in self.slots], range(len(self.slots))
        device = self.residence.device
        master = Master(cuts, segments, self._transport, members, device, self.residence, self.layout)
        if not self.originals:
            dtype = segments.kinds[0].original
            self._veils = {slot: veil_for(slot, dtype, device) for slot in self.slots}
        self._bind(master)
        return master

    def _bind(self, master: Master) -> None:
        """Copy what lies outside the master shard into it. Parameters on another device are left."""
        kinds, share = master.segments.kinds[0], self.slots[0].cut.share  # type: ignore[union-attr]
        piece = master.flat(kinds.original, 0, share)
        if not self._bound:
            self._begin(master, piece)
        elif self.originals:
            for slot, inside in zip(self.slots, master.locals, strict=True):
                _move_in(slot.sharded, inside)
            _move_to(self.flat.sharded, piece)
        else:
            _move_in(self.flat.sharded, piece)
        self.flat.local = piece
        for slot, inside in zip(self.slots, master.locals, strict=True):
            slot.local = inside
        for face in (*self._resting, self.flat):
            _allow_gradients_in(face.sharded, kinds.gradient)
        self.placed = all(face.sharded.device == master.device for face in self._resting)
        homes = [(face, home) for face in self._resting for home in face.homes]
        self._places = [(home.parameters, home.name, face, face.sharded.data_ptr()) for face, home in homes]
        self._written = [tensor for face in self._resting for tensor in (face.sharded, face.local)]

    def _begin(self, master: Master, piece: torch.Tensor) -> None:
        """The values that the slots came with, and the parameters over them."""
        self._bound = True
        self.flat.sharded.data = piece
        for slot, inside in zip(self.slots, master.locals, strict=True):
            inside.copy_(slot.local)
            if self.originals:
                slot.sharded.grad = None
                slot.sharded.data = inside
            else:
                slot.sharded = self.flat.sharded

    # -- what others ask ------------------------------------------------------------------------------------

    def faces(self) -> Faces:
        if self.originals:
            return FlatFaces(self.slots, self.flat)
        return VeiledFaces(self.slots, self.flat, self._veils)

    def grad_shard(self, master: Master, regions: Sequence[Region], transport: Transport) -> GradShard:
        flat = None if self.originals else self.flat
        return FlatGradShard(master, regions, self.slots, transport, self.residence, flat)

    def reduced_with(self, gradients: Mapping[int, torch.Tensor]) -> tuple[int, ...]:
        """All of them: the unit is cut as a whole, so ranks may even use different parameters."""
        for index, gradient in gradients.items():
            if gradient.requires_grad:
                raise StateError(
                    f"The gradient of {self.slots[index].name!r} is to be differentiated again (create_graph=True); "
                    "nothing leads back through the reduction. Call backward without a graph."
                )
        return self._all if gradients else ()

    def show_sums(self, sums: LocalGradients) -> None:
        """As `.grad`, in the shape of whole parameters: so users see them, and clear them with the others."""
        shown: list[tuple[tuple[int, ...], Slot | FlatFace, torch.Tensor, torch.Tensor | None]] = []
        if self.originals:
            shown = [
                ((index,), self.slots[index], each, self.slots[index].anchor) for index, each in sums.sums().items()
            ]
        elif sums.sums():
            shown = [(tuple(range(len(self.slots))), self.flat, sums.flat(self.flat.length), self.flat.whole)]
        for indices, face, each, like in shown:
            parameter = face.sharded
            self._shown.append((indices, face, each, parameter.grad))
            if like is not None:
                parameter.data = like  # a gradient of another shape than the parameter's is refused
                parameter.grad = None
                parameter.grad = each
                parameter.data = face.local

    def hide_sums(self) -> list[int]:
        cleared = [
            index for indices, face, each, _ in self._shown if face.sharded.grad is not each for index in indices
        ]
        for _, face, each, before in self._shown:
            # What was reduced before is added to, unless the user cleared everything.
            face.sharded.grad = before if face.sharded.grad is each else None
        self._shown = []
        return cleared

    def writes(self) -> int:
        # Other memory is not counted: a rank without elements of the parameter could not see it, and gather alone.
        return count_writes(self._written)

    # -- refusals -------------------------------------------------------------------------------------------

    def refuse_misplaced(self, unit: str) -> None:
        wrong = [face for face in self._resting if face.sharded.device != self.residence.device]
        listed = ", ".join(f"{face.name} on {face.sharded.device}" for face in wrong)
        raise ParameterError(
            f"Unit {unit!r} on rank {self._transport.rank} expects its parameters on {self.residence.device}, found: "
            f"{listed}. Parameters that are offloaded stay on the host; otherwise move the module, or pass device_id, "
            "before it is wrapped."
        )

    def _refuse_several_dtypes(self, unit: str) -> None:
        if len(set(self._dtypes())) > 1:
            listed = ", ".join(f"{slot.name} in {slot.sharded.dtype}" for slot in self.slots)
            raise ParameterError(
                f"The parameters of unit {unit!r} are laid end to end and must have one dtype, found: {listed}. "
                "Convert all of them."
            )

    def _check_replacement(self, slot: Any, current: Any, unit: str) -> None:
        where = f"Parameter {slot.name!r} of unit {unit!r} on rank {self._transport.rank}"
        if current is None:
            raise ParameterError(f"{where} was removed from its module. Remove it before it is wrapped, or freeze it.")
        if not isinstance(current, nn.Parameter):
            raise ParameterError(f"{where} was replaced by a {type(current).__name__}; assign an nn.Parameter.")
        if current.shape != slot.local.shape:
            raise ParameterError(
                f"{where} has the shape {tuple(current.shape)} now; expected {tuple(slot.local.shape)}, this rank's "
                "elements of it. To change whole parameters use summon_full_params."
            )


def _allow_gradients_in(parameter: torch.Tensor, dtype: torch.dtype) -> None:
    """Let `.grad` have another dtype than the parameter."""
    if getattr(parameter, "grad_dtype", dtype) != dtype:
        parameter.grad_dtype = dtype


def _move_in(parameter: nn.Parameter, inside: torch.Tensor) -> None:
    """Let a parameter that was given other memory lie inside the master shard again, with the values it has."""
    if parameter.device == inside.device and parameter.data_ptr() != inside.data_ptr():
        inside.copy_(parameter.detach())
        parameter.data = inside


def _move_to(parameter: nn.Parameter, place: torch.Tensor) -> None:
    if parameter.data_ptr() != place.data_ptr() or parameter.dtype != place.dtype:
        parameter.data = place
