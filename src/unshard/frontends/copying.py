"""`copy.deepcopy` of a sharded model: a second model with shards of its own, for an average of the weights, say."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import torch
from torch import nn

from ..engine.faces import Slot, home_of
from ..engine.hooks import ShardState, state_of
from ..engine.part import Part
from ..engine.unit import Unit
from ..torch_private import local_of, make_dtensor, spec_of

_UNDER_WAY = "unshard copy under way"


def copy_sharded(module: nn.Module, memo: dict[Any, Any]) -> nn.Module:
    """A deep copy with the same values, policies and hooks. Gradients are not copied; the copy finds its own root."""
    outermost = _UNDER_WAY not in memo
    states = _prepare(module, memo) if outermost else []
    # Not through the class, whose construction gives the original class.
    new = object.__new__(type(module))
    memo[id(module)] = new
    new.__dict__.update(copy.deepcopy(module.__dict__, memo))
    if outermost:
        for state in states:
            _complete(state, memo)
        del memo[_UNDER_WAY]
    return new


def _prepare(module: nn.Module, memo: dict[Any, Any]) -> list[ShardState]:
    """Put what must not be copied piece by piece into the memo: empty states, and parameters over cloned shards."""
    memo[_UNDER_WAY] = True
    states = list(dict.fromkeys(state for child in module.modules() if (state := state_of(child))))
    for state in states:
        state.unit.reshard()
        state.unit.settle()
        memo[id(state)] = ShardState.__new__(ShardState)
        for slot in state.unit.slots:
            memo[id(slot.sharded)] = _clone(slot)
    return states


@torch.no_grad()
def _clone(slot: Slot) -> nn.Parameter:
    spec = spec_of(slot.sharded)
    dtensor = make_dtensor(slot.local.clone(), spec.mesh, spec.placements, slot.sharded.shape)
    return nn.Parameter(dtensor, requires_grad=slot.sharded.requires_grad)


def _complete(state: ShardState, memo: dict[Any, Any]) -> None:
    """Make the copied state's unit, over the copied modules' parameters."""
    old = state.unit
    with torch.no_grad(), torch.inference_mode(False):
        parts = [_copied_part(old, part, memo) for part in old.parts]
        unit = Unit(parts, old.device, old.policy, _options(old))
    unit.name = old.name
    copied: ShardState = memo[id(state)]
    copied.__init__(unit)  # type: ignore[misc]
    copied.wiring.like(state.wiring)
    copied.buffer_dtypes = state.buffer_dtypes
    copied.ignored = [home_of(memo[id(home.module())], home.name) for home in state.ignored]
    copied.adopt([memo[id(module)] for module in state.modules()])
    if state.buffers is not None:
        copied.cast_buffers(state.buffers.of_copies(lambda module: memo[id(module)]))


def _copied_part(unit: Unit, part: Part, memo: dict[Any, Any]) -> Part:
    slots = []
    for slot in part.slots:
        homes = [home_of(memo[id(home.module())], home.name) for home in slot.homes]
        new = memo[id(slot.sharded)]
        slots.append(
            dataclasses.replace(
                slot, homes=homes, sharded=new, local=local_of(new), full=None, sliced=None, anchor=None
            )
        )
    residence = part.sharded.residence
    return Part(slots, part.shards, part.replicas, part.mesh, unit.device, residence, part.slicing, part.serial)


def _options(unit: Unit) -> Any:
    # Prefetch lists name the units of the first model; the copy learns its own order.
    return dataclasses.replace(unit.options, forward_prefetch=None, backward_prefetch=None)
