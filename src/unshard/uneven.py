"""The functions `unshard.step` and `unshard.inference`, and the choice of units that stay all-gathered."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from functools import partial
from typing import Any, Literal

import torch
from torch import nn

from .engine.api import (
    FSDPState,
    Precision,
    Root,
    Scope,
    StepPlan,
    UnevenStep,
    Unit,
    all_gathered,
    dtypes_for,
    is_trained,
    param_group_of,
    state_of,
    unsharded_name,
)
from .errors import ArgumentError, listed
from .policies import matches

Way = Literal["keep", "follow"]
_WAYS = ("keep", "follow")
_plans: weakref.WeakKeyDictionary[Root, dict[Any, StepPlan]] = weakref.WeakKeyDictionary()
"""The plans of each root, by the values of the arguments `units` and `memory`."""


def step(
    model: nn.Module,
    *,
    units: Way | Mapping[str, Way] | None = None,
    memory: float | None = None,
    backwards: int | None = None,
    scaler: Any = None,
) -> UnevenStep:
    """Return a context for one optimizer step in which ranks may run different numbers of micro-batches.

    Example::

        with unshard.step(model) as step:
            for batch in micro_batches:                # any number on each rank, including none
                loss, tokens = loss_sum(model, batch)  # a sum, not a mean
                step.backward(loss, weight=tokens)
        optimizer.step()                               # step.loss is the mean over all tokens of all ranks

    All ranks must enter and leave the context together, and pass the same `units` and `memory`. Inside, a rank may skip
    modules or run no micro-batch at all. When the context ends, the `.grad` of each parameter is the sum of all ranks'
    gradients divided by the sum of all weights.

    `units` chooses how units run. A "keep" unit is all-gathered once when the step begins, and its gradients are
    reduced once when the step ends. In between, it stays unsharded and issues no collectives. A "follow" unit stays
    sharded between its forward and backward, and its gradients are reduced in every micro-batch. Pass one word for all
    units, or a dict such as `{"vision.*": "keep"}` that maps patterns of unit names to words. Units that contain other
    units are always kept. By default, other units are kept as long as they fit into `memory` bytes. The default of
    `memory` is half of the device memory that is free at the first step, or no limit on the CPU.

    `backwards` is the number of `step.backward` calls on this rank, if it is known. Either all ranks pass it or none
    does. With this number, gradients are reduced during this rank's last backward if all units are kept. If some units
    are followed, their micro-batches need no extra messages.

    `scaler` is a gradient scaler, with which `step.backward` scales the loss. `step.loss` is not scaled.

    Raises:
        ArgumentError: `model` is not the root of a sharded model, an argument has a wrong type, a pattern matches no
            unit, the ranks choose different ways, or no unit shards a trained parameter.
        StateError: `step.backward` was called outside the block, or the step has already failed.
    """
    root = _root_of(model, "unshard.step")
    if backwards is not None and (not isinstance(backwards, int) or isinstance(backwards, bool) or backwards < 0):
        raise ArgumentError(f"backwards must be the number of step.backward calls on this rank, got {backwards!r}.")
    if memory is not None and (isinstance(memory, bool) or not isinstance(memory, (int, float)) or memory < 0):
        raise ArgumentError(f"memory must be a number of bytes, got {memory!r}.")
    if scaler is not None and not isinstance(scaler, torch.amp.GradScaler):
        raise ArgumentError(f"scaler must be a gradient scaler, such as unshard.optim.GradScaler, got {scaler!r}.")
    chosen = _checked(units)
    key = (chosen, memory)

    def find_plan() -> StepPlan:
        plans = _plans.setdefault(root, {})
        if key not in plans:
            _refuse_unmanaged(model)
            plans[key] = StepPlan(_followed(model, root, chosen, memory))
        return plans[key]

    return UnevenStep(root, _precisions(model, root), find_plan, backwards, scaler, partial(_explained, root))


def inference(model: nn.Module) -> Scope:
    """Return a context for evaluation or `generate()`, in which ranks may call the model any number of times.

    All ranks must enter the context together. On entry, the context all-gathers all units in the dtypes that they
    compute in. On exit, it reshards them. In between, forwards issue no collectives, and grad mode is off.

    Raises an ArgumentError if `model` is not the root of a sharded model.

    Example::

        with unshard.inference(model):
            for batch in batches:  # any number on each rank
                evaluate(model, batch)
    """
    root = _root_of(model, "unshard.inference")
    return Inference(root, _precisions(model, root))


class Inference(Scope):
    """The context that `unshard.inference` returns."""

    def _begin(self) -> None:
        self._grad_mode = torch.is_grad_enabled()
        torch.set_grad_enabled(False)

    def _leave(self, error: BaseException | None) -> None:
        super()._leave(error)
        torch.set_grad_enabled(getattr(self, "_grad_mode", torch.is_grad_enabled()))


# -- arguments ---------------------------------------------------------------------------------------------


def _root_of(model: nn.Module, call: str) -> Root:
    inside = getattr(model, "_orig_mod", model)  # torch.compile
    state = state_of(inside) if isinstance(inside, nn.Module) else None
    if state is None:
        raise ArgumentError(
            f"{call} needs a sharded model, got {type(model).__name__}. Apply fully_shard or FullyShardedDataParallel "
            "to it first."
        )
    root = state.find_root(inside)
    if root.unit is not state.unit:
        raise ArgumentError(
            f"{call} needs the whole model, but {type(model).__name__} is a part of one. Pass the root."
        )
    return root


def _refuse_unmanaged(model: nn.Module) -> None:
    names = [
        name
        for name, each in model.named_parameters()
        if each.requires_grad and param_group_of(each) is None and unsharded_name(each) is None
    ]
    if names:
        raise ArgumentError(
            f"unshard.step cannot reduce the gradients of {listed(map(repr, names))}, which no unit shards. Shard the "
            "module that has them, do not exclude them with ignored_params, or freeze them."
        )


def _checked(units: Any) -> tuple[tuple[str, str], ...]:
    pairs = tuple(units.items()) if isinstance(units, Mapping) else () if units is None else (("*", units),)
    wrong = [each for _, each in pairs if each not in _WAYS]
    if wrong:
        raise ArgumentError(
            f'units must be "keep", "follow", or a dict from patterns of names to these; got {units!r}.'
        )
    return pairs


def _states(model: nn.Module) -> dict[FSDPState, nn.Module]:
    """Map the state of each unit to the first module that has this state."""
    found: dict[FSDPState, nn.Module] = {}
    for module in model.modules():
        if (state := state_of(module)) is not None:
            found.setdefault(state, module)
    return found


def _precisions(model: nn.Module, root: Root) -> dict[Unit, Precision]:
    if not any(unit.policy.full_precision_in_eval for unit in root.units):
        return dict.fromkeys(root.units, Precision.POLICY)
    return {state.unit: state.unit.precision_in(module.training) for state, module in _states(model).items()}


# -- which units stay gathered -------------------------------------------------------------------------------


def _followed(model: nn.Module, root: Root, chosen: tuple[tuple[str, str], ...], memory: float | None) -> list[Unit]:
    """Return the units that are not kept. Raise if the ranks disagree."""
    names = [unit.name for unit in root.units]
    useless = [pattern for pattern, _ in chosen if not any(matches(name, pattern) for name in names)]
    if useless:
        raise ArgumentError(
            f"No unit matches {listed(map(repr, useless))} in `units`. The units are {listed(names, 20)}."
        )
    fixed = {
        state.unit
        for state, module in _states(model).items()
        # A unit around others is in use while they run. Params of several units are gathered with the first of them.
        if state.unit.sharers or not state.unit.params or any(map(state_of, list(module.modules())[1:]))
    }
    left = _free_memory(root) if memory is None else memory
    ways = []
    for unit in root.units:
        asked = [way for pattern, way in chosen if matches(unit.name, pattern)]
        keeps = unit in fixed or (asked[0] == "keep" if asked else left is None or left >= _bytes(unit))
        if keeps and left is not None:
            left -= _bytes(unit)
        ways.append(int(keeps))
    rows = all_gathered(root, torch.tensor(ways, device=root.unit.device), None)
    if not all(row == ways for row in rows.tolist()):
        raise ArgumentError(
            "The ranks chose different ways to run their units in unshard.step. Pass the same `units` and `memory` on "
            "all ranks."
        )
    return [unit for unit, keeps in zip(root.units, ways, strict=True) if not keeps]


def _free_memory(root: Root) -> int | None:
    """Return half of the free device memory in bytes (minimum over all ranks), or None on the CPU."""
    device = root.unit.device
    if device.type != "cuda":
        return None
    free = torch.cuda.mem_get_info(device)[0]
    free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(all_gathered(root, torch.tensor([free], device=device), None).min()) // 2


def _bytes(unit: Unit) -> int:
    """Return the bytes that a kept unit takes for its unsharded parameters and the sums of its gradients."""
    total = 0
    for param in unit.params:
        dtypes = dtypes_for(param.local.dtype, param.policy)
        trained = param.sharded.requires_grad
        total += param.sharding.numel * (dtypes.compute.itemsize + trained * dtypes.reduce.itemsize)
    return total


def _explained(root: Root, plan: StepPlan) -> str:
    rows = [("unit", "way", "memory on each rank", "traffic")]
    for unit in root.units:
        trained = is_trained(unit)
        if unit in plan.followed:
            often = (
                "2 all-gathers" if unit.options.unshard_in_backward else "1 all-gather"
            ) + ", 1 reduction" * trained
            rows.append((unit.name, "follow", f"{_size(_bytes(unit))} while it runs", f"{often} per micro-batch"))
        else:
            often = "1 all-gather" + ", 1 reduction" * trained
            rows.append((unit.name, "keep", f"{_size(_bytes(unit))} for the step", f"{often} per step"))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    kept = sum(_bytes(unit) for unit in root.units if unit not in plan.followed)
    return "\n".join([*lines, f"Kept units take {_size(kept)} on each rank from the beginning to the end of the step."])


def _size(count: int) -> str:
    return f"{count / 2**20:.1f} MiB" if count >= 2**20 else f"{count / 2**10:.1f} KiB"
