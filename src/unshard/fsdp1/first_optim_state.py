"""The state that an optimizer would create at its first step, without a step."""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from ..errors import StateError, listed
from ..names import optimizer_parameters
from ..torch_private import step_without_hooks

StateDict = dict[str, Any]


@torch.no_grad()
def first_states(optim: torch.optim.Optimizer, parameters: Iterable[nn.Parameter]) -> dict[int, StateDict]:
    """What the first step would leave as the state of each of these parameters, by id; nothing is changed.

    The optimizer's own code steps zeros of the same shapes, with gradients of zero.
    """
    zeros = {id(parameter): _zeros_like(parameter) for parameter in parameters}
    groups, state = optim.param_groups, optim.state
    made: Any = defaultdict(dict)
    try:
        optim.state = made
        optim.param_groups = [
            {**group, "params": [zeros[id(each)] for each in group["params"] if id(each) in zeros]} for group in groups
        ]
        step_without_hooks(optim)
    finally:
        optim.param_groups, optim.state = groups, state
    return {key: made[zero] for key, zero in zeros.items() if made.get(zero)}


def _zeros_like(parameter: nn.Parameter) -> nn.Parameter:
    zeros = nn.Parameter(torch.zeros_like(parameter))
    zeros.grad = torch.zeros_like(parameter)
    return zeros


def with_first_states(optim: torch.optim.Optimizer, given: StateDict, keys: dict[int, Any]) -> StateDict:
    """The optimizer's own state dict `given`, with state for all parameters that get one at a step.

    `keys`: the key of each parameter in it, by the parameter's id.
    """
    without = [each for each in _trainable(optim) if not given["state"].get(keys[id(each)])]
    try:
        made = first_states(optim, without) if without else {}
    except Exception as error:
        raise StateError(
            f"{type(optim).__name__} did not create its state in a step with gradients of zero ({error}). Take a step "
            "with it before optim_state_dict, instead of for_loading=True."
        ) from error
    return {**given, "state": {**given["state"], **{keys[key]: states for key, states in made.items()}}}


def warn_about_missing(optim: Any, names: dict[int, list[str]], given: StateDict) -> None:
    """Parameters without state in `given`, the state to load by name, although a step would give them some."""
    if not isinstance(optim, torch.optim.Optimizer):
        return
    missing = {id(each) for each in _trainable(optim) if not any(given.get(name) for name in names[id(each)])}
    without: list[str] = []
    for group in optim.param_groups:
        own = [each for each in group["params"] if id(each) in missing]
        if own and _makes_state(optim, min(own, key=torch.Tensor.numel)):
            without += [name for each in own for name in names[id(each)]]
    if not without:
        return
    some = listed(map(repr, without))
    warnings.warn(
        f"The optimizer state to load has no state for {len(without)} parameters of this {type(optim).__name__} "
        f"({some}): they start without. torch.distributed.checkpoint.load fills only what is in the state dict that "
        "it is given, and an optimizer that has taken no step has no state. If the checkpoint has some, give "
        "FullyShardedDataParallel.optim_state_dict(model, optim, for_loading=True) to load.",
        stacklevel=5,
    )


def _makes_state(optim: torch.optim.Optimizer, parameter: nn.Parameter) -> bool:
    try:
        return bool(first_states(optim, [parameter]))
    except Exception:  # its step needs more than gradients; whoever steps like that keeps something
        return True


def _trainable(optim: torch.optim.Optimizer) -> list[nn.Parameter]:
    """Those that a step can move here; parameters without elements on this rank have their state elsewhere."""
    return [each for each in optimizer_parameters(optim) if each.requires_grad and each.numel()]
