"""Optimizer state of a wrapped model by the names of the original parameters: saving and loading."""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ..comm.order.waiting import SharedCall
from ..errors import ArgumentError, StateError, listed
from ..names import clean_tensor_name, optimizer_parameters
from ..state.model import OptimizedParam
from ..state.optimizer import refuse_unknown_parameters
from ..torch_private import as_dtensor, step_without_hooks
from .api import StateDictSettings, StateDictType
from .groups import tensor_parallel_groups
from .optim_params import UnitParams, names_of, units_of
from .sharded_tensors import all_gathered, full_tensor, full_value, shard_tensor, tp_local
from .state_dict import get_state_dict_type

StateDict = dict[str, Any]


@torch.no_grad()
def optim_state_dict(
    model: nn.Module,
    optim: torch.optim.Optimizer,
    optim_state_dict: StateDict | None = None,
    group: Any = None,
    settings: StateDictSettings | None = None,
    for_loading: bool = False,
) -> StateDict:
    """The state of `optim` (or of `optim_state_dict`, its own state dict), in the type that is set for the model.

    Collective; with `rank0_only` the other ranks get an empty dict. `for_loading` adds the state that a first step
    would create, for `torch.distributed.checkpoint.load` to fill.
    """
    settings = settings or get_state_dict_type(model)
    units, state = units_of(model), {}
    names = names_of(model, units)
    refuse_unknown_parameters(optim, names, ArgumentError)
    given = optim.state_dict() if optim_state_dict is None else optim_state_dict
    keys = _keys(optim, given, model)
    if for_loading:
        given = _with_first_states(optim, given, keys)
    for unit in units:  # also those that this optimizer does not step: another rank's may
        held = enumerate(id(parameter) for parameter, _ in unit.parameters)
        own = {number: given["state"].get(keys[key], {}) for number, key in held if key in keys}
        state.update(_unsharded_states(unit, own, settings))
    sharded = _sharded_ids(units)
    for parameter in optimizer_parameters(optim):
        own_state = given["state"].get(keys.get(id(parameter)))
        if own_state and id(parameter) not in sharded:
            (name,) = names[id(parameter)]
            state.setdefault(name, {key: _copy(value) for key, value in own_state.items()})
    if getattr(settings.optim_state_dict_config, "rank0_only", False) and dist.get_rank(group) != 0:
        return {}
    if "param_groups" not in given:
        return {"state": state}
    groups = []
    for mine, theirs in zip(optim.param_groups, given["param_groups"], strict=True):
        expanded = [name for parameter in mine["params"] for name in names[id(parameter)]]
        groups.append({**{key: value for key, value in theirs.items() if key != "params"}, "params": expanded})
    return {"state": state, "param_groups": groups}


def _keys(optim: torch.optim.Optimizer, given: StateDict, model: nn.Module) -> dict[int, Any]:
    """The key of each parameter in the optimizer's own state dict, by the parameter's id.

    The key is the parameter's number or, for optimizers that keep state by name, its name in the model.
    """
    own = optimizer_parameters(optim)
    keys = [key for group in given.get("param_groups", ()) for key in group["params"]]
    wanted = keys or list(given["state"])
    if any(isinstance(key, str) for key in wanted):
        named = dict(model.named_parameters(remove_duplicate=False))
        named.update({clean_tensor_name(name): parameter for name, parameter in named.items()})
        if named.keys() >= set(wanted):
            return {id(named[key]): key for key in wanted}
    return {id(parameter): key for parameter, key in zip(own, keys or range(len(own)), strict=True)}


def _sharded_ids(units: list[UnitParams]) -> set[int]:
    return {id(parameter) for unit in units for parameter, _ in unit.parameters}


def _unsharded_states(unit: UnitParams, own: dict[int, StateDict], settings: StateDictSettings) -> dict[str, StateDict]:
    """Unsharded states of a unit's parameters by original name, whichever ranks have them.

    `own`: this rank's states, by number among the unit's parameters in the optimizer.
    """
    numels = [parameter.numel() for parameter, _ in unit.parameters]
    mine = {n: {name: _describe(each, numels[n]) for name, each in states.items()} for n, states in own.items()}
    described = _described_by_all_ranks(unit, mine, {n for n, numel in enumerate(numels) if numel and n not in own})

    def originals(number: int) -> Iterable[int]:
        """Numbers of the original parameters inside one of the optimizer's."""
        return (number,) if unit.sharded.originals else range(len(unit.names))

    result: dict[str, StateDict] = {
        unit.names[member]: {} for number, states in described.items() if states for member in originals(number)
    }
    for name in dict.fromkeys(name for states in described.values() for name in states):
        having = [number for number, states in described.items() if name in states]
        kind, dtype = described[having[0]][name]
        unsharded = None
        if kind == "sharded":
            here = {number: own[number][name] for number in having if name in own.get(number, {})}
            unsharded = all_gathered(unit.shard(here, dtype), unit.group, unit.state.unit.device)
        for number in having:
            for member in originals(number):
                if unsharded is None:
                    result[unit.names[member]][name] = _copy(described[number][name][1])
                else:
                    of_param = as_dtensor(unit.of_param(unsharded, member), unit.sharded.params[member].tp_spec)
                    result[unit.names[member]][name] = _to_save(unit, of_param, settings)
    return result


