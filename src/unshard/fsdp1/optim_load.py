"""Loads optimizer state of a wrapped model, and implements FSDP1's deprecated functions for optimizer state."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from enum import Enum, auto
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ..comm.order.waiting import SharedCall
from ..errors import ArgumentError, listed
from ..names import clean_tensor_name, optimizer_parameters
from ..state.model import OptimizedParam, refuse_unknown_parameters
from ..torch_private import stack_level_of_program
from .api import StateDictType, default_settings
from .full_params import full_tensor, tp_local
from .optim_state import (
    StateDict,
    UnitParams,
    copied,
    first_states,
    names_of,
    sharded_ids,
    states_to_save,
    trainable,
    units_of,
)
from .state_dict import get_state_dict_type


@torch.no_grad()
def optim_state_dict_to_load(
    model: nn.Module,
    optim: torch.optim.Optimizer,
    optim_state_dict: StateDict,
    is_named_optimizer: bool = False,
    load_directly: bool = False,
    group: Any = None,
) -> StateDict:
    """Convert `optim_state_dict`, from the function of this name, to the form that `optim.load_state_dict` takes.

    The state may have been saved with a different number of ranks of `model`. With `is_named_optimizer`, the keys of
    the result are names. With `load_directly`, also load the result into `optim`. `group` is the process group.
    """
    if getattr(get_state_dict_type(model).optim_state_dict_config, "rank0_only", False):
        optim_state_dict = _broadcast(optim_state_dict, group)
    result = _states_to_load(model, optim, optim_state_dict, is_named_optimizer)
    if load_directly:
        optim.load_state_dict(result)
    return result


def _states_to_load(model: nn.Module, optim: Any, optim_state_dict: StateDict, is_named_optimizer: bool) -> StateDict:
    _require_state_dict(optim, optim_state_dict)
    given, units = optim_state_dict["state"], units_of(model)
    names = names_of(model, units)
    refuse_unknown_parameters(optim, names, ArgumentError)
    _warn_about_missing(optim, names, given)
    loaded: dict[int, StateDict] = {}
    for unit in units:
        process_group, device = unit.state.groups.own, unit.state.unit.device
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
    sharded = sharded_ids(units)
    parameters = optimizer_parameters(optim)
    keyed: Iterable[Any] = model.named_parameters() if is_named_optimizer else enumerate(parameters)
    keys = {id(parameter): key for key, parameter in keyed}
    for parameter in parameters:
        name = names[id(parameter)][0]
        if id(parameter) in loaded:
            state[keys[id(parameter)]] = loaded[id(parameter)]
        elif name in given and id(parameter) not in sharded:
            state[keys[id(parameter)]] = dict(given[name])
    result: StateDict = {"state": state}
    if "param_groups" in optim_state_dict:
        result["param_groups"] = _param_groups(optim, optim_state_dict["param_groups"], names, keys)
        if is_named_optimizer:  # PyTorch's named optimizers compare these keys with the keys that they would save
            for mine, theirs in zip(optim.state_dict()["param_groups"], result["param_groups"], strict=False):
                theirs.update({key: value for key, value in mine.items() if key not in theirs})
    return result


def _sharded_states(unit: UnitParams, number: int, own: dict[str, StateDict]) -> StateDict:
    """Return this rank's part of the state of parameter `number`. `own` maps original names to full states."""
    result: StateDict = {}
    param, inside = unit.sharded.params[number], unit.parameters[number][1]
    for name in dict.fromkeys(name for states in own.values() for name in states):
        values = {each: states[name] for each, states in own.items() if name in states}
        _check_states(name, values, inside)
        first = next(iter(values.values()))
        if not isinstance(first, torch.Tensor) or first.ndim == 0:
            result[name] = copied(first)
        elif unit.sharded.originals and param.sharding.world == 1:
            result[name] = tp_local(param, first).clone()
        else:
            local = param.local if unit.sharded.originals else unit.sharded.flat.local
            result[name] = torch.zeros_like(local, dtype=first.dtype)
            for each in inside:
                each.fill(result[name], values[each.name])
    return result


