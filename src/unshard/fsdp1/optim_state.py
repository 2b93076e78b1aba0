"""Saves optimizer state of a wrapped model by original parameter name. `optim_load.py` loads this state."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ..comm.order.waiting import SharedCall
from ..engine.api import FlatShardedParams
from ..errors import ArgumentError, StateError, UnsupportedError, listed
from ..names import clean_tensor_name, optimizer_parameters
from ..state.model import OptimizedParam, optimized_param, refuse_unknown_parameters
from ..torch_private import HELPERS, as_dtensor, helper_call, step_without_hooks
from .api import StateDictSettings, StateDictType
from .full_params import all_gathered, full_value, shard_tensor
from .groups import tensor_parallel_groups
from .state import WrapperState, flat_sharded_of, in_memory_order, in_shape, shard_begins, wrapper_states
from .state_dict import get_state_dict_type

StateDict = dict[str, Any]


@dataclass(frozen=True)
class UnitParams:
    """A unit with parameters, and the original names of these parameters."""

    state: WrapperState
    sharded: FlatShardedParams
    names: tuple[str, ...]
    parameters: list[tuple[nn.Parameter, list[OptimizedParam]]]
    """The parameters that an optimizer sees, each with the original parameters that it contains."""

    def shard(self, states: dict[int, torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
        """Return this rank's shard of one kind of state. `states` maps parameter numbers to tensors; others are 0."""
        if states and not self.sharded.originals:
            return next(iter(states.values()))
        flat = torch.zeros_like(self.sharded.flat.local, dtype=dtype)
        for number, begin in shard_begins(self.sharded, self.state.transports[0].rank):
            if number in states:
                here = in_memory_order(states[number], self.sharded.params[number])
                flat[begin : begin + here.numel()] = here.to(flat.device)
        return flat


def units_of(model: nn.Module) -> list[UnitParams]:
    """Return the units in `model` that have parameters, in the order of `model.modules()`."""
    paths = {id(module): clean_tensor_name(f"{name}.") if name else "" for name, module in model.named_modules()}
    found = []
    for state in wrapper_states(model):
        sharded = flat_sharded_of(state.unit)
        if sharded is None:
            continue
        first = [param.locations[0] for param in sharded.params]
        names = tuple(f"{paths.get(id(each.module()), '')}{each.name}" for each in first)
        group = state.unit.param_groups[0]
        pairs = [optimized_param(name, group, param) for name, param in zip(names, sharded.params, strict=True)]
        parameters = [(parameter, [inside]) for parameter, inside in pairs]
        if not sharded.originals:
            parameters = [(sharded.flat.sharded, [inside for _, inside in pairs])]
        found.append(UnitParams(state, sharded, names, parameters))
    return found


def names_of(model: nn.Module, units: list[UnitParams]) -> dict[int, list[str]]:
    """Map the id of each parameter to its original names. A flat parameter has several names."""
    names = {id(parameter): [clean_tensor_name(name)] for name, parameter in model.named_parameters()}
    for unit in units:
        names.update({id(parameter): [each.name for each in inside] for parameter, inside in unit.parameters})
    return names


# -- saving ----------------------------------------------------------------------------------------------------------


def optim_state_dict(
    model: nn.Module,
    optim: torch.optim.Optimizer,
    optim_state_dict: StateDict | None = None,
    group: Any = None,
    *,
    for_loading: bool = False,
) -> StateDict:
    """Return the state of `optim` by original parameter name. All ranks must call this function.

    The state dict type of `model` determines whether the state is full or sharded. `optim_state_dict` is a state dict
    of `optim` to convert, by default its own, and `group` the process group. `for_loading=True` adds the state that the
    optimizer's first step would create, without changing the optimizer or the parameters. Use it before
    `torch.distributed.checkpoint.load`, which loads only entries that its argument already has.
    """
    return states_to_save(model, optim, get_state_dict_type(model), optim_state_dict, group, for_loading)