def _describe(value: Any, numel: int) -> tuple[str, Any]:
    """Return ("sharded", dtype) for a state that is sharded like its parameter, otherwise ("same", value).

    `numel`: the parameter's elements on this rank.
    """
    if isinstance(value, torch.Tensor) and value.ndim > 0 and value.numel() == numel:
        return "sharded", value.dtype
    return "same", value.cpu() if isinstance(value, torch.Tensor) else value


def _copy(value: Any) -> Any:
    """Copy tensors: optimizers count steps in place, so parameters must not share a counter."""
    return value.clone() if isinstance(value, torch.Tensor) else value


def _described_by_all_ranks(
    unit: UnitParams, mine: dict[int, dict[str, Any]], absent: set[int]
) -> dict[int, dict[str, Any]]:
    """Descriptions of each parameter's state from all ranks that have any.

    A rank without elements of a parameter has no state of it, or state that was loaded and that no step has updated.
    `absent`: parameters with elements on this rank that its optimizer does not have.
    """
    params = unit.sharded.params
    empty = {number for number in mine if unit.sharded.originals and params[number].sharded.numel() == 0}
    everybody: list[Any] = [(mine, empty, absent)]
    if unit.group is not None and unit.group.size() > 1:
        everybody = [None] * unit.group.size()
        with SharedCall("gather optimizer state (optim_state_dict)", [unit.group], meet=True):
            dist.all_gather_object(everybody, (mine, empty, absent), group=unit.group)
    merged: dict[int, dict[str, Any]] = {}
    seen: dict[int, dict[str, Any]] = {}
    for without in (True, False):  # ranks with elements overwrite those without
        for rank, (states_of, empties, _) in enumerate(everybody):
            for number, states in states_of.items():
                if (number in empties) is without:
                    if not without:
                        _refuse_different(unit, number, seen.setdefault(number, {}), states, rank)
                        seen[number].update(states)
                    merged.setdefault(number, {}).update(states)
    for rank, (_, _, missing) in enumerate(everybody):
        if lacking := [unit.parameters[number][1][0].name for number in missing if merged.get(number)]:
            raise StateError(
                f"Rank {rank} of the group has elements of {listed(map(repr, lacking))}, but its optimizer does not "
                "have this parameter, and optimizers of other ranks have state for it. Build the optimizers of all "
                "ranks from the same parameters."
            )
    for group in tensor_parallel_groups(params):  # a parameter may have elements on only some of these ranks
        everybody = [None] * group.size()
        dist.all_gather_object(everybody, merged, group=group)
        for theirs in everybody:
            for number, states in theirs.items():
                merged[number] = {**states, **merged.get(number, {})}
    return dict(sorted(merged.items()))


def _refuse_different(unit: UnitParams, number: int, before: StateDict, states: StateDict, rank: int) -> None:
    """Refuse a state that is neither sharded like the parameter nor equal on all ranks."""
    for name, (kind, value) in states.items():
        other = before.get(name, (kind, value))
        if {kind, other[0]} == {"same"} and not (isinstance(value, torch.Tensor) and value.ndim):
            continue  # step counters, which ranks keep alike
        if kind != other[0] or (kind == "same" and not torch.equal(value, other[1])):
            raise StateError(
                f"The state {name!r} of {unit.parameters[number][1][0].name!r} has another size than the parameter, "
                f"and is not the same on all ranks: rank {rank} of the group differs. Save such state on each rank "
                "with the optimizer's own state_dict()."
            )


def _to_save(unit: UnitParams, unsharded: torch.Tensor, settings: StateDictSettings) -> Any:
    offload = settings.optim_state_dict_config.offload_to_cpu
    # For LOCAL_STATE_DICT, too: PyTorch has no local optimizer state dict, and returns a sharded one.
    if settings.state_dict_type is not StateDictType.FULL_STATE_DICT and unit.state.call.groups.traits.shards:
        return shard_tensor(unsharded, unit.state, offload)
    full = full_value(unsharded)
    return full.cpu() if offload else full


# -- loading ---------------------------------------------------------------------------------------------------------