def _check_states(name: str, values: dict[str, Any], inside: list[OptimizedParam]) -> None:
    first, one = next(iter(values.items()))
    missing = [each.name for each in inside if each.name not in values]
    if missing:
        raise ArgumentError(
            f"The optimizer state to load has {name!r} for {first!r}, but not for {', '.join(missing)}, in the "
            "same flat parameter: its state is one tensor. Add it, or wrap with use_orig_params=True."
        )
    is_single = not isinstance(one, torch.Tensor) or one.ndim == 0
    for param in inside:
        value, expected = values[param.name], param.box_map.shape
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
    # Compares numbers or 0-D tensors, which may be on different devices.
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
    optim: Any, given: list[StateDict], names: dict[int, list[str]], keys: dict[int, Any]
) -> list[StateDict]:
    groups: list[StateDict] = []
    by_name = {name: each for each in given for name in each["params"]}
    for mine in optim.param_groups:
        own = [name for parameter in mine["params"] for name in names[id(parameter)]]
        source = next((by_name[name] for name in own if name in by_name), given[min(len(groups), len(given) - 1)])
        groups.append({**source, "params": [keys[id(each)] for each in mine["params"]]})
    return groups


def _broadcast(optim_state_dict: StateDict | None, group: Any) -> StateDict:
    holder = [optim_state_dict]
    group = dist.group.WORLD if group is None else group
    with SharedCall("broadcast optimizer state", [group], meet=True):
        dist.broadcast_object_list(holder, group=group, group_src=0)
    return holder[0]  # type: ignore[return-value]


def _warn_about_missing(optim: Any, names: dict[int, list[str]], given: StateDict) -> None:
    if not isinstance(optim, torch.optim.Optimizer):
        return
    missing = {id(each) for each in trainable(optim) if not any(given.get(name) for name in names[id(each)])}
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
            stacklevel=stack_level_of_program(),
        )


def _creates_state(optim: torch.optim.Optimizer, parameter: nn.Parameter) -> bool:
    try:
        return bool(first_states(optim, [parameter]))
    except Exception:  # an optimizer whose step needs more than gradients probably has state
        return True


# -- the deprecated methods; `optim_state_dict` replaces them ---------------------------------------------------------


class OptimStateKeyType(Enum):
    """Selects whether the keys of an optimizer state dict are names or numbers of parameters.

    Example::

        FullyShardedDataParallel.rekey_optim_state_dict(state, OptimStateKeyType.PARAM_NAME, unwrapped)
    """

    PARAM_NAME = auto()
    PARAM_ID = auto()


def _deprecated(name: str, optim_input: Any = None) -> None:
    level = stack_level_of_program()
    warnings.warn(
        f"{name} is deprecated; use optim_state_dict and optim_state_dict_to_load.", FutureWarning, stacklevel=level
    )
    if optim_input is not None:
        warnings.warn("optim_input is deprecated; pass optim.", FutureWarning, stacklevel=level)


def full_optim_state_dict(
    model: nn.Module,
    optim: torch.optim.Optimizer,
    optim_input: Any = None,
    rank0_only: bool = True,
    group: Any = None,
) -> StateDict:
    """Return the full state of `optim` for `model`, by original parameter name.

    With `rank0_only`, other ranks get an empty dict. `optim_input` is deprecated. `group` is the process group.
    """
    _deprecated("full_optim_state_dict", optim_input)
    return states_to_save(model, optim, default_settings(rank0_only=rank0_only), group=group)


def sharded_optim_state_dict(model: nn.Module, optim: torch.optim.Optimizer, group: Any = None) -> StateDict:
    """Return the sharded state of `optim` for `model`, by original parameter name. `group` is the process group."""
    _deprecated("sharded_optim_state_dict")
    return states_to_save(model, optim, default_settings(StateDictType.SHARDED_STATE_DICT), group=group)