@torch.no_grad()
def states_to_save(
    model: nn.Module,
    optim: torch.optim.Optimizer,
    settings: StateDictSettings,
    given: StateDict | None = None,
    group: Any = None,
    for_loading: bool = False,
) -> StateDict:
    """Implement `optim_state_dict` for `settings`. With `rank0_only`, ranks other than rank 0 get an empty dict."""
    units, state = units_of(model), {}
    names = names_of(model, units)
    refuse_unknown_parameters(optim, names, ArgumentError)
    given = optim.state_dict() if given is None else given
    keys = _keys(optim, given, model)
    if for_loading:
        given = with_first_states(optim, given, keys)
    for unit in units:  # including units that this optimizer lacks, because another rank's optimizer may have them
        held = enumerate(id(parameter) for parameter, _ in unit.parameters)
        own = {number: given["state"].get(keys[key], {}) for number, key in held if key in keys}
        state.update(_unsharded_states(unit, own, settings))
    sharded = sharded_ids(units)
    for parameter in optimizer_parameters(optim):
        own_state = given["state"].get(keys.get(id(parameter)))
        if own_state and id(parameter) not in sharded:
            (name,) = names[id(parameter)]
            state.setdefault(name, {key: copied(value) for key, value in own_state.items()})
    if getattr(settings.optim_state_dict_config, "rank0_only", False) and dist.get_rank(group) != 0:
        return {}
    if "param_groups" not in given:
        return {"state": state}
    groups = []
    for mine, theirs in zip(optim.param_groups, given["param_groups"], strict=True):
        expanded = [name for parameter in mine["params"] for name in names[id(parameter)]]
        groups.append({**theirs, "params": expanded})
    return {"state": state, "param_groups": groups}


def _keys(optim: torch.optim.Optimizer, given: StateDict, model: nn.Module) -> dict[int, Any]:
    """Map the id of each parameter to its key in the optimizer's own state dict.

    Keys are numbers for most optimizers. If an optimizer uses names as keys, these are parameter names in `model`.
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


def sharded_ids(units: list[UnitParams]) -> set[int]:
    return {id(parameter) for unit in units for parameter, _ in unit.parameters}


def _unsharded_states(unit: UnitParams, own: dict[int, StateDict], settings: StateDictSettings) -> dict[str, StateDict]:
    """Gather the state of a unit's parameters from all ranks, and return it by original parameter name.

    `own` maps indices in `unit.parameters` to this rank's state.
    """
    numels = [parameter.numel() for parameter, _ in unit.parameters]
    mine = {n: {name: _describe(each, numels[n]) for name, each in states.items()} for n, states in own.items()}
    described = _described_by_all_ranks(unit, mine, {n for n, numel in enumerate(numels) if numel and n not in own})

    def originals(number: int) -> Iterable[int]:
        return (number,) if unit.sharded.originals else range(len(unit.names))  # a flat parameter has all

    result: dict[str, StateDict] = {
        unit.names[member]: {} for number, states in described.items() if states for member in originals(number)
    }
    for name in dict.fromkeys(name for states in described.values() for name in states):
        having = [number for number, states in described.items() if name in states]
        kind, dtype = described[having[0]][name]
        unsharded = None
        if kind == "sharded":
            here = {number: own[number][name] for number in having if name in own.get(number, {})}
            unsharded = all_gathered(unit.shard(here, dtype), unit.state.groups.shards, unit.state.unit.device)
        for number in having:
            for member in originals(number):
                if unsharded is None:
                    result[unit.names[member]][name] = copied(described[number][name][1])
                else:
                    param = unit.sharded.params[member]
                    of_param = as_dtensor(in_shape(unsharded, param).clone(), param.tp_spec)
                    result[unit.names[member]][name] = _to_save(unit, of_param, settings)
    return result


def _describe(value: Any, numel: int) -> tuple[str, Any]:
    """Return ("sharded", dtype) for state that is sharded like its parameter, and ("same", value) for other state.

    `numel` is the number of elements that the parameter has on this rank.
    """
    if isinstance(value, torch.Tensor) and value.ndim > 0 and value.numel() == numel:
        return "sharded", value.dtype
    return "same", value.cpu() if isinstance(value, torch.Tensor) else value


def copied(value: Any) -> Any:
    """Copy `value` if it is a tensor. Parameters must not share a step counter: optimizers update it in place."""
    return value.clone() if isinstance(value, torch.Tensor) else value


def _described_by_all_ranks(
    unit: UnitParams, mine: dict[int, dict[str, Any]], absent: set[int]
) -> dict[int, dict[str, Any]]:
    """Merge the descriptions of each parameter's state from all ranks. `mine` has the descriptions of this rank.

    Descriptions from ranks with elements of a parameter take precedence, because steps update state only on these
    ranks. `absent` has the numbers of parameters that have elements on this rank but are not in its optimizer.
    """
    params, group = unit.sharded.params, unit.state.groups.shards
    empty = {number for number in mine if unit.sharded.originals and params[number].sharded.numel() == 0}
    everybody: list[Any] = [(mine, empty, absent)]
    if group is not None and group.size() > 1:
        everybody = [None] * group.size()
        with SharedCall("gather optimizer state (optim_state_dict)", [group], meet=True):
            dist.all_gather_object(everybody, (mine, empty, absent), group=group)
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
    for name, (kind, value) in states.items():
        other = before.get(name, (kind, value))
        if {kind, other[0]} == {"same"} and not (isinstance(value, torch.Tensor) and value.ndim):
            continue  # step counters, which are the same on all ranks
        if kind != other[0] or (kind == "same" and not torch.equal(value, other[1])):
            raise StateError(
                f"The state {name!r} of {unit.parameters[number][1][0].name!r} is neither sharded like the "
                f"parameter nor the same on all ranks: rank {rank} of the group differs. Save such state on each rank "
                "with the optimizer's own state_dict()."
            )


def _to_save(unit: UnitParams, unsharded: torch.Tensor, settings: StateDictSettings) -> Any:
    offload = settings.optim_state_dict_config.offload_to_cpu
    # For LOCAL_STATE_DICT, too: PyTorch has no local optimizer state dict, and returns a sharded one.
    if settings.state_dict_type is not StateDictType.FULL_STATE_DICT and unit.state.groups.shards is not None:
        return shard_tensor(unsharded, unit.state, offload)
    full = full_value(unsharded)
    return full.cpu() if offload else full


# -- the state that the first step would create ----------------------------------------------------------------------


def first_states(optim: torch.optim.Optimizer, parameters: Iterable[nn.Parameter]) -> dict[int, StateDict]:
    """Return the state that the first step would create for each of `parameters`, by the parameter's id.

    The optimizer steps temporary tensors of zeros, so the real parameters do not change.
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


