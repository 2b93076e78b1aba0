"""Computes the planned dtypes of each unit's parameters, gradients, inputs, outputs and buffers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import nn

from ..engine.api import (
    Dtypes,
    FSDPState,
    ManagedParam,
    Precision,
    cast_boundaries,
    dtypes_for,
    state_of,
    unsharded_name,
)
from ..errors import ArgumentError
from ..names import modules_until
from ..policies import MixedPrecisionPolicy
from ..torch_private import is_replicated, own_buffers, own_parameters


class ParamStage(Enum):
    """A stage of a training step at which a parameter or its gradient has a planned dtype."""

    GATHERED = "gathered"
    COMPUTED = "computed"
    GRADIENT = "gradient of autograd"
    KEPT = "sums kept"
    WIRE = "wire"
    REDUCED = "reduced"
    ALL_REDUCED = "over replicas"
    GRAD = ".grad"
    UPDATED = "updated"
    STATE = "optimizer state"


_FIELDS = {
    ParamStage.KEPT: "kept",
    ParamStage.WIRE: "wire",
    ParamStage.REDUCED: "reduce",
    ParamStage.ALL_REDUCED: "reduce",
    ParamStage.GRAD: "gradient",
    ParamStage.UPDATED: "original",
}
"""The field of the engine's `Dtypes` that has the planned dtype of each stage."""


@dataclass(frozen=True)
class ParamPlan:
    """The planned dtypes of one parameter of a unit."""

    param: ManagedParam
    name: str
    """The name in the model's `named_parameters()`."""
    aliases: tuple[str, ...]
    """All names of the parameter, relative to the sharded module. The policy's patterns match these names."""
    parameter: Any
    dtypes: Dtypes
    extended: bool
    """True if the parameter implements the gather protocol (`fsdp_pre_all_gather`)."""
    state: tuple[torch.dtype, ...] | None
    """The dtypes of the optimizer's state, or None if there is no state yet."""

    @property
    def trainable(self) -> bool:
        return self.parameter.requires_grad

    def dtypes_in(self, precision: Precision) -> Dtypes:
        return self.dtypes.stored if precision is Precision.STORED else self.dtypes

    def planned(self, stage: ParamStage, precision: Precision = Precision.POLICY) -> set[torch.dtype]:
        """Return the dtypes expected at a stage. The set is empty if the stage does not occur or allows any dtype."""
        dtypes = self.dtypes_in(precision)
        if stage in (ParamStage.GATHERED, ParamStage.COMPUTED):
            return set() if self.extended else {dtypes.compute}  # a gather protocol may use any dtype
        if not self.trainable:
            return set()
        if stage is ParamStage.GRADIENT:
            return {dtypes.compute, dtypes.kept}  # `kept` after accumulation without synchronization
        if stage is ParamStage.STATE:
            return set(self.state) if self.state else {dtypes.original}
        return {getattr(dtypes, _FIELDS[stage])}


@dataclass(frozen=True)
class Row:
    """Parameters of one unit that have the same dtypes. The dtype of a stage that does not occur is None."""

    unit: str
    names: tuple[str, ...]
    elements: int
    trainable: bool
    stored: torch.dtype
    gathered: torch.dtype | None
    computed: torch.dtype
    wire: torch.dtype | None
    reduced: torch.dtype | None
    kept: torch.dtype | None
    """The dtype of gradients that are accumulated without synchronization."""
    grad: torch.dtype | None
    """The dtype of `.grad`. Gradients that are accumulated with synchronization have this dtype."""
    updated: torch.dtype | None
    state: tuple[torch.dtype, ...]
    """The dtypes of the optimizer's state. Before the first optimizer step, these are the expected dtypes."""
    state_exists: bool

    @property
    def parameters(self) -> int:
        return len(self.names)


@dataclass(frozen=True)
class BufferPlan:
    name: str
    alias: str
    """The name relative to the sharded module. The policy's patterns match this name."""
    module: nn.Module
    was: torch.dtype | None
    """The dtype that the buffer had when the module was sharded."""
    stored: torch.dtype
    seen: torch.dtype


