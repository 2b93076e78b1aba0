"""Gathers and loads full optimizer state dicts of sharded models. The state dicts use parameter names as keys.

    {"state": {"head.weight": {"step": tensor(3.), "exp_avg": tensor([...])}, ...},
     "param_groups": [{"params": ["head.weight", ...], "lr": 0.1, ...}]}

`FullyShardedDataParallel.optim_state_dict` and `torch.distributed.checkpoint.state_dict` use the same format.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from ..errors import CheckpointError, listed
from ..names import ALL_PREFIXES, clean_tensor_name, optimizer_parameters
from ..state.model import HeldTensor, ModelState, model_state
from .full_state_dict import RankPart, broadcast, entry_of, fill_full, gather, sending_device_type
from .manifest import TensorEntry
from .optimizer import SHARDED, OptimizerLoad, merged, tensor_name
from .ranks import Differences, begin, on_first_rank, rank_and_size, together
from .values import decode, encode, stored_names

OWN_VALUES = ("step",)
"""Keys of state with one value per parameter, not per element. For 0-D parameters, both kinds have the same shape."""


def full_optimizer_state_dict(
    model: nn.Module, optimizer: Optimizer, *, rank0_only: bool = True, cpu_offload: bool = True
) -> dict[str, Any]:
    """Return the full optimizer state dict, keyed by the names of the model's parameters.

    All ranks must call this function. The tensors are copies, which are gathered one at a time. With `rank0_only`, all
    ranks except rank 0 get an empty dict. Without `cpu_offload`, tensors stay on the devices of the optimizer's state.
    A tied parameter appears under the first of its names in module order.

    Raises a CheckpointError if the state does not fit the parameters of `model`.

    Example::

        state = checkpoint.full_optimizer_state_dict(model, optimizer)
    """
    _, ranks, full = gather("the full optimizer state", model, optimizer, rank0_only, cpu_offload)
    rank, _ = rank_and_size()
    entry = merged([each.optimizer for each in ranks])
    if entry is None or (rank and rank0_only):
        return {}
    names = _first_names(ranks)
    state = {
        names.get(name, name): {
            key: full[tensor_name(key, name)] if value == SHARDED else decode(value, key, full.__getitem__)
            for key, value in values.items()
        }
        for name, values in entry["state"].items()
    }
    groups = [
        {
            "params": [names.get(name, name) for name in group["params"]],
            **decode(group["options"], "param_groups", full.__getitem__),
        }
        for group in entry["groups"]
    ]
    return {"state": {**state, **decode(entry["others"], "state", full.__getitem__)}, "param_groups": groups}


def _first_names(ranks: list[RankPart]) -> dict[str, str]:
    """Map each parameter's stored name to its first name in module order. Only tied parameters have several names."""
    found: dict[str, str] = {}
    for part in ranks:
        held_as = {name.removeprefix("model/"): held.removeprefix("model/") for name, held in part.aliases.items()}
        for name in part.names:
            found.setdefault(held_as.get(name, name), name)
    return found


# -- loading ------------------------------------------------------------------------------------------------


def load_full_optimizer_state_dict(
    model: nn.Module, optimizer: Optimizer, state_dict: Mapping[str, Any] | None = None, *, strict: bool = True
) -> None:
    """Load a full optimizer state dict from rank 0 into the optimizer of a model, which may be sharded.

    All ranks must call this function, but only rank 0 has to pass the result of `full_optimizer_state_dict`. Tensors
    are broadcast one at a time. If names are missing or unexpected, or if shapes do not match, all ranks raise a
    CheckpointError before anything changes. `strict=False` ignores missing and unexpected names.

    Example::

        checkpoint.load_full_optimizer_state_dict(model, optimizer, state_dict)  # None on other ranks than 0
    """
    what = "Loading a full optimizer state dict"
    values: dict[str, torch.Tensor] = {}
    """The tensors of the state dict by name. Only rank 0 fills this dict."""
    names: dict[str, str] = {}
    """Maps tensor names in this rank's model to tensor names in the state dict."""
    targets: dict[str, HeldTensor] = {}
    load: OptimizerLoad

    def compare() -> tuple[Differences, list[str], list[str]]:
        """Return the differences, the names of sharded tensors to load, and the names of tensors to load in full."""
        nonlocal load
        differences, state = Differences(), model_state(model)
        own_entry, own_tensors = _by_own_names(entry, tensors, state, names)
        load = OptimizerLoad(optimizer, state, own_entry, own_tensors, differences)
        sharded = [names[name] for name, _ in load.needed()]
        return differences, sharded, [names.get(name, name) for name in stored_names(own_entry)]

    def receive(name: str) -> torch.Tensor:
        return broadcast(values.get(name), tensors[name], device_type)

    def prepare() -> None:
        load.decode(lambda name: stored[names.get(name, name)])
        targets.update({names[held.name]: held for held in load.targets()})

    begin("load a full optimizer state dict", model)
    entry, tensors, device_type = on_first_rank(what, lambda: _described(state_dict, optimizer, values))
    answers = together(what, compare)
    Differences.of_all_ranks([each for each, _, _ in answers]).refuse("The state dict", strict, what="state dict")
    sharded = {name for _, names_of_rank, _ in answers for name in names_of_rank}
    full = {name for _, _, names_of_rank in answers for name in names_of_rank}
    stored = {name: receive(name).clone() for name in tensors if name in full}  # for `decode`
    together(what, prepare)
    for name in tensors:
        if name in sharded:
            fill_full(targets.get(name), receive(name))
    together(what, load.finish)