def with_first_states(optim: torch.optim.Optimizer, given: StateDict, keys: dict[int, Any]) -> StateDict:
    """Return a copy of the state dict `given` of `optim`. Add missing state as the first step would create it."""
    without = [each for each in trainable(optim) if not given["state"].get(keys[id(each)])]
    try:
        created = first_states(optim, without) if without else {}
    except Exception as error:
        raise StateError(
            f"{type(optim).__name__} did not create its state in a step with gradients of zero ({error}). Take a step "
            "with it before optim_state_dict, instead of for_loading=True."
        ) from error
    return {**given, "state": {**given["state"], **{keys[key]: states for key, states in created.items()}}}


def trainable(optim: torch.optim.Optimizer) -> list[nn.Parameter]:
    """Return the trainable parameters of `optim` that have elements on this rank. A step can change only these."""
    return [each for each in optimizer_parameters(optim) if each.requires_grad and each.numel()]


# -- PyTorch's checkpoint helpers ------------------------------------------------------------------------------------

DROPIN = "unshard.dropin.install() at the start of the program makes these functions work, too"


def refuse_helpers(module: nn.Module, wrapped: bool) -> None:
    """Raise if the caller is a `torch.distributed.checkpoint.state_dict` function that would use wrong values.

    Such a function would save one rank's shard of the optimizer state as if it were the full state. `wrapped` is True
    for a wrapper, whose parameter names have a prefix that the keys of its state dict lack.
    """
    if (call := helper_call()) is None:
        return
    helper, optimizers, full_state_dict = call
    theirs = {id(each) for optim in optimizers for each in optimizer_parameters(optim)}
    for unit in units_of(module) if theirs else ():
        if theirs.isdisjoint(id(parameter) for parameter, _ in unit.parameters):
            continue
        raise UnsupportedError(
            f"{HELPERS}.{helper} does not know unshard's FullyShardedDataParallel: it would take each rank's shard "
            f"of the optimizer state of {unit.state.unit} for all of it, and a checkpoint would keep one rank's. "
            "Call FullyShardedDataParallel.optim_state_dict(model, optimizer) to save and "
            "FullyShardedDataParallel.optim_state_dict_to_load(model, optimizer, state_dict) to load it, inside "
            "FullyShardedDataParallel.state_dict_type(model, StateDictType.SHARDED_STATE_DICT) for "
            f"torch.distributed.checkpoint. {DROPIN}."
        )
    if wrapped and helper.startswith("set_") and full_state_dict:
        raise UnsupportedError(
            f"{HELPERS}.{helper} does not know the names of unshard's FullyShardedDataParallel: with "
            "full_state_dict=True it would not find its parameters in the state dict. Call "
            f"model.load_state_dict(state_dict) with the full state dict on all ranks. {DROPIN}."
        )
