"""What this rank holds of a model: parameters and persistent buffers by name, without gathering anything."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from ..engine.api import (
    FlatShardedParams,
    FSDPState,
    ManagedParam,
    ParamGroup,
    Phase,
    is_packed,
    set_quant_state,
    state_of,
)
from ..errors import CheckpointError
from ..layout.flat import FlatSharding
from ..names import ALL_PREFIXES, behind_data_parallel, clean_tensor_name
from ..torch_private import (
    as_plain,
    changes_own_state,
    load_own_state,
    local_part,
    non_persistent_buffers,
    own_buffers,
    own_parameters,
    own_state,
)
from .boxes import Part, part_of_dtensor, part_of_param, whole

EXTRA = "_extra_state"
"""The last part of the name that torch gives to the extra state of a module."""


@dataclass
class HeldTensor:
    """What this rank holds of a tensor of the checkpoint."""

    name: str
    part: Part
    dtype: torch.dtype
    """In the checkpoint; the local tensor is cast if it has another one."""
    local: torch.Tensor
    plain: bool
    """Not sharded: every rank has a tensor of its own, and that of the lowest rank counts."""
    added: bool = False
    """A module adds it to its state dict, and is given what was loaded."""
    packed: bool = False
    """Its elements are not numbers, whatever the dtype says."""

    def expect(self, shape: tuple[int, ...]) -> None:
        """To be called before anything is loaded. What modules add may have another shape than now."""
        if self.added:
            self.part, self.local = whole(shape), torch.empty(shape, dtype=self.dtype)

    def views(self) -> list[torch.Tensor]:
        return self.part.views(self.local)


@dataclass(frozen=True)
class OptimizedParam:
    """A parameter of the model inside a parameter that an optimizer has: all of that, or a part of a flat one."""

    name: str
    part: Part
    plain: bool = False
    """Not sharded."""
    start: int | None = None
    count: int = 0
    """Its elements on this rank, in a flat parameter."""

    def local_of(self, value: torch.Tensor) -> torch.Tensor:
        """Of a state that is sharded as the optimizer's parameter is, what belongs to this one."""
        local = local_part(value)
        return local if self.start is None else local[self.start : self.start + self.count]


@dataclass
class ModelState:
    tensors: list[HeldTensor] = field(default_factory=list)
    aliases: dict[str, str] = field(default_factory=dict)
    """Further names of tied parameters and shared buffers, and the name that they are stored under."""
    optimized: dict[int, list[OptimizedParam]] = field(default_factory=dict)
    """By the id of the parameter that an optimizer would have."""
    extra: dict[str, nn.Module] = field(default_factory=dict)
    """The modules that have extra state, by name."""
    states: list[FSDPState] = field(default_factory=list)
    added: dict[tuple[str, nn.Module], dict[str, HeldTensor]] = field(default_factory=dict)
    """What modules add to their state dicts, by their paths, and by the names that they give."""

    def finish_loading(self, loaded: Iterable[HeldTensor]) -> None:
        """To be called after the tensors were written."""
        for state in self.states:
            state.unit.rebind_params()
        names = {each.name for each in loaded}
        for (path, module), added in self.added.items():
            values = {name: held.local for name, held in added.items() if held.name in names}
            if values:
                set_added_state(path, module, values)


@torch.no_grad()
def model_state(model: nn.Module) -> ModelState:
    """The model is resharded for that: modules then have the sharded parameters."""
    found, model = ModelState(), behind_data_parallel(model)
    for module in model.modules():
        state = state_of(module)
        if state is not None and state not in found.states:
            _bring_to_rest(state, module)
            found.states.append(state)
    paths = _paths(model)
    managed: set[int] = set()
    for group, param in _managed_params(found.states):
        managed |= {id(param.sharded), id(param.unsharded)}
        _add_managed(found, group, param, paths)
        if isinstance(group.sharded, FlatShardedParams):
            managed.add(id(group.sharded.flat.sharded))
    _add_others(found, model, managed)
    _add_added(found, model, paths)
    return found