def shard_full_optim_state_dict(
    full_optim_state_dict: StateDict, model: nn.Module, optim_input: Any = None, optim: Any = None
) -> StateDict:
    """Return this rank's shards of `full_optim_state_dict`, which all ranks must pass, for `optim` of `model`.

    `optim_input` is deprecated.
    """
    _deprecated("shard_full_optim_state_dict", optim_input)
    return _to_load(model, _listed(model, optim, optim_input), full_optim_state_dict)


def flatten_sharded_optim_state_dict(
    sharded_optim_state_dict: StateDict, model: nn.Module, optim: torch.optim.Optimizer
) -> StateDict:
    """Convert `sharded_optim_state_dict` of `model`, from the function of this name, to what `optim` can load."""
    _deprecated("flatten_sharded_optim_state_dict")
    return _to_load(model, optim, sharded_optim_state_dict)


def scatter_full_optim_state_dict(
    full_optim_state_dict: StateDict | None,
    model: nn.Module,
    optim_input: Any = None,
    optim: Any = None,
    group: Any = None,
) -> StateDict:
    """Return this rank's shards of `full_optim_state_dict`, which only rank 0 needs to pass, for `optim` of `model`.

    `optim_input` is deprecated. `group` is the process group.
    """
    _deprecated("scatter_full_optim_state_dict", optim_input)
    return _to_load(model, _listed(model, optim, optim_input), _broadcast(full_optim_state_dict, group))


@torch.no_grad()
def _to_load(model: nn.Module, optim: Any, given: StateDict) -> StateDict:
    """Convert `given` for loading. As in PyTorch, keep its optimizer groups, because programs may have changed them."""
    result = _states_to_load(model, optim, given, is_named_optimizer=False)
    if "param_groups" in given:
        names = names_of(model, units_of(model))
        numbers = {name: number for number, each in enumerate(optimizer_parameters(optim)) for name in names[id(each)]}
        found = [{numbers[name] for name in group["params"] if name in numbers} for group in given["param_groups"]]
        groups = zip(given["param_groups"], found, strict=True)
        result["param_groups"] = [{**group, "params": sorted(params)} for group, params in groups if params]
    return result


def rekey_optim_state_dict(
    optim_state_dict: StateDict,
    optim_state_key_type: OptimStateKeyType,
    model: nn.Module,
    optim_input: Any = None,
    optim: Any = None,
) -> StateDict:
    """Convert the keys of `optim_state_dict` of an unwrapped `model` to `optim_state_key_type`: names or numbers.

    `optim` is the optimizer of `model`, by default one of all its parameters. `optim_input` is deprecated.
    """
    _deprecated("rekey_optim_state_dict", optim_input)
    names = {id(parameter): clean_tensor_name(name) for name, parameter in model.named_parameters()}
    parameters = enumerate(optimizer_parameters(_listed(model, optim, optim_input)))
    table: dict[Any, Any] = {number: names[id(parameter)] for number, parameter in parameters}
    if optim_state_key_type is not OptimStateKeyType.PARAM_NAME:
        table = {name: number for number, name in table.items()}
    groups = []
    for group in optim_state_dict["param_groups"]:
        params = [table.get(key, key) for key in group["params"]]
        groups.append({**group, "params": sorted(params) if all(isinstance(p, int) for p in params) else params})
    state = {table.get(key, key): value for key, value in optim_state_dict["state"].items()}
    return {"state": state, "param_groups": groups}


def _listed(model: nn.Module, optim: Any, optim_input: Any) -> Any:
    """Return `optim`. If it is None, return an object whose `param_groups` hold `optim_input` or all parameters."""
    if optim is not None:
        return optim
    inputs = list(model.parameters() if optim_input is None else optim_input)
    if not inputs or not all(isinstance(each, dict) for each in inputs):
        inputs = [{"params": inputs}]
    return SimpleNamespace(param_groups=[{"params": list(each["params"])} for each in inputs])