@dataclass(frozen=True)
class UnitPlan:
    name: str
    state: FSDPState
    params: tuple[ParamPlan, ...]
    rows: tuple[Row, ...]
    buffers: tuple[BufferPlan, ...]
    module_policies: dict[nn.Module, MixedPrecisionPolicy]
    """The policies of modules inside the unit that cast their own inputs and outputs."""
    ranks: int
    """The number of ranks over which gradients are reduced."""
    replicated: bool
    """True if gradients are also all-reduced over replicas."""
    outermost: bool

    @property
    def policy(self) -> MixedPrecisionPolicy:
        return self.state.unit.policy

    @property
    def casts_inputs(self) -> bool:
        """True if forward casts its inputs. Before the first forward, the outermost unit counts as the root."""
        if self.state.is_initialized:
            return self.state.casts_inputs
        return self.policy.casts_inputs(self.outermost, empty=not self.state.unit.used_params)

    def modules_with_params(self) -> dict[nn.Module, list[ParamPlan]]:
        """Map each module that directly holds parameters of the unit to these parameters."""
        found: dict[nn.Module, list[ParamPlan]] = {}
        for each in self.params:
            for location in each.param.locations:
                module = location.module()
                if module is not None:
                    found.setdefault(module, []).append(each)
        return found


@dataclass(frozen=True)
class ModelPlan:
    units: tuple[UnitPlan, ...]
    unmanaged: tuple[tuple[str, Any], ...]
    """Names and values of trainable parameters that belong to no unit."""
    parameter_ids: frozenset[int]
    """The ids of all parameters that the model's optimizers should hold."""

    @property
    def params(self) -> list[ParamPlan]:
        return [each for unit in self.units for each in unit.params]

    @property
    def buffers(self) -> list[BufferPlan]:
        return [each for unit in self.units for each in unit.buffers]


def plan_of(model: nn.Module, optimizer: Any = None) -> ModelPlan:
    """Return the planned dtypes of every unit in `model`. This runs no step or collective and allocates no tensors."""
    if not isinstance(model, nn.Module):
        raise ArgumentError(f"Expected a sharded model, got {type(model).__name__}.")
    if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
        raise ArgumentError(
            f"Expected one torch.optim.Optimizer, got {type(optimizer).__name__}. For several optimizers, call it "
            "once for each."
        )
    paths: dict[FSDPState, list[str]] = {}
    for name, module in model.named_modules():
        if state := state_of(module):
            paths.setdefault(state, []).append(name)
    if not paths:
        raise ArgumentError(
            f"{type(model).__name__} contains no module that fully_shard was applied to. Shard it first: "
            "fully_shard(model, mp_policy=...)."
        )
    prefixes = _prefixes(model)
    outer = set(_outermost(model))
    units = tuple(_unit_plan(state, ", ".join(names), prefixes, optimizer, outer) for state, names in paths.items())
    ids = {id(each.parameter) for unit in units for each in unit.params}
    ids |= {id(each) for each in model.parameters() if unsharded_name(each) is None}
    return ModelPlan(units, tuple(_unmanaged(model, units)), frozenset(ids))


def owned_modules(state: FSDPState) -> Iterator[tuple[int, str, nn.Module]]:
    """Yield (number, prefix, module) for each module whose own parameters and buffers belong to the unit of `state`.

    `number` is the index in `state.modules()` of the sharded module that contains `module`. `prefix` is the prefix of
    names in `module`, relative to this sharded module.
    """

    def is_foreign(module: nn.Module) -> bool:
        return state_of(module) not in (None, state) or is_replicated(module)

    for number, top in enumerate(state.modules()):
        for prefix, module in modules_until(top, is_foreign):
            yield number, prefix, module


def _prefixes(top: nn.Module) -> dict[nn.Module, str]:
    return {module: f"{name}." if name else "" for name, module in top.named_modules()}


def _outermost(module: nn.Module) -> Iterator[FSDPState]:
    state = state_of(module)
    if state is not None:
        yield state
    else:
        for child in module.children():
            yield from _outermost(child)


def _unit_plan(
    state: FSDPState, name: str, prefixes: dict[nn.Module, str], optimizer: Any, outer: set[FSDPState]
) -> UnitPlan:
    unit = state.unit
    params = tuple(_params(state, prefixes, optimizer))
    return UnitPlan(
        name,
        state,
        params,
        tuple(_rows(name, params)),
        tuple(_buffers(state, prefixes)),
        dict(cast_boundaries(state.modules(), unit.params, unit.policy)),
        max((group.shards.world * group.replicas.world for group in unit.param_groups), default=1),
        any(group.replicas.world > 1 for group in unit.param_groups),
        state in outer,
    )


