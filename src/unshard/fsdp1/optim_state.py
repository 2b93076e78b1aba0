"""Optimizer state of a wrapped model with the names and shapes of the original parameters: saving and loading."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ..comm.order.waiting import SharedCall
from ..comm.transports import transport_for
from ..engine.api import FlatShardedParams, replaced_by_shards, unsharded_name
from ..errors import ArgumentError, StateError, listed
from ..names import clean_tensor_name, optimizer_parameters
from ..torch_private import as_dtensor
from .api import StateDictSettings, StateDictType
from .first_optim_state import warn_about_missing, with_first_states
from .flat_parameter import flat_sharded_of, in_memory_order, shard_begins
from .sharded_tensors import full_tensor, shard_tensor
from .state import WrapperState, wrapper_states
from .state_dict_type import get_state_dict_type
from .tensor_parallel import full_value, tensor_parallel_groups, tp_part

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
    """The state of `optim` (or `optim_state_dict`, its own state dict), of the type that is set for the model.

    All ranks have to call; with `rank0_only` the other ranks get an empty one. `for_loading`: parameters without state
    get that of a first step, as a place for what a checkpoint has.
    """
    settings = settings or get_state_dict_type(model)
    units, state = units_of(model), {}
    names = names_of(model, units)
    _refuse_unknown_parameters(optim, names)
    given = optim.state_dict() if optim_state_dict is None else optim_state_dict
    keys = _keys(optim, given, model)
    if for_loading:
        given = with_first_states(optim, given, keys)
    for unit in units:  # also those that this optimizer does not step: another rank's may
        held = [parameter for parameter, _ in unit.parameters()]
        own = {n: given["state"].get(keys[id(each)], {}) for n, each in enumerate(held) if id(each) in keys}
        state.update(_unsharded_states(unit, own, settings))
    for parameter in optimizer_parameters(optim):
        if len(names[id(parameter)]) == 1 and names[id(parameter)][0] not in state:
            own_state = given["state"].get(keys.get(id(parameter)))
            if own_state and not _is_in_unit(units, parameter):
                state[names[id(parameter)][0]] = {key: _copy(value) for key, value in own_state.items()}
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

    Its number in the optimizer; of an optimizer that keeps state by name, the parameter's name in the model.
    """
    own = optimizer_parameters(optim)
    keys = [key for group in given.get("param_groups", ()) for key in group["params"]]
    if any(isinstance(key, str) for key in keys or given["state"]):
        named = dict(model.named_parameters(remove_duplicate=False))
        named.update({clean_tensor_name(name): parameter for name, parameter in named.items()})
        wanted = keys or list(given["state"])
        if named.keys() >= set(wanted):
            return {id(named[key]): key for key in wanted}
    return {id(parameter): key for parameter, key in zip(own, keys or range(len(own)), strict=True)}


def _current_names(model: nn.Module) -> dict[int, str]:
    """The name that each parameter has now, which optimizers that keep state by name use."""
    return {id(parameter): name for name, parameter in model.named_parameters()}


def _is_in_unit(units: list[UnitParams], parameter: nn.Parameter) -> bool:
    return any(parameter is each for unit in units for each, _ in unit.parameters())


def _refuse_unknown_parameters(optim: Any, names: dict[int, list[str]]) -> None:
    """Refuse parameters that are not in the model: without a name their state would be lost silently."""
    unknown = [each for each in optimizer_parameters(optim) if id(each) not in names]
    if not unknown:
        return
    where = f"{len(unknown)} of the parameters of this {type(optim).__name__} are not in the model"
    replaced = list(replaced_by_shards(unknown).values())
    if replaced:
        where += f": it was built before the model was sharded, which has replaced {listed(replaced)}"
    elif any(unsharded_name(each) for each in unknown):
        where += ": it was built while parameters were unsharded, in forward or summon_full_params"
    raise ArgumentError(
        f"{where}. Build the optimizer from model.parameters() of the wrapped model, and pass that model."
    )


def names_of(model: nn.Module, units: list[UnitParams]) -> dict[int, list[str]]:
    """Original names by the parameter's id: one name, or those of all parameters in a flat parameter."""
    names = {id(parameter): [clean_tensor_name(name)] for name, parameter in model.named_parameters()}
    for unit in units:
        for parameter, numbers in unit.parameters():
            names[id(parameter)] = [unit.names[number] for number in numbers]
    return names


