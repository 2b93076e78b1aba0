"""What this rank holds of an optimizer's state, by the names of the model's parameters, and how that is loaded.

In the checkpoint's values, the entry of the optimizer is:

    {"defaults": ["betas", "lr", ...],
     "groups": [{"params": ["head.weight", ...], "options": {"lr": 0.1, ...}}, ...],
     "state": {"head.weight": {"step": <value>, "exp_avg": {"$": "sharded"}}, ...},
     "others": {...}}

State that is marked `sharded` has a value per element, and is the tensor `optimizer/exp_avg/head.weight`. A parameter
that had no state when it was saved, because it never had a gradient, has none after loading either.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from ..engine.api import finish_steps, replaced_by_shards
from ..errors import ArgumentError, CheckpointError, listed
from ..names import optimizer_parameters
from ..state.boxes import Part, part_of_dtensor, whole
from ..state.model import HeldTensor, ModelState, OptimizedParam
from ..torch_private import local_part, spec_of
from .values import encode

SHARDED = {"$": "sharded"}


def tensor_name(key: str, name: str) -> str:
    return f"optimizer/{key}/{name}"


def check_optimizer(optimizer: object) -> None:
    if optimizer is not None and not isinstance(optimizer, Optimizer):
        raise ArgumentError(f"optimizer must be one torch.optim.Optimizer or None, got {optimizer!r}.")


def params_of(optimizer: Optimizer, model: ModelState) -> list[list[tuple[Any, list[OptimizedParam]]]]:
    """For each group of the optimizer, its parameters and what these are in the model."""
    unknown = [each for each in optimizer_parameters(optimizer) if id(each) not in model.optimized]
    if unknown:
        replaced = list(replaced_by_shards(unknown).values())
        why = f": it was built before the model was sharded, which has replaced {listed(replaced)}" if replaced else ""
        raise CheckpointError(
            f"{len(unknown)} of the parameters of this {type(optimizer).__name__} are not in the model{why}. Build the "
            "optimizer from model.parameters() of the sharded model, and pass that model."
        )
    return [[(each, model.optimized[id(each)]) for each in group["params"]] for group in optimizer.param_groups]


@torch.no_grad()
def optimizer_state(optimizer: Optimizer, model: ModelState) -> tuple[list[HeldTensor], dict[str, Any]]:
    """The tensors, and this rank's entry in the values."""
    finish_steps()
    collector = _Collector()
    groups = params_of(optimizer, model)
    params = {id(each) for group in groups for each, _ in group}
    values: dict[str, Any] = {"defaults": sorted(optimizer.defaults), "groups": [], "state": collector.state}
    for number, (options, group) in enumerate(zip(optimizer.param_groups, groups, strict=True)):
        own = {key: value for key, value in options.items() if key not in ("params", "param_names")}
        path = f"optimizer/param_groups[{number}]"
        names = [each.name for _, inside in group for each in inside]
        values["groups"].append({"params": names, "options": encode(own, path, collector.store)})
        for parameter, inside in group:
            if parameter in optimizer.state:
                collector.add(parameter, inside, optimizer.state[parameter])
    others = {key: value for key, value in optimizer.state.items() if id(key) not in params}
    values["others"] = encode(others, "optimizer/state", collector.store)
    return collector.tensors, values


class _Collector:
    def __init__(self) -> None:
        self.tensors: list[HeldTensor] = []
        self.state: dict[str, dict[str, Any]] = {}

    def store(self, name: str, value: torch.Tensor) -> None:
        self.tensors.append(HeldTensor(name, whole(value.shape), value.dtype, value, plain=True))

    def add(self, parameter: Any, inside: list[OptimizedParam], state: dict[str, Any]) -> None:
        for param in inside:
            # A rank without elements may have a counter that no step has advanced since it was loaded.
            if not param.part.boxes and 0 not in param.part.shape:
                continue
            own = self.state[param.name] = {}
            for key, value in state.items():
                if not isinstance(key, str):
                    raise CheckpointError(f"The optimizer's state of {param.name!r} has the key {key!r}, not a string.")
                name = tensor_name(key, param.name)
                if is_sharded(parameter, param, key, value):
                    part, local = _part_of(value, parameter, param), param.local_of(value)
                    self.tensors.append(HeldTensor(name, part, value.dtype, local, param.plain))
                    own[key] = SHARDED
                else:
                    own[key] = encode(value, name, self.store)


def is_sharded(parameter: torch.Tensor, param: OptimizedParam, key: str, value: Any) -> bool:
    """Whether a state has a value for each element of the parameter, as torch's optimizers keep it."""
    if not isinstance(value, torch.Tensor):
        return False
    if value.shape == parameter.shape and isinstance(value, DTensor) == isinstance(parameter, DTensor):
        return True
    if value.ndim == 0 and not isinstance(value, DTensor):
        return False
    if param.plain and not isinstance(value, DTensor):
        return False  # every rank has all of it
    raise CheckpointError(
        f"The optimizer's state {key!r} of {param.name!r} is a {type(value).__name__} of shape {tuple(value.shape)}, "
        f"and the parameter has the shape {tuple(parameter.shape)}. State of sharded parameters must be numbers, or "
        "tensors with a value for each element. Save such an optimizer with torch.distributed.checkpoint."
    )


def _part_of(value: torch.Tensor, parameter: torch.Tensor, param: OptimizedParam) -> Part:
    if isinstance(value, DTensor) and spec_of(value).placements != spec_of(parameter).placements:
        return part_of_dtensor(param.name, value)
    local = local_part(value)
    if param.start is None and local.shape != local_part(parameter).shape:
        raise CheckpointError(
            f"An optimizer's state of {param.name!r} has the shape {tuple(local.shape)} on this rank, expected "
            f"{tuple(local_part(parameter).shape)}."
        )
    return param.part


def merged(entries: list[dict[str, Any] | None]) -> dict[str, Any] | None:
    """The optimizer's entry of the whole job, from those of all ranks: each may have parameters that others lack."""
    found: dict[str, Any] | None = None
    for entry in entries:
        if entry is None:
            continue
        if found is None:
            found = {**entry, "groups": [dict(group) for group in entry["groups"]], "state": dict(entry["state"])}
            continue
        for number, group in enumerate(entry["groups"]):
            if number == len(found["groups"]):
                found["groups"].append(dict(group))
            names = [*found["groups"][number]["params"], *group["params"]]
            found["groups"][number]["params"] = list(dict.fromkeys(names))
        for name, state in entry["state"].items():
            found["state"].setdefault(name, state)
    return found
