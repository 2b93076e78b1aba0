"""What will happen to every parameter, input, output and buffer of a sharded model, read off its units."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..engine.borders import bordered
from ..engine.faces import Slot, full_name
from ..engine.hooks import ShardState, state_of
from ..engine.precision import Dtypes, Precision, dtypes_for
from ..errors import ArgumentError
from ..policies import MixedPrecisionPolicy
from ..torch_private import is_replicated, own_buffers, own_parameters
from .state import state_dtypes
from .words import quoted


@dataclass(frozen=True)
class Member:
    """One parameter of a unit."""

    slot: Slot
    name: str
    """As in `named_parameters()` of the model."""
    aliases: tuple[str, ...]
    """All of its names as the unit's policy sees them."""
    parameter: Any
    dtypes: Dtypes
    extended: bool
    """Whether it is gathered by a protocol of its own."""
    state: tuple[torch.dtype, ...] | None
    """What the optimizer holds for it, if it holds anything yet."""

    @property
    def trainable(self) -> bool:
        return self.parameter.requires_grad

    def computed(self, precision: Precision) -> torch.dtype:
        return self.dtypes.original if precision is Precision.STORED else self.dtypes.compute


@dataclass(frozen=True)
class Row:
    """The parameters of one unit that share every dtype on their way. `None` where there is no such stage."""

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
    """Sums of gradients between backwards that do not synchronise."""
    grad: torch.dtype | None
    """`.grad`, where the gradients of backwards that do are added up."""
    updated: torch.dtype | None
    state: tuple[torch.dtype, ...]
    """What the optimizer keeps; what it will keep, as long as it has not stepped."""
    state_exists: bool

    @property
    def parameters(self) -> int:
        return len(self.names)

    @property
    def looks(self) -> tuple[Any, ...]:
        """What the table shows of it, apart from the unit."""
        fields = self.__dict__.items()
        return (self.parameters, *(value for name, value in fields if name not in ("unit", "names")))


@dataclass(frozen=True)
class Door:
    """Casts at the door of a unit, or of modules inside it that have a precision of their own."""

    modules: tuple[str, ...]
    """Relative to the unit; empty for the unit itself."""
    inputs: torch.dtype | None
    outputs: torch.dtype | None
    in_eval: bool
    """Whether it casts in `eval()` mode, too."""


@dataclass(frozen=True)
class BufferPlan:
    name: str
    alias: str
    """Its name as the unit's policy sees it."""
    module: nn.Module
    was: torch.dtype | None
    """What it was stored in when it was sharded."""
    stored: torch.dtype
    seen: torch.dtype


@dataclass(frozen=True)
class UnitPlan:
    name: str
    state: ShardState
    members: tuple[Member, ...]
    rows: tuple[Row, ...]
    doors: tuple[Door, ...]
    buffers: tuple[BufferPlan, ...]
    borders: dict[nn.Module, MixedPrecisionPolicy]
    ranks: int
    """Over how many gradients are added up."""
    replicated: bool
    """Whether they are added up over replicas, too."""
    outermost: bool

    @property
    def policy(self) -> MixedPrecisionPolicy:
        return self.state.unit.policy


@dataclass(frozen=True)
class ModelPlan:
    units: tuple[UnitPlan, ...]
    loose: tuple[tuple[str, Any], ...]
    """Trainable parameters that no unit has."""
    own: frozenset[int]
    """The identities of all parameters of the model as an optimizer should have them."""

    @property
    def rows(self) -> list[Row]:
        return [row for unit in self.units for row in unit.rows]


def plan_of(model: nn.Module, optimizer: Any = None) -> ModelPlan:
    """The plan of every unit in `model`. Reads only what is there: no step, no memory, no collective."""
    if not isinstance(model, nn.Module):
        raise ArgumentError(f"Expected a sharded model, got {type(model).__name__}.")
    if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
        raise ArgumentError(
            f"Expected one torch.optim.Optimizer, got {type(optimizer).__name__}. For several optimizers ask once for "
            "each."
        )
    paths: dict[ShardState, list[str]] = {}
    for name, module in model.named_modules():
        if state := state_of(module):
            paths.setdefault(state, []).append(name)
    if not paths:
        raise ArgumentError(
            f"{type(model).__name__} contains no module that fully_shard was applied to, so there is no precision of "
            "units to report. Shard it first: fully_shard(model, mp_policy=...)."
        )
    prefixes = _prefixes(model)
    outer = set(_outermost(model))
    units = tuple(_unit_plan(state, ", ".join(names), prefixes, optimizer, outer) for state, names in paths.items())
    own = {id(each.parameter) for unit in units for each in unit.members}
    own |= {id(each) for each in model.parameters() if full_name(each) is None}
    return ModelPlan(units, tuple(_loose(model, units)), frozenset(own))


def owned_modules(state: ShardState) -> Iterator[tuple[int, str, nn.Module]]:
    """The modules whose parameters and buffers belong to a unit: number of its top, prefix of names, module."""
    for number, top in enumerate(state.modules()):
        prefixes = _prefixes(top)
        for module in _below(top, state):
            yield number, prefixes[module], module


def _below(module: nn.Module, state: ShardState) -> Iterator[nn.Module]:
    if state_of(module) in (None, state) and not is_replicated(module):
        yield module
        for child in module.children():
            yield from _below(child, state)