def _described(
    state_dict: Mapping[str, Any] | None, optimizer: Optimizer, values: dict[str, torch.Tensor]
) -> tuple[dict[str, Any], dict[str, TensorEntry], str]:
    """Describe rank 0's state dict for the other ranks, and add its tensors to `values`.

    Returns the optimizer entry, the tensor entries, and the device type to send tensors from.
    """
    if not isinstance(state_dict, Mapping) or not {"state", "param_groups"} <= state_dict.keys():
        raise CheckpointError(
            "Rank 0 has to pass a dict with `state` and `param_groups`, as full_optimizer_state_dict(model, optimizer) "
            f"returns it, got {listed(state_dict) if isinstance(state_dict, Mapping) else type(state_dict).__name__}."
        )
    groups = [_group(number, each, values) for number, each in enumerate(state_dict["param_groups"])]
    known = {name for group in groups for name in group["params"]}
    state: dict[str, dict[str, Any]] = {}
    others: dict[Any, Any] = {}
    for key, value in state_dict["state"].items():
        name = clean_tensor_name(key, ALL_PREFIXES) if isinstance(key, str) else key
        if name in known:
            state[name] = {each: _value(each, name, one, values) for each, one in value.items()}
        elif isinstance(value, Mapping):
            raise CheckpointError(f"The state dict has state of {key!r}, which is in none of its param_groups.")
        else:
            others[key] = value
    options = {key for group in groups for key in group["options"]}
    entry = {
        # The state dict does not name its optimizer. Assume a different one if options are both added and missing:
        # schedulers only add options, and older versions of PyTorch only lack some.
        "defaults": sorted(options - {"initial_lr"}) if set(optimizer.defaults) - options else [],
        "groups": groups,
        "state": state,
        "others": encode(others, "optimizer/state", values.__setitem__),
    }
    tensors = {name: entry_of(value, name) for name, value in values.items()}
    return entry, tensors, sending_device_type(optimizer_parameters(optimizer))


def _group(number: int, group: Mapping[str, Any], values: dict[str, torch.Tensor]) -> dict[str, Any]:
    numbers = [each for each in group["params"] if not isinstance(each, str)]
    if numbers:
        raise CheckpointError(
            f"Group {number} of the state dict has parameters by number ({listed(map(str, numbers))}). They must be "
            "names of the model's parameters, as in the result of full_optimizer_state_dict(model, optimizer)."
        )
    options = {key: value for key, value in group.items() if key not in ("params", "param_names")}
    return {
        "params": [clean_tensor_name(each, ALL_PREFIXES) for each in group["params"]],
        "options": encode(options, f"optimizer/param_groups[{number}]", values.__setitem__),
    }


def _value(key: str, name: str, value: Any, values: dict[str, torch.Tensor]) -> Any:
    """Encode a state value. If the value is sharded in the optimizer, add it to `values` and return `SHARDED`."""
    where = tensor_name(key, name)
    if isinstance(value, torch.Tensor) and (value.ndim or key not in OWN_VALUES):
        values[where] = value.detach()
        return SHARDED
    return encode(value, where, values.__setitem__)


def _by_own_names(
    entry: dict[str, Any], tensors: dict[str, TensorEntry], model: ModelState, names: dict[str, str]
) -> tuple[dict[str, Any], dict[str, TensorEntry]]:
    """Return `entry` and `tensors` with this rank's names, and map these to the original names in `names`."""
    aliases = {name.removeprefix("model/"): held.removeprefix("model/") for name, held in model.aliases.items()}
    plain = {each.name: each.box_map.shape for inside in model.optimized.values() for each in inside if each.plain}
    found, state = dict(tensors), {}
    for name, values in entry["state"].items():
        held_as = aliases.get(name, name)
        if held_as in state:
            raise CheckpointError(f"{name} is tied here, and the state dict has state for two of its names.")
        own = state[held_as] = dict(values)
        for key in [key for key, value in values.items() if value == SHARDED]:
            here = tensor_name(key, held_as)
            names[here] = tensor_name(key, name)
            found[here] = tensors[names[here]]
            if held_as in plain and found[here].shape != plain[held_as]:
                own[key] = {"$": "tensor", "name": here}  # not one value per element, so every rank loads all of it
    groups = [{**group, "params": [aliases.get(name, name) for name in group["params"]]} for group in entry["groups"]]
    return {**entry, "state": state, "groups": groups}, found