def _bring_to_rest(state: FSDPState, module: nn.Module) -> None:
    state.before_listing()
    if state.unit.phase is not Phase.IDLE or state.in_summon_full_params:
        raise CheckpointError(
            f"{state.unit} is computing, or is inside summon_full_params. Save and load checkpoints between steps."
        )
    state.pre_state_dict(module)


def _paths(model: nn.Module) -> dict[int, list[str]]:
    """The prefixes of the names of what a module has itself, by the module's id."""
    found: dict[int, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        prefix = clean_tensor_name(f"{name}." if name else "", ALL_PREFIXES)
        if prefix not in found.setdefault(id(module), []):
            found[id(module)].append(prefix)
    return found


def _managed_params(states: list[FSDPState]) -> Iterator[tuple[ParamGroup, ManagedParam]]:
    units = dict.fromkeys(unit for state in states for unit in (state.unit, *state.unit.borrows_from))
    for group in dict.fromkeys(group for unit in units for group in unit.param_groups):
        for param in group.params:
            yield group, param


def _add_managed(found: ModelState, group: ParamGroup, param: ManagedParam, paths: dict[int, list[str]]) -> None:
    places = [(location.module(), location.name) for location in param.locations]
    names = [prefix + name for module, name in places for prefix in paths.get(id(module), ())]
    if not names:
        return  # of a unit outside this model
    name = _add_aliases(found, names)
    rank, sharded, sharding = group.shards.rank, param.sharded, param.sharding
    flat = group.sharded.flat if isinstance(group.sharded, FlatShardedParams) and not group.sharded.originals else None
    part = part_of_param(name, param, rank, in_a_row=flat is not None or sharding.world > 1)
    local, optimized = as_plain(local_part(sharded)), OptimizedParam(name, part)
    if flat is not None:
        assert isinstance(sharding, FlatSharding)
        first, count = sharding.elements(rank)
        start = sharding.begin + first - rank * sharding.shard_numel if count else 0
        sharded, optimized = flat.sharded, OptimizedParam(name, part, False, start, count)
        local = optimized.local_of(flat.local)
    _refuse_subclass(name, local)
    found.optimized.setdefault(id(sharded), []).append(optimized)
    found.tensors.append(HeldTensor(f"model/{name}", part, local.dtype, local, plain=False, packed=param.packed))


def _add_aliases(found: ModelState, names: list[str]) -> str:
    """Returns the name to store a tensor under: the same one in whichever order units have tied a parameter."""
    first, *others = sorted(set(names))
    found.aliases.update({f"model/{other}": f"model/{first}" for other in others})
    return first


def _add_others(found: ModelState, model: nn.Module, managed: set[int]) -> None:
    """Parameters that no unit has, persistent buffers and extra state."""
    named: dict[int, tuple[torch.Tensor, list[str], bool]] = {}
    dtypes: dict[int, torch.dtype] = {}
    for state in found.states:
        dtypes.update(state.original_buffer_dtypes())
    for path, module in model.named_modules(remove_duplicate=False):
        prefix = clean_tensor_name(f"{path}." if path else "", ALL_PREFIXES)
        skipped = non_persistent_buffers(module)
        for tensors, is_parameter in ((own_parameters(module), True), (own_buffers(module), False)):
            for name, tensor in tensors.items():
                if tensor is not None and id(tensor) not in managed and (is_parameter or name not in skipped):
                    named.setdefault(id(tensor), (tensor, [], is_parameter))[1].append(prefix + name)
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            found.extra[prefix.rstrip(".")] = module
    for key, (tensor, names, is_parameter) in named.items():
        name = _add_aliases(found, names)
        is_dtensor = isinstance(tensor, DTensor)
        part = part_of_dtensor(name, tensor) if isinstance(tensor, DTensor) else whole(tensor.shape)
        local = as_plain(local_part(tensor))
        _refuse_subclass(name, local)
        if is_parameter:
            found.optimized[key] = [OptimizedParam(name, part, not is_dtensor)]
        dtype = dtypes.get(key, tensor.dtype)
        held = HeldTensor(f"model/{name}", part, dtype, local.detach(), not is_dtensor, packed=is_packed(tensor))
        found.tensors.append(held)


def _add_added(found: ModelState, model: nn.Module, paths: dict[int, list[str]]) -> None:
    """What modules add to their state dicts themselves."""
    for module in model.modules():
        prefixes = paths[id(module)]
        for name, value in added_state(prefixes[0].rstrip("."), module).items():
            full_name = _add_aliases(found, [prefix + name for prefix in prefixes])
            held = HeldTensor(f"model/{full_name}", whole(value.shape), value.dtype, value.detach(), True, added=True)
            found.added.setdefault((prefixes[0].rstrip("."), module), {})[name] = held
            found.tensors.append(held)


def non_persistent_names(model: nn.Module) -> list[str]:
    return sorted(
        clean_tensor_name(f"{path}.{name}" if path else name, ALL_PREFIXES)
        for path, module in model.named_modules()
        for name in own_buffers(module)
        if name in non_persistent_buffers(module)
    )


def _refuse_subclass(name: str, local: Any) -> None:
    if local.is_meta:
        raise CheckpointError(
            f"{name!r} is on the meta device and has no values. Give it memory first: model.to_empty(device=...)."
        )
    if type(local) not in (torch.Tensor, nn.Parameter, nn.Buffer) or local.layout is not torch.strided:
        raise CheckpointError(
            f"{name!r} is a {type(local).__name__} of layout {local.layout} on this rank. A checkpoint holds plain "
            "dense tensors. Save models with tensor subclasses with torch.distributed.checkpoint."
        )


# -- what modules add to their state dicts: scales of quantised weights --------------------------------------


def added_state(path: str, module: nn.Module) -> dict[str, torch.Tensor]:
    """What a module adds by its methods and hooks for state dicts, by the names that it gives."""
    if not changes_own_state(module):
        return {}
    try:
        found = own_state(module)
    except Exception as error:
        raise CheckpointError(f"{_named(path, module)} has no state dict: {type(error).__name__}: {error}") from error
    known = {*own_parameters(module), *own_buffers(module), EXTRA}
    added = {name: value for name, value in found.items() if name not in known and value is not None}
    for name, value in added.items():
        if type(value) not in (torch.Tensor, nn.Parameter, nn.Buffer) or value.layout is not torch.strided:
            raise CheckpointError(
                f"{_named(path, module)} adds {name!r} to its state dict, a {type(value).__name__}. A checkpoint holds "
                "dense tensors. Return other values in get_extra_state, and take them in set_extra_state."
            )
    return added


def _named(path: str, module: nn.Module) -> str:
    return f"{path or 'The model'!r}, a {type(module).__name__},"


@torch.no_grad()
def set_added_state(path: str, module: nn.Module, values: dict[str, torch.Tensor]) -> None:
    """Load what was saved of `added_state`. What the module saves afterwards tells whether it took the values."""
    for load in (_set_quant_states, _copy_in_place, load_own_state):
        if _has(path, module, values):
            return
        load(module, dict(values))
    if not _has(path, module, values):
        raise CheckpointError(
            f"{_named(path, module)} adds {', '.join(map(repr, values))} to its state dict and does not take them from "
            "one. Its tensors are loaded. Give it a method _load_from_state_dict, or get_extra_state and "
            "set_extra_state."
        )


def _has(path: str, module: nn.Module, values: dict[str, torch.Tensor]) -> bool:
    now = added_state(path, module)
    return all(name in now and _same(now[name], value) for name, value in values.items())


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    one, other = (each.cpu().contiguous().reshape(-1).view(torch.uint8) for each in (one, other))
    return torch.equal(one, other)


def _set_quant_states(module: nn.Module, values: dict[str, Any]) -> None:
    heads = {name.partition(".")[0] for name in values if "." in name}
    for head in heads:
        parameter = getattr(module, head, None)
        if is_packed(parameter):
            entries = {name.removeprefix(f"{head}."): values[name] for name in values if name.startswith(f"{head}.")}
            set_quant_state(parameter, entries, head)


def _copy_in_place(module: nn.Module, values: dict[str, Any]) -> None:
    """Into what the module has put into its state dict: nearly always its own memory."""
    for name, target in own_state(module).items():
        if name in values and target.shape == values[name].shape:
            target.copy_(values[name])
