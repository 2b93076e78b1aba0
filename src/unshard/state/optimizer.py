"""Which parameters of a model an optimizer has, and which of their state is sharded like them."""

from __future__ import annotations

from collections.abc import Container
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from ..engine.api import built_too_early, replaced_by_shards, unsharded_name
from ..errors import ArgumentError, CheckpointError, UnshardError
from ..names import optimizer_parameters
from ..torch_private import local_part, spec_of
from .boxes import Part, part_of_dtensor
from .model import ModelState, OptimizedParam


def check_optimizer(optimizer: object) -> None:
    if optimizer is not None and not isinstance(optimizer, Optimizer):
        raise ArgumentError(f"optimizer must be one torch.optim.Optimizer or None, got {optimizer!r}.")


def refuse_unknown_parameters(optimizer: Any, known: Container[int], error: type[UnshardError]) -> None:
    """Refuse parameters whose id is not in `known`: without a name, their state would be lost silently."""
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
    """For each optimizer group, its parameters and the model's parameters inside them."""
    refuse_unknown_parameters(optimizer, model.optimized, CheckpointError)
    return [[(each, model.optimized[id(each)]) for each in group["params"]] for group in optimizer.param_groups]


def is_sharded(parameter: torch.Tensor, param: OptimizedParam, key: str, value: Any) -> bool:
    """Return True if a state has one value for each element of the parameter, like most state of torch's optimizers."""
    if not isinstance(value, torch.Tensor):
        return False
    if value.shape == parameter.shape and isinstance(value, DTensor) == isinstance(parameter, DTensor):
        return True
    if not isinstance(value, DTensor) and (value.ndim == 0 or param.plain):
        return False  # every rank has all of it
    raise CheckpointError(
        f"The optimizer's state {key!r} of {param.name!r} is a {type(value).__name__} of shape {tuple(value.shape)}, "
        f"and the parameter has the shape {tuple(parameter.shape)}. State of sharded parameters must be numbers, or "
        "tensors with a value for each element. Save such an optimizer with torch.distributed.checkpoint."
    )


def part_of_state(value: torch.Tensor, parameter: torch.Tensor, param: OptimizedParam) -> Part:
    """The boxes that this rank holds of a sharded state."""
    if isinstance(value, DTensor) and spec_of(value).placements != spec_of(parameter).placements:
        return part_of_dtensor(param.name, value)
    local = local_part(value)
    if param.start is None and local.shape != local_part(parameter).shape:
        raise CheckpointError(
            f"An optimizer's state of {param.name!r} has the shape {tuple(local.shape)} on this rank, expected "
            f"{tuple(local_part(parameter).shape)}."
        )
    return param.part