def _unsharded_states(unit: UnitParams, own: dict[int, StateDict], settings: StateDictSettings) -> dict[str, StateDict]:
    """Unsharded states of a unit's parameters by their original names, whichever ranks have them."""
    flat = not unit.use_orig_params
    numels = [parameter.numel() for parameter, _ in unit.parameters()]
    mine = {n: {name: _describe(each, numels[n]) for name, each in states.items()} for n, states in own.items()}
    described = _described_by_all_ranks(unit, mine, {n for n, numel in enumerate(numels) if numel and n not in own})
    result: dict[str, StateDict] = {unit.names[n]: {} for n in _described_params(unit, described)}
    for name in dict.fromkeys(name for states in described.values() for name in states):
        having = [number for number, states in described.items() if name in states]
        kind, dtype = described[having[0]][name]
        if kind != "sharded":
            for number in having:
                for member in range(len(unit.names)) if flat else (number,):
                    result[unit.names[member]][name] = _copy(described[number][name][1])
            continue
        here = {number: own[number][name] for number in having if name in own.get(number, {})}
        unsharded = unit.all_gathered(unit.shard(here, dtype, unit.sharded.flat.local.device))
        for member in range(len(unit.names)) if flat else having:
            of_param = as_dtensor(unit.of_param(unsharded, member), unit.sharded.params[member].tp_spec)
            result[unit.names[member]][name] = _to_save(unit, of_param, settings)
    return result


def _described_params(unit: UnitParams, described: dict[int, Any]) -> list[int]:
    if unit.use_orig_params:
        return [number for number, states in sorted(described.items()) if states]
    return list(range(len(unit.names))) if any(described.values()) else []


def _describe(value: Any, numel: int) -> tuple[str, Any]:
    """("sharded", dtype) of a state that is sharded as its parameter is, else ("same", value): all ranks have it.

    `numel`: of the parameter on this rank.
    """
    if isinstance(value, torch.Tensor) and value.ndim > 0 and value.numel() == numel:
        return "sharded", value.dtype
    return "same", value.cpu() if isinstance(value, torch.Tensor) else value


def _copy(value: Any) -> Any:
    """Every parameter needs a tensor of its own: optimizers count steps in place."""
    return value.clone() if isinstance(value, torch.Tensor) else value


def _described_by_all_ranks(
    unit: UnitParams, mine: dict[int, dict[str, Any]], absent: set[int]
) -> dict[int, dict[str, Any]]:
    """The descriptions of each parameter's state that any rank has.

    A rank without elements of a parameter has none, or one that was loaded and that no step has updated since.
    `absent`: parameters with elements on this rank that its optimizer does not have.
    """
    params = unit.sharded.params
    empty = {number for number in mine if unit.use_orig_params and params[number].sharded.numel() == 0}
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
        if lacking := [unit.names[unit.parameters()[number][1][0]] for number in missing if merged.get(number)]:
            raise StateError(
                f"Rank {rank} of the group has elements of {listed(map(repr, lacking))} and no such parameter in its "
                "optimizer, although other ranks have optimizer state of it. Build the optimizers of all ranks of the "
                "same parameters."
            )
    return dict(sorted(_with_tensor_parallel_ranks(unit, merged).items()))


def _refuse_different(unit: UnitParams, number: int, before: StateDict, states: StateDict, rank: int) -> None:
    """A state of another size than the parameter's can be saved if it is the same on all ranks."""
    for name, (kind, value) in states.items():
        other = before.get(name, (kind, value))
        if {kind, other[0]} == {"same"} and not (isinstance(value, torch.Tensor) and value.ndim):
            continue  # counts of steps, which ranks keep alike
        if kind != other[0] or (kind == "same" and not torch.equal(value, other[1])):
            raise StateError(
                f"The state {name!r} of {unit.names[unit.parameters()[number][1][0]]!r} has another size than the "
                f"parameter, and is not the same on all ranks: rank {rank} of the group differs. Save what the "
                "optimizer keeps besides, on each rank, with its own state_dict()."
            )