def _params(state: FSDPState, prefixes: dict[nn.Module, str], optimizer: Any) -> Iterator[ParamPlan]:
    inside = {module: prefix for _, prefix, module in owned_modules(state)}
    for group in state.unit.param_groups:
        for index, param in enumerate(group.params):
            locations = [(location.module(), location.name) for location in param.locations]
            known = [(prefixes.get(module, "") + name) for module, name in locations if module is not None]
            aliases = tuple(inside.get(module, "") + name for module, name in locations if module is not None)
            parameter = _sharded_parameter(param)
            yield ParamPlan(
                param,
                known[0] if known else param.name,
                aliases,
                parameter,
                dtypes_for(parameter.dtype, param.policy),
                index in group.sharded.extended,
                state_dtypes(optimizer, parameter),
            )


def _sharded_parameter(param: ManagedParam) -> Any:
    # The module holds another parameter while the unit is unsharded.
    registered = param.locations[0].parameters.get(param.locations[0].name)
    unsharded = registered is param.unsharded or registered is param.sliced
    return registered if isinstance(registered, nn.Parameter) and not unsharded else param.sharded


def _rows(unit: str, params: tuple[ParamPlan, ...]) -> Iterator[Row]:
    equal: dict[Any, list[ParamPlan]] = {}
    for each in params:
        equal.setdefault((each.dtypes, each.extended, each.trainable, each.state), []).append(each)
    for (dtypes, extended, trainable, state), group in equal.items():
        updated = trainable and dtypes.original.is_floating_point
        yield Row(
            unit=unit,
            names=tuple(each.name for each in group),
            elements=sum(each.parameter.numel() for each in group),
            trainable=trainable,
            stored=dtypes.original,
            gathered=None if extended else dtypes.compute,
            computed=dtypes.compute,
            wire=dtypes.wire if updated else None,
            reduced=dtypes.reduce if updated else None,
            kept=dtypes.kept if updated else None,
            grad=dtypes.gradient if updated else None,
            updated=dtypes.original if updated else None,
            state=(state if state is not None else (dtypes.original,)) if updated else (),
            state_exists=state is not None,
        )


def _buffers(state: FSDPState, prefixes: dict[nn.Module, str]) -> Iterator[BufferPlan]:
    policy = state.unit.policy
    for number, prefix, module in owned_modules(state):
        for name, buffer in own_buffers(module).items():
            if buffer is None or not (buffer.is_floating_point() or buffer.is_complex()):
                continue
            alias = prefix + name
            cast = buffer.is_floating_point() and state.buffers is not None and state.buffers.covers(module, name)
            seen = policy.buffer_dtype if cast and policy.buffer_dtype is not None else buffer.dtype
            was = state.buffer_dtypes.get((number, alias))
            yield BufferPlan(prefixes.get(module, "") + name, alias, module, was, buffer.dtype, seen)


def _unmanaged(model: nn.Module, units: tuple[UnitPlan, ...]) -> Iterator[tuple[str, Any]]:
    params = [each.param for unit in units for each in unit.params]
    locations = {(id(location.parameters), location.name) for param in params for location in param.locations}
    known = {id(each) for param in params for each in (param.sharded, param.unsharded, param.sliced)}
    replicated = {inner for module in model.modules() if is_replicated(module) for inner in module.modules()}
    seen: set[int] = set()
    for module, prefix in _prefixes(model).items():
        for name, parameter in own_parameters(module).items():
            if parameter is None or not parameter.requires_grad or module in replicated:
                continue
            if (id(own_parameters(module)), name) not in locations and id(parameter) not in known | seen:
                seen.add(id(parameter))
                yield prefix + name, parameter


# -- optimizer state ----------------------------------------------------------------------------------------------


def state_tensors(optimizer: Any, parameter: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, tensor) for floating-point state with one value per parameter element. Skip step counters."""
    for name, value in optimizer.state.get(parameter, {}).items():
        per_element = isinstance(value, torch.Tensor) and (value.ndim or not parameter.ndim) and name != "step"
        if per_element and value.is_floating_point():
            yield name, value


def state_dtypes(optimizer: Any, parameter: Any) -> tuple[torch.dtype, ...] | None:
    """Return the dtypes of the optimizer's state for a parameter, or None if there is no state yet."""
    if optimizer is None or not optimizer.state.get(parameter):
        return None
    found = {value.dtype for _, value in state_tensors(optimizer, parameter)}
    return tuple(sorted(found, key=str))