@torch.no_grad()
def optim_state_dict_to_load(
    model: nn.Module,
    optim: torch.optim.Optimizer,
    optim_state_dict: StateDict,
    is_named_optimizer: bool = False,
    load_directly: bool = False,
    group: Any = None,
    settings: StateDictSettings | None = None,
) -> StateDict:
    """The argument for `optim.load_state_dict`, with this rank's shards. `load_directly` also loads it."""
    settings = settings or get_state_dict_type(model)
    if getattr(settings.optim_state_dict_config, "rank0_only", False):
        optim_state_dict = broadcast_states(optim_state_dict, group)
    _require_state_dict(optim, optim_state_dict)
    given, units = optim_state_dict["state"], units_of(model)
    names = names_of(model, units)
    refuse_unknown_parameters(optim, names, ArgumentError)
    _warn_about_missing(optim, names, given)
    loaded: dict[int, StateDict] = {}
    for unit in units:
        process_group, device = unit.state.call.groups.own, unit.state.unit.device
        unsharded = {
            name: {key: full_tensor(value, process_group, device) for key, value in given[name].items()}
            for name in unit.names
            if name in given
        }
        for number, (parameter, inside) in enumerate(unit.parameters):
            own = {each.name: unsharded[each.name] for each in inside if each.name in unsharded}
            if any(own.values()):
                loaded[id(parameter)] = _sharded_states(unit, number, own)
    state: dict[Any, StateDict] = {}
    sharded = _sharded_ids(units)
    current = {id(parameter): name for name, parameter in model.named_parameters()} if is_named_optimizer else None
    for number, parameter in enumerate(optimizer_parameters(optim)):
        name = names[id(parameter)][0]
        key = number if current is None else current[id(parameter)]
        if id(parameter) in loaded:
            state[key] = loaded[id(parameter)]
        elif name in given and id(parameter) not in sharded:
            state[key] = dict(given[name])
    result: StateDict = {"state": state}
    if "param_groups" in optim_state_dict:
        result["param_groups"] = _param_groups(optim, optim_state_dict["param_groups"], names, current)
        if is_named_optimizer:  # PyTorch's compare the keys with those that they would save
            for mine, theirs in zip(optim.state_dict()["param_groups"], result["param_groups"], strict=False):
                theirs.update({key: value for key, value in mine.items() if key not in theirs})
    if load_directly:
        optim.load_state_dict(result)
    return result


def _sharded_states(unit: UnitParams, number: int, own: dict[str, StateDict]) -> StateDict:
    """This rank's state of the optimizer's parameter `number`, from full states of the original ones inside it."""
    result: StateDict = {}
    param, inside = unit.sharded.params[number], unit.parameters[number][1]
    for name in dict.fromkeys(name for states in own.values() for name in states):
        values = {each: states[name] for each, states in own.items() if name in states}
        _check_states(name, values, inside)
        first = next(iter(values.values()))
        if not isinstance(first, torch.Tensor) or first.ndim == 0:
            result[name] = _copy(first)
        elif unit.sharded.originals and param.sharding.world == 1:
            result[name] = tp_local(param, first).clone()
        else:
            local = param.local if unit.sharded.originals else unit.sharded.flat.local
            result[name] = torch.zeros_like(local, dtype=first.dtype)
            for each in inside:
                each.fill(result[name], values[each.name])
    return result


def _check_states(name: str, values: dict[str, Any], inside: list[OptimizedParam]) -> None:
    """Refuse states that cannot become one: a flat parameter needs those of all its parameters, each in its shape."""
    first, one = next(iter(values.items()))
    missing = [each.name for each in inside if each.name not in values]
    if missing:
        raise ArgumentError(
            f"The optimizer state to load has {name!r} for {first!r}, but not for {', '.join(missing)}, in the "
            "same flat parameter: its state is one tensor. Add it, or wrap with use_orig_params=True."
        )
    is_single = not isinstance(one, torch.Tensor) or one.ndim == 0
    for param in inside:
        value, expected = values[param.name], param.part.shape
        if is_single and param.name != first and not _same(one, value):
            raise ArgumentError(
                f"The optimizer state to load has {name!r} = {one} for {first!r}, and {value} for {param.name!r} in "
                "the same flat parameter, which has one. Make them equal, or wrap with use_orig_params=True."
            )
        if isinstance(value, torch.Tensor) and value.ndim > 0 and tuple(value.shape) != expected:
            raise ArgumentError(
                f"The optimizer state to load has {name!r} of shape {tuple(value.shape)} for {param.name!r}, "
                f"expected {expected}, the parameter's. Is it a state dict of this model, from optim_state_dict?"
            )


def _same(one: Any, other: Any) -> bool:
    """Return True if two states without dimensions are equal, on whichever devices."""
    if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor):
        return type(one) is type(other) and bool(one == other)
    return other.ndim == 0 and one.dtype == other.dtype and one.item() == other.item()


