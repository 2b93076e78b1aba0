"""The deprecated methods for optimizer state; `optim_state_dict` replaces them."""

from __future__ import annotations

import warnings
from enum import Enum, auto
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from ..names import clean_tensor_name, optimizer_parameters
from .api import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    StateDictSettings,
    StateDictType,
)
from .optim_params import names_of, units_of
from .optim_state import StateDict, broadcast_states, optim_state_dict, optim_state_dict_to_load


class OptimStateKeyType(Enum):
    """Keys of an optimizer's state dict: names or numbers of parameters."""

    PARAM_NAME = auto()
    PARAM_ID = auto()


def _full(rank0_only: bool) -> StateDictSettings:
    config = FullOptimStateDictConfig(rank0_only=rank0_only)
    return StateDictSettings(StateDictType.FULL_STATE_DICT, FullStateDictConfig(), config)


def _sharded() -> StateDictSettings:
    return StateDictSettings(StateDictType.SHARDED_STATE_DICT, ShardedStateDictConfig(), ShardedOptimStateDictConfig())


def _deprecated(name: str, optim_input: Any = None) -> None:
    warnings.warn(
        f"{name} is deprecated; use optim_state_dict and optim_state_dict_to_load.", FutureWarning, stacklevel=4
    )
    if optim_input is not None:
        warnings.warn("optim_input is deprecated; pass optim.", FutureWarning, stacklevel=4)


def full_optim_state_dict(
    model: nn.Module,
    optim: torch.optim.Optimizer,
    optim_input: Any = None,
    rank0_only: bool = True,
    group: Any = None,
) -> StateDict:
    """Unsharded states by original name, on rank 0 or on all ranks."""
    _deprecated("full_optim_state_dict", optim_input)
    return optim_state_dict(model, optim, None, group, _full(rank0_only))


def sharded_optim_state_dict(model: nn.Module, optim: torch.optim.Optimizer, group: Any = None) -> StateDict:
    """Sharded states by original name."""
    _deprecated("sharded_optim_state_dict")
    return optim_state_dict(model, optim, None, group, _sharded())


def shard_full_optim_state_dict(
    full_optim_state_dict: StateDict, model: nn.Module, optim_input: Any = None, optim: Any = None
) -> StateDict:
    """This rank's shards of a full state dict, which all ranks have."""
    _deprecated("shard_full_optim_state_dict", optim_input)
    return _to_load(model, _listed(model, optim, optim_input), full_optim_state_dict, _full(False))


def flatten_sharded_optim_state_dict(
    sharded_optim_state_dict: StateDict, model: nn.Module, optim: torch.optim.Optimizer
) -> StateDict:
    """This rank's shards of a sharded state dict."""
    _deprecated("flatten_sharded_optim_state_dict")
    return _to_load(model, optim, sharded_optim_state_dict, _sharded())


def scatter_full_optim_state_dict(
    full_optim_state_dict: StateDict | None,
    model: nn.Module,
    optim_input: Any = None,
    optim: Any = None,
    group: Any = None,
) -> StateDict:
    """This rank's shards of a full state dict, which rank 0 has."""
    _deprecated("scatter_full_optim_state_dict", optim_input)
    full = broadcast_states(full_optim_state_dict, group)
    return _to_load(model, _listed(model, optim, optim_input), full, _full(False))


def _to_load(model: nn.Module, optim: Any, given: StateDict, settings: StateDictSettings) -> StateDict:
    """Keep the groups of `given`, like PyTorch: programs add parameters that it lacks themselves."""
    result = optim_state_dict_to_load(model, optim, given, settings=settings)
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
    """Convert keys from numbers to names, or back, for a model that is not wrapped."""
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
    """`optim`, or groups like those of an optimizer built from `optim_input` (by default, all parameters)."""
    if optim is not None:
        return optim
    inputs = list(model.parameters() if optim_input is None else optim_input)
    if not inputs or not all(isinstance(each, dict) for each in inputs):
        inputs = [{"params": inputs}]
    return SimpleNamespace(param_groups=[{"params": list(each["params"])} for each in inputs])
