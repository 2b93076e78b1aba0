"""`copy.deepcopy` of a sharded model: a second model with its own shards, for example to average weights."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import torch
from torch import nn

from ..engine.api import FSDPState, ManagedParam, ParamGroup, Unit, location_of, share, state_of, users_of
from ..errors import UnsupportedError
from ..torch_private import local_of, make_dtensor, spec_of

_IN_PROGRESS = "unshard copies a model"


def copy_sharded(module: nn.Module, memo: dict[Any, Any]) -> nn.Module:
    """Copy values, policies and hooks, but not gradients. The copy has its own root.

    Called for every sharded module inside the copied one; the outermost call copies the units.
    """
    is_outermost = _IN_PROGRESS not in memo
    states = _prepare(module, memo) if is_outermost else []
    # FSDPModule.__new__ would make an instance of the original class.
    new = object.__new__(type(module))
    memo[id(module)] = new
    new.__dict__.update(copy.deepcopy(module.__dict__, memo))
    if is_outermost:
        for state in states:
            _copy_unit(state, memo)
        for state in states:
            _copy_uses(state, states, memo)
        del memo[_IN_PROGRESS]
    return new


def _prepare(module: nn.Module, memo: dict[Any, Any]) -> list[FSDPState]:
    """Reshard all units, and put their states and sharded parameters into the memo, so that deepcopy skips them."""
    memo[_IN_PROGRESS] = True
    states = list(dict.fromkeys(state for child in module.modules() if (state := state_of(child))))
    for state in states:
        state.unit.rest()
        state.unit.rebind_params()
        _refuse_without_owner(state, states)
        memo[id(state)] = FSDPState.__new__(FSDPState)  # initialised in _copy_unit
        for param in state.unit.params:
            memo[id(param.sharded)] = _clone(param)
    return states


@torch.no_grad()
def _clone(param: ManagedParam) -> nn.Parameter:
    spec = spec_of(param.sharded)
    dtensor = make_dtensor(param.local.clone(), spec.mesh, spec.placements, param.sharded.shape)
    return nn.Parameter(dtensor, requires_grad=param.sharded.requires_grad)


def _copy_unit(state: FSDPState, memo: dict[Any, Any]) -> None:
    """Create the unit of the copied state, with the parameters of the copied modules."""
    old = state.unit
    # Prefetch lists refer to units of the original; the copy learns its own order.
    options = dataclasses.replace(old.options, forward_prefetch=None, backward_prefetch=None)
    with torch.no_grad(), torch.inference_mode(False):
        param_groups = [_copy_param_group(old, group, memo) for group in old.param_groups]
        unit = Unit(param_groups, old.device, old.policy, options)
    unit.name = old.name
    new: FSDPState = memo[id(state)]
    new.__init__(unit)  # type: ignore[misc]
    new.transport_settings.like(state.transport_settings)
    new.buffer_dtypes = state.buffer_dtypes
    new.ignored = [location_of(memo[id(location.module())], location.name) for location in state.ignored]
    new.adopt([memo[id(module)] for module in state.modules()])
    if state.buffers is not None:
        new.buffers = state.buffers.of_copies(lambda module: memo[id(module)])


def _refuse_without_owner(state: FSDPState, states: list[FSDPState]) -> None:
    for other in state.unit.borrows_from:
        if other not in [each.unit for each in states]:
            raise UnsupportedError(
                f"{state.unit} cannot be copied without {other}, whose parameters it uses. Copy a module that contains "
                "both."
            )


def _copy_uses(state: FSDPState, states: list[FSDPState], memo: dict[Any, Any]) -> None:
    """Let the copied unit use the copies of the other units' param groups that the unit uses."""
    for other in states:
        for number, group in enumerate(other.unit.param_groups):
            if state.unit in users_of(group):
                copied: FSDPState = memo[id(state)]
                share(memo[id(other)].unit.param_groups[number], copied.unit)


def _copy_param_group(unit: Unit, group: ParamGroup, memo: dict[Any, Any]) -> ParamGroup:
    params = [
        dataclasses.replace(
            param,
            locations=[
                location_of(memo[id(module)], location.name)
                for location in param.locations
                if id(module := location.module()) in memo  # a unit outside the copied model may use it, too
            ],
            sharded=memo[id(param.sharded)],
            local=local_of(memo[id(param.sharded)]),
            unsharded=None,
            sliced=None,
            unsharded_view=None,
            attributes=copy.deepcopy(param.attributes, memo),
        )
        for param in group.params
    ]
    offload = group.sharded.offload
    return ParamGroup(
        params, group.shards, group.replicas, group.mesh, unit.device, offload, group.slicing, group.number
    )