def _with_tensor_parallel_ranks(unit: UnitParams, merged: dict[int, dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """Also what ranks of the tensor-parallel meshes have: a parameter may have elements on some of these only."""
    for group in tensor_parallel_groups(unit.sharded.params):
        everybody: list[Any] = [None] * group.size()
        dist.all_gather_object(everybody, merged, group=group)
        for theirs in everybody:
            for number, states in theirs.items():
                own = merged.setdefault(number, {})
                merged[number] = {**states, **own}
    return merged


def _to_save(unit: UnitParams, unsharded: torch.Tensor, settings: StateDictSettings) -> Any:
    offload = settings.optim_state_dict_config.offload_to_cpu
    # For LOCAL_STATE_DICT, too: PyTorch has no local optimizer state dict, and returns a sharded one.
    if settings.state_dict_type is not StateDictType.FULL_STATE_DICT and unit.state.call.groups.traits.shards:
        return shard_tensor(unsharded, unit.state, offload)
    full = full_value(unsharded)
    return full.cpu() if offload else full


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
    """The inverse: what `optim.load_state_dict` takes, with this rank's shards. `load_directly` also loads it."""
    settings = settings or get_state_dict_type(model)
    if getattr(settings.optim_state_dict_config, "rank0_only", False):
        optim_state_dict = broadcast_states(optim_state_dict, group)
    _require_state_dict(optim, optim_state_dict)
    given, units = optim_state_dict["state"], units_of(model)
    names = names_of(model, units)
    _refuse_unknown_parameters(optim, names)
    warn_about_missing(optim, names, given)
    parts: dict[int, StateDict] = {}
    for unit in units:
        unsharded = {
            n: {k: unit.unsharded(v, n) for k, v in given[name].items()}
            for n, name in enumerate(unit.names)
            if name in given
        }
        for parameter, numbers in unit.parameters():
            own = {number: unsharded[number] for number in numbers if number in unsharded}
            if any(own.values()):
                parts[id(parameter)] = _sharded_states(unit, own, numbers)
    state: dict[Any, StateDict] = {}
    current = _current_names(model) if is_named_optimizer else None
    for number, parameter in enumerate(optimizer_parameters(optim)):
        mine = names[id(parameter)]
        key = number if current is None else current[id(parameter)]
        if id(parameter) in parts:
            state[key] = parts[id(parameter)]
        elif mine[0] in given and not _is_in_unit(units, parameter):
            state[key] = dict(given[mine[0]])
    result: StateDict = {"state": state}
    if "param_groups" in optim_state_dict:
        result["param_groups"] = _param_groups(optim, optim_state_dict["param_groups"], names, current)
        if is_named_optimizer:  # those of PyTorch compare the keys with what they would save
            for loaded, own in zip(result["param_groups"], optim.state_dict()["param_groups"], strict=False):
                loaded.update({key: value for key, value in own.items() if key not in loaded})
    if load_directly:
        optim.load_state_dict(result)
    return result


def _sharded_states(unit: UnitParams, own: dict[int, StateDict], numbers: list[int]) -> StateDict:
    """A parameter's state on this rank, from unsharded states of the original parameters in it, `numbers`."""
    result: StateDict = {}
    for name in dict.fromkeys(name for states in own.values() for name in states):
        values = {number: states[name] for number, states in own.items() if name in states}
        _check_states(unit, name, values, numbers)
        first = next(iter(values.values()))
        if not isinstance(first, torch.Tensor) or first.ndim == 0:
            result[name] = _copy(first)
        elif unit.use_orig_params:
            (number,) = values
            param = unit.sharded.params[number]
            local = unit.local_elements(first, number).to(param.local.device)
            result[name] = first.clone() if param.sharding.world == 1 else local.clone()
        else:
            result[name] = unit.flat_shard(values, first.dtype)
    return result


def _check_states(unit: UnitParams, name: str, values: dict[int, Any], numbers: list[int]) -> None:
    """The states with one name: a flat parameter needs those of all its parameters, each in its shape."""
    missing = [unit.names[number] for number in numbers if number not in values]
    if missing:
        having = unit.names[next(iter(values))]
        raise ArgumentError(
            f"The optimizer state to load has {name!r} for {having!r}, but not for {', '.join(missing)}, in the "
            "same flat parameter: its state is one tensor. Add it, or wrap with use_orig_params=True."
        )
    first, *others = values.items()
    if not isinstance(first[1], torch.Tensor) or first[1].ndim == 0:
        for number, value in others:
            if not _same(first[1], value):
                raise ArgumentError(
                    f"The optimizer state to load has {name!r} = {first[1]} for {unit.names[first[0]]!r}, and {value} "
                    f"for {unit.names[number]!r} in the same flat parameter, which has one. Make them equal, or wrap "
                    "with use_orig_params=True."
                )
    for number, value in values.items():
        expected = tuple(unit.sharded.params[number].sharding.shape)
        if isinstance(value, torch.Tensor) and value.ndim > 0 and tuple(value.shape) != expected:
            raise ArgumentError(
                f"The optimizer state to load has {name!r} of shape {tuple(value.shape)} for {unit.names[number]!r}, "
                f"expected {expected}, the parameter's. Is it a state dict of this model, made by optim_state_dict?"
            )


def _same(one: Any, other: Any) -> bool:
    """Whether two states without dimensions are equal, wherever they are."""
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
    number = 0
    by_name = {name: each for each in given for name in each["params"]}
    for mine in optim.param_groups:
        count = len(mine["params"])
        own = [name for parameter in mine["params"] for name in names[id(parameter)]]
        source = next((by_name[name] for name in own if name in by_name), given[min(len(groups), len(given) - 1)])
        params: list[Any] = list(range(number, number + count))
        if current is not None:
            params = [current[id(parameter)] for parameter in mine["params"]]
        groups.append({**{key: value for key, value in source.items() if key != "params"}, "params": params})
        number += count
    return groups


def broadcast_states(optim_state_dict: StateDict | None, group: Any = None) -> StateDict:
    """Rank 0's state dict on all ranks."""
    holder = [optim_state_dict]
    group = dist.group.WORLD if group is None else group
    with SharedCall("broadcast optimizer state", [group], meet=True):
        dist.broadcast_object_list(holder, group=group, group_src=0)
    return holder[0]  # type: ignore[return-value]


# -- which parameters of an optimizer belong to flat units ------------------------------------------------------------


@dataclass(frozen=True)
class UnitParams:
    """A unit, and the original names of its parameters, in order."""

    state: WrapperState
    sharded: FlatShardedParams
    names: tuple[str, ...]

    @property
    def group(self) -> Any:
        """The ranks that hold the shards; None if the unit is not sharded."""
        return self.state.call.groups.own if self.state.call.groups.traits.shards else None

    @property
    def use_orig_params(self) -> bool:
        return self.state.call.use_orig_params

    @property
    def shard_numel(self) -> int:
        return self.sharded.flat.local.numel()

    def parameters(self) -> list[tuple[nn.Parameter, list[int]]]:
        """The parameters that an optimizer has, each with the numbers of the original parameters in it."""
        if self.use_orig_params:
            return [(param.sharded, [number]) for number, param in enumerate(self.sharded.params)]
        return [(self.sharded.flat.sharded, list(range(len(self.sharded.params))))]

    # -- one state of all parameters as one tensor, sharded as the flat parameter is ------------------------

    def shard(self, states: dict[int, torch.Tensor], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """This rank's shard of a state, from those of its parameters (or of the flat one); zero where there is none."""
        if not self.use_orig_params:
            return next(iter(states.values())) if states else torch.zeros(self.shard_numel, dtype=dtype, device=device)
        flat = torch.zeros(self.shard_numel, dtype=dtype, device=device)
        for number, begin in shard_begins(self.sharded, self.state.transports[0].rank):
            if number in states:
                here = in_memory_order(states[number], self.sharded.params[number])
                flat[begin : begin + here.numel()] = here.to(device)
        return flat

    def all_gathered(self, shard: torch.Tensor) -> torch.Tensor:
        if self.group is None or self.group.size() == 1:
            return shard
        device = self.state.unit.device
        shard = shard.contiguous().to(device)
        unsharded = torch.empty(shard.numel() * self.group.size(), dtype=shard.dtype, device=device)
        transport_for(self.group, device).all_gather([unsharded.view(torch.uint8)], [shard.view(torch.uint8)]).wait()
        return unsharded

    def of_param(self, unsharded: torch.Tensor, number: int) -> torch.Tensor:
        """One parameter's part of the unsharded state, in its shape."""
        cut = self.sharded.params[number].sharding
        return unsharded.as_strided(cut.shape, cut.stride, cut.begin).clone()  # type: ignore[arg-type, union-attr]

    def local_elements(self, unsharded: torch.Tensor, number: int) -> torch.Tensor:
        """This rank's elements of one parameter's unsharded state."""
        param, rank = self.sharded.params[number], self.state.transports[0].rank
        first, count = param.sharding.elements(rank)  # type: ignore[union-attr]
        return in_memory_order(unsharded, param)[first : first + count]

    def flat_shard(self, parts: dict[int, torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
        """This rank's shard of the flat parameter's state, from unsharded states of the original parameters."""
        flat = torch.zeros(self.shard_numel, dtype=dtype, device=self.sharded.flat.local.device)
        for number, begin in shard_begins(self.sharded, self.state.transports[0].rank):
            if number in parts:
                here = self.local_elements(parts[number], number)
                flat[begin : begin + here.numel()] = here.to(flat.device)
        return flat

    def unsharded(self, value: Any, number: int) -> Any:
        """A state of one parameter, unsharded if it is a DTensor or ShardedTensor; of a tensor-parallel one, the part
        that this rank computes with."""
        group, param = self.state.call.groups.own, self.sharded.params[number]
        full = full_tensor(value, group, self.state.unit.device)
        return full if param.tp_spec is None else tp_part(param, full)


def units_of(model: nn.Module) -> list[UnitParams]:
    """The units below `model` that have parameters, in the order of `modules()`."""
    paths = {id(module): clean_tensor_name(f"{name}.") if name else "" for name, module in model.named_modules()}
    found = []
    for state in wrapper_states(model):
        sharded = flat_sharded_of(state.unit)
        if sharded is not None:
            names = [
                f"{paths.get(id(param.locations[0].module()), '')}{param.locations[0].name}" for param in sharded.params
            ]
            found.append(UnitParams(state, sharded, tuple(names)))
    return found
