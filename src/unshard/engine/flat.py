"""Parameters that lie side by side, in the master shard and in the gradient shard, for code that takes many as one.

An elementwise operation on a range of the master shard is the same operation on each parameter in it, as long as what
lies between them (padding, gaps) is zero and stays so. The same range of the gradient shard holds the gradients if the
parameters lie there in the same order and at the same distances.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from ..errors import StateError
from ..torch_private import foreach_zero, local_of
from .flat_sharded import FlatSharded
from .grad_shard import GradShard, Stretch
from .master import META, Master
from .residence import Residence
from .sharded import Sharded


@dataclass(frozen=True)
class Spot:
    """Where a parameter lies in a master shard: which one it is there, and its bytes."""

    master: Master
    order: int
    begin: int
    end: int
    states: Residence | None
    """Where its state rests, if that has to be brought to it for a step."""

    def precedes(self, other: Spot) -> bool:
        """Whether nothing but padding lies between the two."""
        return self.master is other.master and self.order + 1 == other.order


@dataclass(frozen=True)
class GradSpot:
    """Where a gradient lies in a gradient shard."""

    shard: GradShard
    order: int
    begin: int

    def precedes(self, other: GradSpot) -> bool:
        return self.shard is other.shard and self.order + 1 == other.order


def spots_of(parameters: Iterable[torch.Tensor]) -> dict[int, Spot]:
    """By the id of the parameter; those that do not lie in any master shard right now have none."""
    wanted, found = set(map(id, parameters)), {}
    for sharded in Sharded.living:
        master = sharded.master
        if master.device == META or wanted.isdisjoint(id(slot.sharded) for slot in sharded.slots):
            continue
        states = sharded.residence.states
        states = states if states is not None and states.away else None  # where the host computes, it is there
        for order, (index, begin) in enumerate(master.spots()):
            parameter, local = sharded.slots[index].sharded, master.locals[index]
            if id(parameter) in wanted and local_of(parameter) is local:
                found[id(parameter)] = Spot(master, order, begin, begin + local.nbytes, states)
    return found


def replaced_by_shards(parameters: Iterable[torch.Tensor]) -> dict[int, str]:
    """Those that modules no longer have, because they were sharded: the name of each in its unit, by its id."""
    names = {}
    for sharded in (*Sharded.living, *FlatSharded.living):
        for slot in sharded.slots:
            origin = slot.origin()
            if origin is not None and origin is not slot.sharded:  # flat units may keep the parameters they were given
                names[id(origin)] = slot.name
    return {id(each): names[id(each)] for each in parameters if id(each) in names}


def gradient_spots() -> dict[int, GradSpot]:
    """All gradients that parameters have from the engine, by the id of the `.grad` object."""
    found = {}
    for shard in GradShard.living:
        if shard.attached:
            for order, (face, local, begin) in enumerate(zip(shard.faces, shard.locals, shard.begins, strict=True)):
                if local_of(face) is local:
                    found[id(face)] = GradSpot(shard, order, begin)
    return found


def lies_flat(parameters: Iterable[torch.Tensor], ranks: int = 1) -> str | None:
    """The name of one of `parameters` that belongs to a flat unit, if any does: plain tensors do not tell.

    `ranks`: only of units that are cut over so many, or more.
    """
    wanted = set(map(id, parameters))
    for sharded in FlatSharded.living:
        if sharded.slots[0].cut.world >= ranks:
            for slot in sharded.slots:
                if id(slot.sharded) in wanted:
                    return slot.name
    return None


def cut_flat(parameters: Iterable[torch.Tensor]) -> str | None:
    """The same for one that is some elements of a unit, so that a rank does not know the whole."""
    return lies_flat(parameters, ranks=2)


def rest_on_the_host(parameters: Iterable[torch.Tensor]) -> bool:
    """Whether any of them does, with a device that computes."""
    wanted = set(map(id, parameters))
    away = (sharded for sharded in Sharded.living if sharded.residence.away)
    return any(id(slot.sharded) in wanted for sharded in away for slot in sharded.slots)


@dataclass(frozen=True)
class Scalable:
    """Gradients as a few flat tensors that may be multiplied as they are, and the parameters that are not in them."""

    stretches: list[Stretch]
    others: list[torch.Tensor]
    gaps: list[torch.Tensor]

    def clean(self) -> None:
        """To be called after a multiplication: zero times NaN is NaN, which every later norm would find."""
        by_device: dict[torch.device, list[torch.Tensor]] = {}
        for gap in self.gaps:
            by_device.setdefault(gap.device, []).append(gap)
        for gaps in by_device.values():
            foreach_zero(gaps)


def scalable_gradients(parameters: Sequence[torch.Tensor]) -> Scalable:
    """A gradient shard is used whole or not at all: only if all of its gradients are those of `parameters`."""
    given, found = set(map(id, parameters)), Scalable([], [], [])
    for shard in GradShard.living:
        if shard.stepped and not given.isdisjoint(map(id, shard.parameters())):
            raise StateError(
                f"The gradients of {shard.names()} can be neither clipped nor scaled any more: an optimizer made flat "
                "with ahead=True has stepped them during backward. Leave out ahead=True where you clip or scale."
            )
        if shard.belongs_to(given):
            given.difference_update(map(id, shard.parameters()))
            found.stretches.extend(shard.stretches())
            found.gaps.extend(shard.gaps())
    found.others.extend(parameter for parameter in parameters if id(parameter) in given)
    return found
