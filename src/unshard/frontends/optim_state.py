"""Optimizer state of a wrapped model, by the names and in the shapes of the unwrapped one; out and in."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ..engine.faces import full_name
from ..engine.flat import replaced_by_shards
from ..errors import ArgumentError
from .optim_fresh import warn_about_missing, with_first_states
from .optim_owned import Owned, owned_by
from .sharded_tensors import cut_rows
from .state_dict_kinds import get_state_dict_type
from .wrapper_api import StateDictSettings, StateDictType
from .wrapper_names import clean_tensor_name

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
    """The state of `optim` (or `optim_state_dict`, which is its own), of the kind that is set for the model.

    All ranks have to call; with `rank0_only` the others get an empty one. `for_loading`: parameters without state have
    that of a first step, as a place for what a checkpoint has.
    """
    settings = settings or get_state_dict_type(model)
    units, state = owned_by(model), {}
    names = names_of(model, units)
    _refuse_strangers(optim, names)
    given = optim.state_dict() if optim_state_dict is None else optim_state_dict
    if for_loading:
        given = with_first_states(optim, given)
    keys = _keys(optim, given)
    for unit in units:
        held = [(number, parameter, numbers) for number, (parameter, numbers) in enumerate(unit.parameters())]
        if any(id(parameter) in keys for _, parameter, _ in held):
            own = {n: given["state"].get(keys[id(p)], {}) for n, p, _ in held if id(p) in keys}
            state.update(_whole_states(unit, own, settings))
    for parameter in _parameters(optim):
        if len(names[id(parameter)]) == 1 and names[id(parameter)][0] not in state:
            own_state = given["state"].get(keys[id(parameter)])
            if own_state and not _is_owned(units, parameter):
                state[names[id(parameter)][0]] = dict(own_state)
    groups = []
    for mine, theirs in zip(optim.param_groups, given["param_groups"], strict=True):
        expanded = [name for parameter in mine["params"] for name in names[id(parameter)]]
        groups.append({**{key: value for key, value in theirs.items() if key != "params"}, "params": expanded})
    if getattr(settings.optim_state_dict_config, "rank0_only", False) and dist.get_rank(group) != 0:
        return {}
    return {"state": state, "param_groups": groups}


def _keys(optim: torch.optim.Optimizer, given: StateDict) -> dict[int, Any]:
    """What the optimizer's own state dict calls each parameter."""
    listed = [key for group in given["param_groups"] for key in group["params"]]
    return {id(parameter): key for parameter, key in zip(_parameters(optim), listed, strict=True)}


def _parameters(optim: torch.optim.Optimizer) -> list[nn.Parameter]:
    return [parameter for group in optim.param_groups for parameter in group["params"]]


def _is_owned(units: list[Owned], parameter: nn.Parameter) -> bool:
    return any(parameter is each for unit in units for each, _ in unit.parameters())


def _refuse_strangers(optim: Any, names: dict[int, list[str]]) -> None:
    """Nothing could be said about their state, and leaving it out would lose it without a word."""
    unknown = [each for each in _parameters(optim) if id(each) not in names]
    if not unknown:
        return
    where = f"{len(unknown)} of the parameters of this {type(optim).__name__} are not in the model"
    replaced = list(replaced_by_shards(unknown).values())
    if replaced:
        some = ", ".join(replaced[:3]) + (", ..." if len(replaced) > 3 else "")
        where += f": it was built before the model was sharded, which has replaced {some}"
    elif any(full_name(each) for each in unknown):
        where += ": it was built while parameters were whole, in forward or summon_full_params"
    raise ArgumentError(
        f"{where}. Build the optimizer of model.parameters() of the wrapped model, and pass that model."
    )


def names_of(model: nn.Module, units: list[Owned]) -> dict[int, list[str]]:
    """Original names by parameter: all of a unit's for its flat one."""
    names = {id(parameter): [clean_tensor_name(name)] for name, parameter in model.named_parameters()}
    for unit in units:
        for parameter, numbers in unit.parameters():
            names[id(parameter)] = [unit.names[number] for number in numbers]
    return names


