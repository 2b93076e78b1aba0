"""The sharded faces of a unit over its master shard, and what happens to them from outside."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import is_
from typing import Any, ClassVar

import torch
from torch.distributed.tensor import DTensor

from ..comm.interface import Transport
from ..errors import ParameterError
from ..layout.rows import ROWS, Layout, Region
from ..torch_private import local_of, rebind_local, storage_key
from .accumulate import LocalGradients
from .extension import is_extended
from .faces import Faces, Home, Slot
from .grad_shard import GradShard
from .living import Living
from .master import META, Master
from .precision import Segments
from .residence import Residence
from .scalers import watch_scalers
from .writes import count_writes


class Sharded:
    """Keeps every sharded face inside the master shard."""

    living: ClassVar[Living[Sharded]] = Living()
    layout: ClassVar[Layout] = ROWS

    def __init__(self, slots: list[Slot], transport: Transport, residence: Residence):
        self.slots = slots
        self.residence = residence
        self.placed = False
        """Whether every parameter lies in the master shard, so that it can be gathered."""
        self.extended: set[int] = set()
        """Parameters that bring their own gather protocol, and so keep the memory they came with."""
        self._transport = transport
        self.master = self._lay_out()
        self.living.add(self)

    @property
    def rank(self) -> int:
        """Among those that shard."""
        return self._transport.rank

    @property
    def has_own_faces(self) -> bool:
        """Whether every slot has a parameter of its own at rest."""
        return True

    @property
    def homes(self) -> list[Home]:
        """Where parameters are registered at rest."""
        return [home for slot in self.slots for home in slot.homes]

    @property
    def settled(self) -> bool:
        """Whether every parameter is the object, and holds the tensor, that it was given."""
        return self.registered and all(map(is_, map(local_of, self._given), self._locals))

    @property
    def registered(self) -> bool:
        """Whether every parameter is the object that it was, whatever it holds."""
        # A loop in C: asked before every gather.
        return all(map(is_, map(dict.get, self._dicts, self._names), self._given))

    def settle(self, unit: str) -> bool:
        """Adopt parameters that were rebound from outside; true if the unit was laid out anew.

        `.to()`, `to_empty` and a load with `assign=True` give a parameter storage outside the master shard, and
        the next gather would send the old weights. The values are copied into the master shard and the local
        tensors rebound, keeping the parameter objects. Another dtype needs another layout.
        """
        self.refuse_assigned_data(unit)
        with torch.no_grad(), torch.inference_mode(False):
            for slot in self.slots:
                self._adopt(slot, unit)
            merged = self._merge_tied()
            dtypes = [slot.sharded.dtype for slot in self.slots]
            arrived = self.master.device == META and self._device() != META
            if dtypes == self.master.segments.originals and not arrived and not merged:
                self._bind(self.master)
                return False
            self.master = self._lay_out()
            return True

    def _merge_tied(self) -> bool:
        """One slot for parameters that a program tied after sharding, as `tie_weights()` does after `to_empty`.

        Two slots would rebind the one parameter in turns, and each time drop the gradients kept so far.
        """
        kept: dict[int, Slot] = {}
        for slot in self.slots:
            first = kept.setdefault(id(slot.sharded), slot)
            if first is not slot:
                first.homes.extend(slot.homes)
        merged = len(kept) < len(self.slots)
        if merged:
            self.slots = list(kept.values())
        return merged

    def find_extended(self) -> bool:
        """Look for gather protocols that were patched onto shards since; true if the unit was laid out anew."""
        if self._find_extended() == self.extended:
            return False
        with torch.no_grad(), torch.inference_mode(False):
            self.master = self._lay_out()
        return True

    def _find_extended(self) -> set[int]:
        return {i for i, slot in enumerate(self.slots) if is_extended(local_of(slot.sharded), slot.name)}

    def _misplaced(self, master: Master) -> list[Slot]:
        wrong = []
        for index, (slot, inside) in enumerate(zip(self.slots, master.locals, strict=True)):
            here = slot.local.device == self.residence.device if index in self.extended else slot.local is inside
            if not here or slot.local.is_meta:
                wrong.append(slot)
        return wrong

    def refuse_misplaced(self, unit: str) -> None:
        wrong = self._misplaced(self.master)
        listed = ", ".join(f"{slot.name} on {local_of(slot.sharded).device}" for slot in wrong)
        raise ParameterError(
            f"Unit {unit!r} on rank {self._transport.rank} expects its parameters on {self.residence.device}, "
            f"found: {listed}. {self._what_to_do()}"
        )

    def _what_to_do(self) -> str:
        if self.residence.away:
            return (
                "Its policy keeps them on the host (CPUOffloadPolicy), and the device gets copies by itself: do not "
                "move the model with .cuda() or .to(device), and assign tensors on the CPU only. model.to('cpu') takes "
                "them back."
            )
        return (
            "A model built on meta is materialised with model.to_empty(device=...) and then initialised, or by loading "
            "a state dict with assign=True, before the first forward."
        )

    def change_transport(self, transport: Transport) -> None:
        self._transport = transport
        with torch.no_grad(), torch.inference_mode(False):
            self.master = self._lay_out()

    def faces(self) -> Faces:
        """What swaps the faces on the modules."""
        return Faces(self.slots)

    def grad_shard(self, master: Master, regions: Sequence[Region], transport: Transport) -> GradShard:
        """What hands reduced gradients to the sharded faces."""
        return GradShard(master, regions, self.slots, transport, self.residence)

    def reduced_with(self, gradients: Mapping[int, torch.Tensor]) -> tuple[int, ...]:
        """The parameters that are reduced where these have gradients."""
        return tuple(gradients)

    def show_sums(self, sums: LocalGradients) -> None:
        """Let users see gradients that were not synchronised; these are nobody's but the engine's."""

    def hide_sums(self) -> list[int]:
        """Undo that; the parameters whose sums a user cleared."""
        return []

    def writes(self) -> int:
        """Grows with every write to a parameter at rest, through the DTensor or through its local tensor."""
        return count_writes(self._written)

    def _lay_out(self) -> Master:
        cuts = [slot.cut for slot in self.slots]
        segments = Segments([slot.sharded.dtype for slot in self.slots], [slot.policy for slot in self.slots])
        before, self.extended = self.extended, self._find_extended()
        members = [index for index in range(len(cuts)) if index not in self.extended]
        master = Master(cuts, segments, self._transport, members, self._device(), self.residence)
        for index in self.extended - before:
            self._move_out(local_of(self.slots[index].sharded))
        self._bind(master)
        watch_scalers(self.slots)
        return master

    @staticmethod
    def _move_out(local: torch.Tensor) -> None:
        """Give a tensor that methods were patched onto memory outside the master shard, keeping the object."""
        if type(local) is torch.Tensor and not local.is_meta and local.numel():
            local.set_(local.clone().untyped_storage(), 0, local.shape, local.stride())

    def _device(self) -> torch.device:
        """Meta while nothing is materialised, so that a large model costs nothing yet."""
        on_meta = bool(self.slots) and all(local_of(slot.sharded).is_meta for slot in self.slots)
        return META if on_meta else self.residence.device

    def _bind(self, master: Master) -> None:
        """Copy what lies outside the master shard into it. Parameters on meta or on another device are left."""
        for index, (slot, inside) in enumerate(zip(self.slots, master.locals, strict=True)):
            outside = local_of(slot.sharded)
            if index not in self.extended and outside is not inside and outside.device == inside.device:
                if not inside.is_meta:
                    inside.copy_(outside)
                rebind_local(slot.sharded, inside)
            slot.local = local_of(slot.sharded)
        self.placed = not self._misplaced(master)
        names = [(home.parameters, home.name, slot) for slot in self.slots for home in slot.homes]
        self._dicts, self._names = [each for each, *_ in names], [name for _, name, _ in names]
        self._given, self._locals = [slot.sharded for *_, slot in names], [slot.local for *_, slot in names]
        self._written = [tensor for slot in self.slots for tensor in (slot.sharded, slot.local)]
        self._storages = [storage_key(slot.sharded.untyped_storage()) for slot in self.slots]

    def refuse_assigned_data(self, unit: str) -> None:
        """Of `parameter.data = tensor` a DTensor takes the storage, which it does not use, and not the local tensor."""
        for slot, storage in zip(self.slots, self._storages, strict=True):
            ignored = storage_key(slot.sharded.untyped_storage()) != storage and local_of(slot.sharded) is slot.local
            if ignored and not slot.is_replaced:
                raise ParameterError(
                    f"Parameter {slot.name!r} of unit {unit!r} on rank {self._transport.rank} was assigned to by "
                    "`.data = tensor`, which leaves the values of a DTensor as they are. Write into it, under "
                    "torch.no_grad(): parameter.copy_(tensor) with a DTensor, parameter.to_local().copy_(tensor) with "
                    "this rank's rows; or assign an nn.Parameter of a DTensor to the module's attribute."
                )

    def _adopt(self, slot: Slot, unit: str) -> None:
        """Take over the parameter object that is registered now, under all of its names."""
        registered: list[Any] = [home.parameters.get(home.name) for home in slot.homes]
        current = next((p for p in registered if p is not slot.sharded), slot.sharded)
        self._check_replacement(slot, current, unit)
        slot.sharded = current
        for home in slot.homes:
            if home.parameters[home.name] is not current:
                home.put(current)

    def _check_replacement(self, slot: Slot, current: Any, unit: str) -> None:
        where = f"Parameter {slot.name!r} of unit {unit!r} on rank {self._transport.rank}"
        if current is None:
            raise ParameterError(f"{where} was removed from its module. Remove it before fully_shard, or freeze it.")
        if not isinstance(current, DTensor):
            raise ParameterError(
                f"{where} was replaced by a {type(current).__name__} that is not a DTensor. Write into the existing "
                "parameter, or assign one made with torch.distributed.tensor.distribute_tensor."
            )
        expected = slot.cut.local_shape(self._transport.rank)
        found = tuple(local_of(current).shape)
        if current.shape != slot.sharded.shape or found != expected:
            raise ParameterError(
                f"{where} was replaced by one of shape {tuple(current.shape)} (local {found}); expected "
                f"{tuple(slot.sharded.shape)} (local {expected}). Shapes cannot change after fully_shard."
            )
