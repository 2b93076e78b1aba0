"""Finds the state of a model and its optimizer that this rank holds, by name and without gathering any tensor."""

from __future__ import annotations

from collections.abc import Container, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from ..engine.api import (
    FlatShardedParams,
    FSDPState,
    ManagedParam,
    ParamGroup,
    Phase,
    built_too_early,
    is_packed,
    replaced_by_shards,
    set_quant_state,
    state_of,
    unsharded_name,
)
from ..errors import ArgumentError, CheckpointError, UnshardError
from ..layout.shardings import FlatSharding
from ..names import ALL_PREFIXES, behind_data_parallel, clean_tensor_name, optimizer_parameters
from ..torch_private import (
    as_plain,
    changes_own_state,
    load_own_state,
    local_part,
    non_persistent_buffers,
    own_buffers,
    own_parameters,
    own_state,
    spec_of,
)
from .boxes import BoxMap, box_map_of_dtensor, box_map_of_param, full_box, whole

EXTRA = "_extra_state"
"""PyTorch's name for the extra state of a module in a state dict."""


@dataclass
class HeldTensor:
    """The boxes of one tensor that this rank holds, and the local tensor that contains them."""

    name: str
    box_map: BoxMap
    dtype: torch.dtype
    """The dtype in the checkpoint. A local tensor with a different dtype is cast."""
    local: torch.Tensor
    plain: bool
    """True if the tensor is not sharded. Every rank has its own copy, and the lowest rank's copy is saved."""
    added: bool = False
    """True if methods or hooks of a module add the tensor to its state dict. The module itself loads the tensor."""
    packed: bool = False
    """True if the tensor contains packed quantized values, whatever its dtype is."""

    def expect(self, shape: tuple[int, ...]) -> None:
        """Prepare to load a tensor of shape `shape`. If `added` is True, the shape may differ from the current one."""
        if self.added:
            self.box_map, self.local = whole(shape), torch.empty(shape, dtype=self.dtype)

    def views(self) -> list[torch.Tensor]:
        return self.box_map.views(self.local)


@dataclass(frozen=True)
class OptimizedParam:
    """Locates a model parameter in the parameter that an optimizer has: the same one, or a flat parameter."""

    name: str
    box_map: BoxMap
    plain: bool = False
    """True if the parameter is not sharded."""
    start: int | None = None
    count: int = 0
    """In this rank's shard of a flat parameter, this parameter has `count` elements from index `start` on."""

    def local_of(self, value: torch.Tensor) -> torch.Tensor:
        """Return this rank's elements of `value`, which is optimizer state sharded like the optimizer's parameter."""
        local = local_part(value)
        return local if self.start is None else local[self.start : self.start + self.count]

    def fill(self, value: torch.Tensor, full: torch.Tensor) -> None:
        """Copy this rank's elements of `full`, the unsharded state, to `value`, the optimizer's sharded state."""
        for box, view in zip(self.box_map.boxes, self.box_map.views(self.local_of(value)), strict=True):
            view.copy_(full[box.slices_in(full_box(self.box_map.shape))])


@dataclass
class ModelState:
    tensors: list[HeldTensor] = field(default_factory=list)
    aliases: dict[str, str] = field(default_factory=dict)
    """Maps the other names of tied parameters and shared buffers to the names under which they are stored."""
    optimized: dict[int, list[OptimizedParam]] = field(default_factory=dict)
    """Maps the id of each parameter that an optimizer may have to the model parameters that it contains."""
    extra: dict[str, nn.Module] = field(default_factory=dict)
    states: list[FSDPState] = field(default_factory=list)
    added: dict[tuple[str, nn.Module], dict[str, HeldTensor]] = field(default_factory=dict)
    """Tensors that modules add to their state dicts, by module and by name."""

    def finish_loading(self, loaded: Iterable[HeldTensor]) -> None:
        """Rebind parameters, and pass `loaded` tensors to the modules that add them. Call this after loading."""
        for state in self.states:
            state.unit.rebind_params()
        names = {each.name for each in loaded}
        for (path, module), added in self.added.items():
            values = {name: held.local for name, held in added.items() if held.name in names}
            if values:
                set_added_state(path, module, values)


