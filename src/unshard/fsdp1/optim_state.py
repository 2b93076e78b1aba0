"""Saving optimizer state of a wrapped model by original parameter name. `optim_load.py` loads such state."""

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
    """A unit that has parameters, and the original names of these parameters, in order."""

    state: WrapperState
    sharded: FlatShardedParams
    names: tuple[str, ...]
    parameters: list[tuple[nn.Parameter, list[OptimizedParam]]]
    """The unit's parameters as an optimizer sees them, each with the original parameters inside."""

    def shard(self, states: dict[int, torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
        """Return this rank's shard of one kind of state. `states`: by parameter number; missing states become 0."""
        if states and not self.sharded.originals:
            return next(iter(states.values()))
        flat = torch.zeros_like(self.sharded.flat.local, dtype=dtype)
        for number, begin in shard_begins(self.sharded, self.state.transports[0].rank):
            if number in states:
                here = in_memory_order(states[number], self.sharded.params[number])
                flat[begin : begin + here.numel()] = here.to(flat.device)
        return flat


def units_of(model: nn.Module) -> list[UnitParams]:
    """Return the units at and below `model` that have parameters, in the order of `modules()`."""
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
    """Return the original names of each parameter, by the parameter's id. A flat parameter has several names."""
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
    """Return the optimizer's state by original parameter name, in the model's state dict type. All ranks must call it.

    `torch.distributed.checkpoint.load` fills only existing entries of its argument, and an optimizer has no state
    before its first step. `for_loading=True` adds the state that the first step would create, without
    changing the optimizer or the parameters.
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
    """Return `optim_state_dict` for these settings. With `rank0_only`, the other ranks get an empty dict."""
    units, state = units_of(model), {}
    names = names_of(model, units)
    refuse_unknown_parameters(optim, names, ArgumentError)
    given = optim.state_dict() if given is None else given
    keys = _keys(optim, given, model)
    if for_loading:
        given = with_first_states(optim, given, keys)
    for unit in units:  # also units without parameters in this optimizer: another rank's optimizer may have them
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
    """Return the key of each parameter in the optimizer's own state dict, by the parameter's id.

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


def sharded_ids(units: list[UnitParams]) -> set[int]:
    return {id(parameter) for unit in units for parameter, _ in unit.parameters}


def _unsharded_states(unit: UnitParams, own: dict[int, StateDict], settings: StateDictSettings) -> dict[str, StateDict]:
    """Return the unsharded states of a unit's parameters by original name, gathered from the ranks that have states.

    `own`: this rank's states, by number in `unit.parameters`.
    """
    numels = [parameter.numel() for parameter, _ in unit.parameters]
    mine = {n: {name: _describe(each, numels[n]) for name, each in states.items()} for n, states in own.items()}
    described = _described_by_all_ranks(unit, mine, {n for n, numel in enumerate(numels) if numel and n not in own})

    def originals(number: int) -> Iterable[int]:
        """Return the numbers of the original parameters inside the optimizer's parameter `number`."""
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
    """Return ("sharded", dtype) for a state that is sharded like its parameter, otherwise ("same", value).

    `numel`: number of elements of the parameter on this rank.
    """
    if isinstance(value, torch.Tensor) and value.ndim > 0 and value.numel() == numel:
        return "sharded", value.dtype
    return "same", value.cpu() if isinstance(value, torch.Tensor) else value


def copied(value: Any) -> Any:
    """Copy a tensor, because optimizers count steps in place and parameters must not share a counter."""
    return value.clone() if isinstance(value, torch.Tensor) else value


def _described_by_all_ranks(
    unit: UnitParams, mine: dict[int, dict[str, Any]], absent: set[int]
) -> dict[int, dict[str, Any]]:
    """Merge the descriptions of each parameter's state from all ranks. `mine`: this rank's descriptions.

    Ranks with elements of a parameter take precedence, because on ranks without elements no step updates loaded state.
    `absent`: parameters with elements on this rank that this rank's optimizer does not have.
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
    """Raise if a state is neither sharded like the parameter nor equal on all ranks."""
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
    """Return the state that the first step would create for each of these parameters, by id.

    The optimizer takes a step with temporary zeros as parameters and gradients. The real ones do not change.
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
    """Return the optimizer's own state dict `given`, plus the state that the first step would create."""
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
    """Return the parameters that a step can change on this rank: trainable parameters with elements here."""
    return [each for each in optimizer_parameters(optim) if each.requires_grad and each.numel()]


# -- PyTorch's checkpoint helpers ------------------------------------------------------------------------------------

DROPIN = "unshard.dropin.install() at the start of the program makes these functions work, too"


def refuse_helpers(module: nn.Module, wrapped: bool) -> None:
    """Raise if PyTorch's checkpoint helpers are running and would give a wrong result. `_fqn_modifiers` calls this.

    The helpers would save a rank's shard of optimizer state as if it were all of it. `wrapped`: True for a wrapper,
    which adds a prefix to the names of parameters, but not to the keys of state dicts.
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