def _prefixes(top: nn.Module) -> dict[nn.Module, str]:
    return {module: f"{name}." if name else "" for name, module in top.named_modules()}


def _outermost(module: nn.Module) -> Iterator[ShardState]:
    state = state_of(module)
    if state is not None:
        yield state
    else:
        for child in module.children():
            yield from _outermost(child)


def _unit_plan(
    state: ShardState, name: str, prefixes: dict[nn.Module, str], optimizer: Any, outer: set[ShardState]
) -> UnitPlan:
    unit, tops = state.unit, state.modules()
    members = tuple(_members(state, prefixes, optimizer))
    borders = dict(bordered(tops, unit.slots, unit.policy))
    return UnitPlan(
        name,
        state,
        members,
        tuple(_rows(name, members)),
        tuple(_doors(state, borders)),
        tuple(_buffers(state, prefixes)),
        borders,
        max((part.shards.world * part.replicas.world for part in unit.parts), default=1),
        any(part.replicas.world > 1 for part in unit.parts),
        state in outer,
    )


def _members(state: ShardState, prefixes: dict[nn.Module, str], optimizer: Any) -> Iterator[Member]:
    inside = {module: prefix for _, prefix, module in owned_modules(state)}
    for part in state.unit.parts:
        for index, slot in enumerate(part.slots):
            homes = [(home.module(), home.name) for home in slot.homes]
            known = [(prefixes.get(module, "") + name) for module, name in homes if module is not None]
            aliases = tuple(inside.get(module, "") + name for module, name in homes if module is not None)
            parameter = _at_rest(slot)
            yield Member(
                slot,
                known[0] if known else slot.name,
                aliases,
                parameter,
                dtypes_for(parameter.dtype, slot.policy),
                index in part.sharded.extended,
                state_dtypes(optimizer, parameter),
            )


def _at_rest(slot: Slot) -> Any:
    """The sharded parameter: the one that is registered, unless that is a gathered one or none."""
    registered = slot.homes[0].parameters.get(slot.homes[0].name)
    gathered = registered is slot.full or registered is slot.sliced
    return registered if isinstance(registered, nn.Parameter) and not gathered else slot.sharded


def _rows(unit: str, members: tuple[Member, ...]) -> Iterator[Row]:
    alike: dict[Any, list[Member]] = {}
    for each in members:
        alike.setdefault((each.dtypes, each.extended, each.trainable, each.state), []).append(each)
    for (dtypes, extended, trainable, state), group in alike.items():
        learns = trainable and dtypes.original.is_floating_point
        yield Row(
            unit=unit,
            names=tuple(each.name for each in group),
            elements=sum(each.parameter.numel() for each in group),
            trainable=trainable,
            stored=dtypes.original,
            gathered=None if extended else dtypes.compute,
            computed=dtypes.compute,
            wire=dtypes.wire if learns else None,
            reduced=dtypes.reduce if learns else None,
            kept=dtypes.reduce if learns else None,
            grad=dtypes.original if learns else None,
            updated=dtypes.original if learns else None,
            state=(state if state is not None else (dtypes.original,)) if learns else (),
            state_exists=state is not None,
        )


def _doors(state: ShardState, borders: dict[nn.Module, MixedPrecisionPolicy]) -> Iterator[Door]:
    unit, policy = state.unit, state.unit.policy
    inputs = policy.param_dtype if state.casts_inputs else None
    yield Door((), inputs, policy.output_dtype, not policy.full_precision_in_eval)
    inside = {module: prefix.removesuffix(".") for _, prefix, module in owned_modules(state)}
    alike: dict[MixedPrecisionPolicy, list[str]] = {}
    for module, own in borders.items():
        alike.setdefault(own, []).append(inside.get(module, type(module).__name__))
    for own, names in alike.items():
        inputs = own.param_dtype if own.cast_forward_inputs else None
        yield Door(tuple(names), inputs, own.output_dtype, not unit.policy.full_precision_in_eval)


def _buffers(state: ShardState, prefixes: dict[nn.Module, str]) -> Iterator[BufferPlan]:
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


def _loose(model: nn.Module, units: tuple[UnitPlan, ...]) -> Iterator[tuple[str, Any]]:
    slots = [member.slot for unit in units for member in unit.members]
    homes = {(id(home.parameters), home.name) for slot in slots for home in slot.homes}
    faces = {id(face) for slot in slots for face in (slot.sharded, slot.full, slot.sliced) if face is not None}
    replicated = {inner for module in model.modules() if is_replicated(module) for inner in module.modules()}
    seen: set[int] = set()
    for prefix, module in ((prefix, module) for module, prefix in _prefixes(model).items()):
        for name, parameter in own_parameters(module).items():
            if parameter is None or not parameter.requires_grad or module in replicated:
                continue
            if (id(own_parameters(module)), name) not in homes and id(parameter) not in faces | seen:
                seen.add(id(parameter))
                yield prefix + name, parameter


def listed(units: list[UnitPlan]) -> str:
    """Units by name, for a sentence."""
    names = [unit.name or "(root)" for unit in units]
    return ("unit " if len(set(names)) == 1 else "units ") + quoted(names)