def _require_state_dict(optim: Any, given: Any) -> None:
    if isinstance(given, torch.optim.Optimizer) or isinstance(optim, dict):
        raise ArgumentError(
            "optim_state_dict_to_load takes (model, optim, optim_state_dict): the optimizer and its state dict are the "
            "other way round."
        )
    if not isinstance(given, dict) or "state" not in given:
        found = (
            f"one with the keys {sorted(map(str, given))}" if isinstance(given, dict) else f"a {type(given).__name__}"
        )
        raise ArgumentError(f"optim_state_dict must be what optim_state_dict() returned, got {found}.")


def _param_groups(
    optim: Any, given: list[StateDict], names: dict[int, list[str]], current: dict[int, str] | None
) -> list[StateDict]:
    """The options of the given groups, with the optimizer's own numbers (or current names) of the parameters."""
    groups: list[StateDict] = []
    numbers = iter(range(len(optimizer_parameters(optim))))
    by_name = {name: each for each in given for name in each["params"]}
    for mine in optim.param_groups:
        own = [name for parameter in mine["params"] for name in names[id(parameter)]]
        source = next((by_name[name] for name in own if name in by_name), given[min(len(groups), len(given) - 1)])
        params = [next(numbers) if current is None else current[id(each)] for each in mine["params"]]
        groups.append({**{key: value for key, value in source.items() if key != "params"}, "params": params})
    return groups


def broadcast_states(optim_state_dict: StateDict | None, group: Any = None) -> StateDict:
    """Rank 0's state dict, on all ranks."""
    holder = [optim_state_dict]
    group = dist.group.WORLD if group is None else group
    with SharedCall("broadcast optimizer state", [group], meet=True):
        dist.broadcast_object_list(holder, group=group, group_src=0)
    return holder[0]  # type: ignore[return-value]


# -- the state that the first step would create ----------------------------------------------------------------------


def _first_states(optim: torch.optim.Optimizer, parameters: Iterable[nn.Parameter]) -> dict[int, StateDict]:
    """The state that the first step would create for each of these parameters, by id.

    The optimizer steps zeros of the same shapes, with gradients of zero, so neither it nor the parameters change.
    """
    zeros = {id(each): nn.Parameter(torch.zeros_like(each)) for each in parameters}
    for zero in zeros.values():
        zero.grad = torch.zeros_like(zero)
    groups, state = optim.param_groups, optim.state
    created: Any = defaultdict(dict)
    try:
        optim.state = created
        optim.param_groups = [
            {**group, "params": [zeros[id(each)] for each in group["params"] if id(each) in zeros]} for group in groups
        ]
        step_without_hooks(optim)
    finally:
        optim.param_groups, optim.state = groups, state
    return {key: created[zero] for key, zero in zeros.items() if created.get(zero)}


def _with_first_states(optim: torch.optim.Optimizer, given: StateDict, keys: dict[int, Any]) -> StateDict:
    """The optimizer's own state dict `given`, with state for all parameters that a step would create some for."""
    without = [each for each in _trainable(optim) if not given["state"].get(keys[id(each)])]
    try:
        created = _first_states(optim, without) if without else {}
    except Exception as error:
        raise StateError(
            f"{type(optim).__name__} did not create its state in a step with gradients of zero ({error}). Take a step "
            "with it before optim_state_dict, instead of for_loading=True."
        ) from error
    return {**given, "state": {**given["state"], **{keys[key]: states for key, states in created.items()}}}


def _warn_about_missing(optim: Any, names: dict[int, list[str]], given: StateDict) -> None:
    """Warn about parameters without state in `given`, the state to load, if a step would create some."""
    if not isinstance(optim, torch.optim.Optimizer):
        return
    missing = {id(each) for each in _trainable(optim) if not any(given.get(name) for name in names[id(each)])}
    without: list[str] = []
    for group in optim.param_groups:
        own = [each for each in group["params"] if id(each) in missing]
        if own and _creates_state(optim, min(own, key=torch.Tensor.numel)):
            without += [name for each in own for name in names[id(each)]]
    if without:
        warnings.warn(
            f"The optimizer state to load has no state for {len(without)} parameters of this {type(optim).__name__} "
            f"({listed(map(repr, without))}): they start without. torch.distributed.checkpoint.load fills only what "
            "is in the state dict that it is given, and an optimizer that has taken no step has no state. If the "
            "checkpoint has some, pass FullyShardedDataParallel.optim_state_dict(model, optim, for_loading=True) to "
            "load.",
            stacklevel=5,
        )


def _creates_state(optim: torch.optim.Optimizer, parameter: nn.Parameter) -> bool:
    try:
        return bool(_first_states(optim, [parameter]))
    except Exception:  # a step that needs more than gradients probably keeps state
        return True


def _trainable(optim: torch.optim.Optimizer) -> list[nn.Parameter]:
    """Parameters that a step can change on this rank; those without elements here have their state elsewhere."""
    return [each for each in optimizer_parameters(optim) if each.requires_grad and each.numel()]