def _whole_states(unit: Owned, own: dict[int, StateDict], settings: StateDictSettings) -> dict[str, StateDict]:
    """States of a unit's parameters by their original names. What a rank does not have, others tell."""
    flat = not unit.sharded.originals
    about = _agreed(unit, {number: {name: _about(each) for name, each in s.items()} for number, s in own.items()})
    result: dict[str, StateDict] = {unit.names[n]: {} for n in _members(unit, about)}
    for name in dict.fromkeys(name for states in about.values() for name in states):
        having = [number for number, states in about.items() if name in states]
        kind, detail = about[having[0]][name]
        if kind != "cut":
            for number in having:
                for member in range(len(unit.names)) if flat else (number,):
                    result[unit.names[member]][name] = _own(about[number][name][1])
            continue
        here = {number: own[number][name] for number in having if name in own.get(number, {})}
        whole = unit.gathered(unit.piece(here, detail, unit.sharded.flat.local.device))
        for member in range(len(unit.names)) if flat else having:
            result[unit.names[member]][name] = _given(unit, unit.part(whole, member), settings)
    return result


def _members(unit: Owned, about: dict[int, Any]) -> list[int]:
    if unit.sharded.originals:
        return [number for number, states in sorted(about.items()) if states]
    return list(range(len(unit.names))) if any(about.values()) else []


def _about(value: Any) -> tuple[str, Any]:
    """Whether a state is cut as its parameter is; else its value, which all ranks have alike."""
    if isinstance(value, torch.Tensor) and value.ndim > 0:
        return "cut", value.dtype
    return "same", value.cpu() if isinstance(value, torch.Tensor) else value


def _own(value: Any) -> Any:
    """For one parameter alone: optimizers count their steps in place, once for every parameter."""
    return value.clone() if isinstance(value, torch.Tensor) else value