@torch.no_grad()
def model_state(model: nn.Module) -> ModelState:
    """Reshard all units of `model`, and return the part of the model's state that this rank holds."""
    found, model = ModelState(), behind_data_parallel(model)
    for module in model.modules():
        state = state_of(module)
        if state is not None and state not in found.states:
            state.before_listing()
            if state.unit.phase is not Phase.IDLE or state.in_summon_full_params:
                raise CheckpointError(
                    f"{state.unit} is computing, or inside summon_full_params. Save and load checkpoints between steps."
                )
            state.pre_state_dict(module)
            found.states.append(state)
    paths = _paths(model)
    managed: set[int] = set()
    units = dict.fromkeys(unit for state in found.states for unit in (state.unit, *state.unit.borrows_from))
    for group in dict.fromkeys(group for unit in units for group in unit.param_groups):
        for param in group.params:
            managed |= {id(param.sharded), id(param.unsharded)}
            _add_managed(found, group, param, paths)
        if isinstance(group.sharded, FlatShardedParams):
            managed.add(id(group.sharded.flat.sharded))
    _add_others(found, model, managed)
    _add_added(found, model, paths)
    return found


def _paths(model: nn.Module) -> dict[int, list[str]]:
    """Map the id of each module to the name prefixes of its own parameters and buffers."""
    found: dict[int, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        prefix = clean_tensor_name(f"{name}." if name else "", ALL_PREFIXES)
        if prefix not in found.setdefault(id(module), []):
            found[id(module)].append(prefix)
    return found


def _add_managed(found: ModelState, group: ParamGroup, param: ManagedParam, paths: dict[int, list[str]]) -> None:
    places = [(location.module(), location.name) for location in param.locations]
    names = [prefix + name for module, name in places for prefix in paths.get(id(module), ())]
    if not names:
        return  # the unit is outside this model
    name = _add_aliases(found, names)
    sharded, optimized = optimized_param(name, group, param)
    local = as_plain(local_part(sharded))
    if optimized.start is not None and isinstance(group.sharded, FlatShardedParams):
        local = optimized.local_of(group.sharded.flat.local)
    _refuse_subclass(name, local)
    found.optimized.setdefault(id(sharded), []).append(optimized)
    found.tensors.append(
        HeldTensor(f"model/{name}", optimized.box_map, local.dtype, local, plain=False, packed=param.packed)
    )


def optimized_param(name: str, group: ParamGroup, param: ManagedParam) -> tuple[nn.Parameter, OptimizedParam]:
    """Return the parameter that an optimizer would have for `param`, and the location of `param` in it."""
    rank, sharding = group.shards.rank, param.sharding
    flat = group.sharded.flat if isinstance(group.sharded, FlatShardedParams) and not group.sharded.originals else None
    box_map = box_map_of_param(name, param, rank, in_a_row=flat is not None or sharding.world > 1)
    if flat is None:
        return param.sharded, OptimizedParam(name, box_map)
    assert isinstance(sharding, FlatSharding)
    first, count = sharding.elements(rank)
    start = sharding.begin + first - rank * sharding.shard_numel if count else 0
    return flat.sharded, OptimizedParam(name, box_map, False, start, count)


def _add_aliases(found: ModelState, names: list[str]) -> str:
    """Return the alphabetically first of `names`, and add the others to `found.aliases` as aliases of it."""
    first, *others = sorted(set(names))
    found.aliases.update({f"model/{other}": f"model/{first}" for other in others})
    return first


def _add_others(found: ModelState, model: nn.Module, managed: set[int]) -> None:
    """Add parameters outside units, persistent buffers and extra state."""
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
        plain = not isinstance(tensor, DTensor)
        box_map = box_map_of_dtensor(name, tensor) if isinstance(tensor, DTensor) else whole(tensor.shape)
        local = as_plain(local_part(tensor))
        _refuse_subclass(name, local)
        if is_parameter:
            found.optimized[key] = [OptimizedParam(name, box_map, plain)]
        dtype = dtypes.get(key, tensor.dtype)
        held = HeldTensor(f"model/{name}", box_map, dtype, local.detach(), plain, packed=is_packed(tensor))
        found.tensors.append(held)


def _add_added(found: ModelState, model: nn.Module, paths: dict[int, list[str]]) -> None:
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
    if not _is_dense(local):
        raise CheckpointError(
            f"{name!r} is a {type(local).__name__} of layout {local.layout} on this rank. A checkpoint holds plain "
            "dense tensors. Save models with tensor subclasses with torch.distributed.checkpoint."
        )


def _is_dense(value: Any) -> bool:
    return type(value) in (torch.Tensor, nn.Parameter, nn.Buffer) and value.layout is torch.strided


# -- tensors that modules add to their state dicts, such as scales of quantized weights -----------------------


def added_state(path: str, module: nn.Module) -> dict[str, torch.Tensor]:
    """Return the tensors that a module's methods and hooks add to its state dict, by name."""
    if not changes_own_state(module):
        return {}
    try:
        found = own_state(module)
    except Exception as error:
        raise CheckpointError(
            f"{_named(path, module)} failed to return its state dict: {type(error).__name__}: {error}"
        ) from error
    known = {*own_parameters(module), *own_buffers(module), EXTRA}
    added = {name: value for name, value in found.items() if name not in known and value is not None}
    for name, value in added.items():
        if not _is_dense(value):
            raise CheckpointError(
                f"{_named(path, module)} adds {name!r} to its state dict, a {type(value).__name__}. A checkpoint holds "
                "only dense tensors. Return other values from get_extra_state, and load them in set_extra_state."
            )
    return added


def _named(path: str, module: nn.Module) -> str:
    return f"{path or 'The model'!r}, a {type(module).__name__},"


@torch.no_grad()
def set_added_state(path: str, module: nn.Module, values: dict[str, torch.Tensor]) -> None:
    """Load `values`, which `added_state` once returned. Raise if `added_state` does not return them afterwards."""
    for load in (_set_quant_states, _copy_in_place, load_own_state):
        if _has(path, module, values):
            return
        load(module, dict(values))
    if not _has(path, module, values):
        raise CheckpointError(
            f"{_named(path, module)} adds {', '.join(map(repr, values))} to its state dict and does not load them from "
            "one. Its other tensors are loaded. Give it a method _load_from_state_dict, or get_extra_state and "
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
    for head in {name.partition(".")[0] for name in values if "." in name}:
        parameter = getattr(module, head, None)
        if is_packed(parameter):
            entries = {name.removeprefix(f"{head}."): values[name] for name in values if name.startswith(f"{head}.")}
            set_quant_state(parameter, entries, head)


def _copy_in_place(module: nn.Module, values: dict[str, Any]) -> None:
    for name, target in own_state(module).items():  # nearly always shares the module's memory
        if name in values and target.shape == values[name].shape:
            target.copy_(values[name])


# -- the optimizer


def check_model(model: object) -> None:
    if not isinstance(model, nn.Module):
        raise ArgumentError(f"model must be a torch.nn.Module, got a {type(model).__name__}.")


def check_model_and_optimizer(model: object, optimizer: object) -> None:
    check_model(model)
    if optimizer is not None and not isinstance(optimizer, Optimizer):
        raise ArgumentError(f"optimizer must be one torch.optim.Optimizer or None, got a {type(optimizer).__name__}.")


def refuse_unknown_parameters(optimizer: Any, known: Container[int], error: type[UnshardError]) -> None:
    """Raise if the optimizer has parameters that are not in `known`, because their state would be lost silently."""
    unknown = [each for each in optimizer_parameters(optimizer) if id(each) not in known]
    if not unknown:
        return
    why = ""
    if replaced := list(replaced_by_shards(unknown).values()):
        why = f": it {built_too_early(replaced)}"
    elif any(unsharded_name(each) for each in unknown):
        why = ": it was built while parameters were unsharded, in forward or summon_full_params"
    raise error(
        f"{len(unknown)} of the parameters of this {type(optimizer).__name__} are not in the model{why}. Build the "
        "optimizer from model.parameters() of the sharded model, and pass that model."
    )


def params_of(optimizer: Optimizer, model: ModelState) -> list[list[tuple[Any, list[OptimizedParam]]]]:
    """Return the parameters of each optimizer group, each with the model parameters that it contains."""
    refuse_unknown_parameters(optimizer, model.optimized, CheckpointError)
    return [[(each, model.optimized[id(each)]) for each in group["params"]] for group in optimizer.param_groups]


def is_sharded(parameter: torch.Tensor, param: OptimizedParam, key: str, value: Any) -> bool:
    """Return True if `value` has one number per element of the parameter, and False if every rank holds all of `value`.

    Raise if neither is the case.
    """
    if not isinstance(value, torch.Tensor):
        return False
    if value.shape == parameter.shape and isinstance(value, DTensor) == isinstance(parameter, DTensor):
        return True
    if not isinstance(value, DTensor) and (value.ndim == 0 or param.plain):
        return False  # every rank holds all of `value`
    raise CheckpointError(
        f"The optimizer's state {key!r} of {param.name!r} is a {type(value).__name__} of shape {tuple(value.shape)}, "
        f"and the parameter has the shape {tuple(parameter.shape)}. State of sharded parameters must be numbers, or "
        "tensors with a value for each element. Save such an optimizer with torch.distributed.checkpoint."
    )


def box_map_of_state(value: torch.Tensor, parameter: torch.Tensor, param: OptimizedParam) -> BoxMap:
    """Return the boxes that this rank holds of `value`, which is sharded optimizer state."""
    if isinstance(value, DTensor) and spec_of(value).placements != spec_of(parameter).placements:
        return box_map_of_dtensor(param.name, value)
    local = local_part(value)
    if param.start is None and local.shape != local_part(parameter).shape:
        raise CheckpointError(
            f"An optimizer's state of {param.name!r} has the shape {tuple(local.shape)} on this rank, expected "
            f"{tuple(local_part(parameter).shape)}."
        )
    return param.box_map