def _agreed(unit: Owned, mine: dict[int, dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """What any rank knows of each parameter's state.

    Those without elements of it have none, or one that was loaded and that no step has counted on since.
    """
    slots = unit.sharded.slots
    empty = {number for number in mine if unit.sharded.originals and slots[number].sharded.numel() == 0}
    everybody: list[Any] = [(mine, empty)]
    if unit.group is not None and unit.group.size() > 1:
        everybody = [None] * unit.group.size()
        dist.all_gather_object(everybody, (mine, empty), group=unit.group)
    merged: dict[int, dict[str, Any]] = {}
    for without in (True, False):  # whoever has elements is right
        for states_of, empties in everybody:
            for number, states in states_of.items():
                if (number in empties) is without:
                    merged.setdefault(number, {}).update(states)
    return dict(sorted(merged.items()))


def _given(unit: Owned, whole: torch.Tensor, settings: StateDictSettings) -> Any:
    if settings.optim_state_dict_config.offload_to_cpu:
        whole = whole.cpu()
    groups = unit.state.call.groups
    # There is no flat state to be had for LOCAL_STATE_DICT; PyTorch shards it by names there, too.
    if settings.state_dict_type is not StateDictType.FULL_STATE_DICT and groups.meaning.cuts:
        return cut_rows(whole, groups.own, groups.mesh)
    return whole


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
    """The inverse: what `optim.load_state_dict` takes, with this rank's pieces. `load_directly` calls that, too."""
    settings = settings or get_state_dict_type(model)
    if getattr(settings.optim_state_dict_config, "rank0_only", False):
        optim_state_dict = broadcast_states(optim_state_dict, group)
    _require_state_dict(optim, optim_state_dict)
    given, units = optim_state_dict["state"], owned_by(model)
    names = names_of(model, units)
    _refuse_strangers(optim, names)
    warn_about_missing(optim, names, given)
    parts: dict[int, StateDict] = {}
    for unit in units:
        wholes = {
            n: {k: unit.whole(v) for k, v in given[name].items()} for n, name in enumerate(unit.names) if name in given
        }
        for parameter, numbers in unit.parameters():
            own = {number: wholes[number] for number in numbers if number in wholes}
            if any(own.values()):
                parts[id(parameter)] = _pieces(unit, own, numbers)
    state: dict[Any, StateDict] = {}
    for number, parameter in enumerate(_parameters(optim)):
        mine = names[id(parameter)]
        key = (mine[0] if len(mine) == 1 else "_flat_param") if is_named_optimizer else number
        if id(parameter) in parts:
            state[key] = parts[id(parameter)]
        elif mine[0] in given and not _is_owned(units, parameter):
            state[key] = dict(given[mine[0]])
    result = {
        "state": state,
        "param_groups": _groups(optim, optim_state_dict["param_groups"], names, is_named_optimizer),
    }
    if load_directly:
        optim.load_state_dict(result)
    return result


def _pieces(unit: Owned, own: dict[int, StateDict], numbers: list[int]) -> StateDict:
    """A parameter's state on this rank, from the whole states of the original ones that it stands for: `numbers`."""
    result: StateDict = {}
    for name in dict.fromkeys(name for states in own.values() for name in states):
        values = {number: states[name] for number, states in own.items() if name in states}
        _check(unit, name, values, numbers)
        first = next(iter(values.values()))
        if not isinstance(first, torch.Tensor) or first.ndim == 0:
            result[name] = _own(first)
        elif unit.sharded.originals:
            (number,) = values
            slot = unit.sharded.slots[number]
            local = unit.mine(first, number).to(slot.local.device)
            result[name] = first.clone() if slot.cut.world == 1 else local.clone()
        else:
            result[name] = unit.flat_piece(values, first.dtype)
    return result


def _check(unit: Owned, name: str, values: dict[int, Any], numbers: list[int]) -> None:
    """A state of one name: all of a flat parameter's, each in the shape of its own."""
    missing = [unit.names[number] for number in numbers if number not in values]
    if missing:
        having = unit.names[next(iter(values))]
        raise ArgumentError(
            f"The optimizer state to load has {name!r} for {having!r}, but not for {', '.join(missing)}, in the "
            "same flat parameter: its state is one tensor. Add it, or wrap with use_orig_params=True."
        )
    for number, value in values.items():
        expected = tuple(unit.sharded.slots[number].cut.shape)
        if isinstance(value, torch.Tensor) and value.ndim > 0 and tuple(value.shape) != expected:
            raise ArgumentError(
                f"The optimizer state to load has {name!r} of shape {tuple(value.shape)} for {unit.names[number]!r}, "
                f"expected {expected}, the parameter's. Is it a state dict of this model, made by optim_state_dict?"
            )


def _require_state_dict(optim: Any, given: Any) -> None:
    if isinstance(given, torch.optim.Optimizer) or isinstance(optim, dict):
        raise ArgumentError(
            "optim_state_dict_to_load takes (model, optim, optim_state_dict): the optimizer and its state dict are the "
            "other way round."
        )
    if not isinstance(given, dict) or not {"state", "param_groups"} <= given.keys():
        found = (
            f"one with the keys {sorted(map(str, given))}" if isinstance(given, dict) else f"a {type(given).__name__}"
        )
        raise ArgumentError(f"optim_state_dict must be what optim_state_dict() gave, got {found}.")


def _groups(optim: Any, given: list[StateDict], names: dict[int, list[str]], named: bool) -> list[StateDict]:
    """The settings of the groups given, with the optimizer's own numbers (or names) of the parameters in them."""
    groups: list[StateDict] = []
    number = 0
    by_name = {name: each for each in given for name in each["params"]}
    for mine in optim.param_groups:
        count = len(mine["params"])
        own = [name for parameter in mine["params"] for name in names[id(parameter)]]
        source = next((by_name[name] for name in own if name in by_name), given[min(len(groups), len(given) - 1)])
        params: list[Any] = own if named else list(range(number, number + count))
        groups.append({**{key: value for key, value in source.items() if key != "params"}, "params": params})
        number += count
    return groups


def broadcast_states(optim_state_dict: StateDict | None, group: Any = None) -> StateDict:
    """What rank 0 has, for all."""
    holder = [optim_state_dict]
    dist.broadcast_object_list(holder, group=group, group_src=0)
    return holder[0]  # type: ignore[return-value]
