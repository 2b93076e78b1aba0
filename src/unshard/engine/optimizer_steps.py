"""Hooks that run at every optimizer step. They count steps, prepare roots, and check new or changed optimizers."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Mapping
from functools import cache
from operator import attrgetter
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.autograd.graph import increment_version
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ..comm.order.check import Order
from ..errors import StateError, UnsupportedError, listed
from ..names import optimizer_parameters
from ..torch_private import (
    caller_in_checkpoint,
    inside_backward,
    never_compiled,
    own_parameters,
    stack_level_of_program,
    stepped_by_plain_scaler,
)
from . import observer
from .checks import rank_of_other_shard, refuse_gradients_past_outputs
from .param_group import ParamGroup, param_group_of, param_groups_of
from .params.param import Replacements, Steps, dropped_name, former_name, steps_of_this_rank, unsharded_name
from .root import Root
from .shard_lookup import built_too_early, cut_flat, orders_of_groups, roots_of_groups, sharded_grads_of
from .sharded_grad import LISTENERS
from .unmanaged import all_modules, warn_of_unsharded_root


class _Checked(NamedTuple):
    """Results of an optimizer's last check. A step repeats the check if one of the first three fields has changed."""

    parameters: int
    state: int
    """The id of `optimizer.state`. Loading a state dict replaces that object."""
    replacements: int
    """The value of `Replacements.seen`, which counts replaced parameters of all models."""
    groups: weakref.WeakSet[ParamGroup]
    """The param groups of the optimizer's parameters."""
    steps: set[Steps]
    """Step counters of these param groups and of this rank."""
    orders: list[Order]
    """Order checks of these param groups' process groups. They compare optimizer steps across ranks."""


_shown = attrgetter("shown")
_checked: weakref.WeakKeyDictionary[Any, _Checked] = weakref.WeakKeyDictionary()
_guarded: weakref.WeakSet[Any] = weakref.WeakSet()


def watch_optimizers() -> None:
    """Register the hooks and invalidate earlier checks. Call this whenever a unit is created."""
    _register()
    _checked.clear()


@cache
def _register() -> None:
    # Never compiled, because a compiled step would skip the hooks after tracing.
    register_optimizer_step_pre_hook(never_compiled(_before_step))
    register_optimizer_step_post_hook(never_compiled(_after_step))


def _before_step(optimizer: Any, *unused: Any) -> None:
    count = sum([len(group["params"]) for group in optimizer.param_groups])
    seen = (count, id(optimizer.state), Replacements.seen)
    checked = _checked.get(optimizer)
    if checked is None or checked[:3] != seen:
        check_optimizer(optimizer, optimizer_parameters(optimizer))
        if optimizer not in _guarded:
            optimizer.register_state_dict_pre_hook(refuse_local_state)
            # Loading frees the old state, and Python may reuse its id for the new one.
            optimizer.register_load_state_dict_post_hook(_forget)
            _guarded.add(optimizer)
        checked = _checked[optimizer] = _look_at(optimizer)
    if not inside_backward():
        for root in roots_of_groups(checked.groups):
            if not root.in_backward and not root.in_forward:
                _prepare(root, optimizer)
            root.wait_for_uploads()  # a forward since the backward may have queued uploads
        for order in checked.orders:
            order.compare_step()
    if LISTENERS:
        refuse_stepped_by_another(optimizer)


def _prepare(root: Root, optimizer: Any) -> None:
    if root.scope is not None:
        root.scope.refuse(f"{type(optimizer).__name__}.step()", "Kept units would not see the new parameters")
    if any(map(_shown, root.units)):  # a loop in C, because it runs in every step
        for unit in root.units:
            unit.show_sharded()  # the program reads the stepped parameters next
    if not root.backward_order and not root.open_graphs:
        return
    stepped = set(map(id, optimizer_parameters(optimizer)))
    for unit in root.units if root.backward_order else ():
        # Gradients that no hook has seen are not reduced. A loss of parameters alone, of a unit that stays unsharded,
        # gives such gradients. A backward that follows before the step reduces them as well.
        if unit.has_untaken_gradients and not stepped.isdisjoint(id(param.sharded) for param in unit.params):
            root.reset()
            refuse_gradients_past_outputs(unit)
    # The step counts as a write to the unsharded parameters, so autograd refuses the backward of a graph that has saved
    # them, as it does without sharding. Otherwise such a backward would all-gather and silently use the new values.
    for group in root.param_groups if root.open_graphs else ():
        for param in group.params:
            if param.unsharded is not None and id(param.sharded) in stepped and group.sharded.is_stepped(param):
                increment_version(param.unsharded)
    root.open_graphs = 0


def _forget(optimizer: Any) -> None:
    _checked.pop(optimizer, None)


def _after_step(optimizer: Any, *unused: Any) -> None:
    if observer.current is not None:
        observer.current.stepped(optimizer)
    if "unshard_step_in_backward" not in vars(optimizer):
        note_optimizer_step(optimizer)
        return
    # An optimizer that steps in backward has already counted the step. Shards uploaded since then are up to date.
    mine = set(map(id, optimizer_parameters(optimizer)))
    for root in roots_of_groups(_last_checked(optimizer).groups):
        root.upload_first_units(mine)


def note_optimizer_step(optimizer: Any) -> None:
    """Count a step of `optimizer`. Call this once per step, before or after the step writes the parameters."""
    for steps in _last_checked(optimizer).steps:
        steps.taken += 1


def _last_checked(optimizer: Any) -> _Checked:
    # Another rank, running in another thread, may have built a unit, which clears all checks.
    return _checked.get(optimizer) or _look_at(optimizer)


def _look_at(optimizer: Any) -> _Checked:
    parameters = optimizer_parameters(optimizer)
    groups = param_groups_of(parameters)
    steps = {steps_of_this_rank(), *(group.sharded.steps for group in groups)}
    orders = orders_of_groups(groups)
    return _Checked(len(parameters), id(optimizer.state), Replacements.seen, weakref.WeakSet(groups), steps, orders)


# -- checks at the first step -----------------------------------------------------------------------------

_LOADERS = {
    False: "optimizer.load_state_dict(FullyShardedDataParallel.optim_state_dict_to_load(model, optimizer, state))",
    True: "torch.distributed.checkpoint.state_dict.set_optimizer_state_dict",
}
"""The call that loads full optimizer state. The key is True if the parameters are DTensors."""

_EACH_ITS_OWN = (
    "optimizer.state_dict() has the shards of one rank, and each rank can load only what it saved itself. For a file "
    "of all ranks, save"
)

_OVER_WHOLE: dict[type, str] = {
    torch.optim.LBFGS: "inner products over all parameters",
    torch.optim.Adafactor: "means over the rows and columns of each parameter",
}


def check_optimizer(optimizer: Any, parameters: list[Any]) -> None:
    _refuse_unsharded(optimizer, parameters)
    _refuse_replaced(optimizer, parameters)
    _warn_of_dropped(optimizer, parameters)
    warn_of_unsharded_root(parameters)
    if not getattr(optimizer, "streams_state", False):
        _refuse_state_on_the_host(optimizer, parameters)
    _refuse_unsharded_state(optimizer, parameters)
    _warn_of_cut_parameters(optimizer, parameters)
    _refuse_state_of_another_rank(optimizer, parameters)


def refuse_local_state(optimizer: Any) -> None:
    """Raise if `torch.distributed.checkpoint` asks for plain-tensor state. DCP would save only one rank's shards."""
    caller = caller_in_checkpoint()
    name = None if caller is None else cut_flat(optimizer_parameters(optimizer))
    if name is not None:
        raise UnsupportedError(
            f"{caller} asks this {type(optimizer).__name__} for its state dict, in which rank {dist.get_rank()} has "
            f"its own shard of the state of {name!r} as a plain tensor: a checkpoint would keep one rank's shard. Save "
            "FullyShardedDataParallel.optim_state_dict(model, optimizer) instead, and load it with "
            "FullyShardedDataParallel.optim_state_dict_to_load(model, optimizer, state_dict), inside "
            "FullyShardedDataParallel.state_dict_type(model, StateDictType.SHARDED_STATE_DICT)."
        )


def _warn_of_cut_parameters(optimizer: Any, parameters: list[Any]) -> None:
    over = next((_OVER_WHOLE[each] for each in type(optimizer).__mro__ if each in _OVER_WHOLE), None)
    name = cut_flat(parameters)
    if name is not None and stepped_by_plain_scaler():  # not an error: a rank that skips this step would not raise
        warnings.warn(
            f"torch.amp.GradScaler looks for infinities only in this rank's shard of {name!r}, so ranks may skip "
            "different steps and train different weights. Use unshard.optim.ShardedGradScaler.",
            stacklevel=stack_level_of_program(),
        )
    if name is not None and over is not None:
        warnings.warn(
            f"{type(optimizer).__name__} computes {over}, but rank {dist.get_rank()} has only its own elements of "
            f"{name!r}, as a plain tensor: the steps differ from those of the unsharded model. Use an optimizer that "
            "steps each element by itself (AdamW, SGD), or fully_shard.",
            stacklevel=stack_level_of_program(),
        )


def _refuse_state_of_another_rank(optimizer: Any, parameters: list[Any]) -> None:
    """Raise if this rank has loaded optimizer state that another rank saved for its own elements.

    A DTensor records the rank that created it. For plain tensors, this check can only compare sizes.
    """
    _refuse_state_of_other_size(optimizer, parameters)
    for entry in optimizer.state.values():
        for key, value in _tensors(entry).items():
            other = rank_of_other_shard(value)
            if other is not None:
                raise StateError(
                    f"This {type(optimizer).__name__} has loaded the state of rank {other} on rank {dist.get_rank()} "
                    f"({key!r} of a parameter of shape {tuple(value.shape)}). {_EACH_ITS_OWN} "
                    "what torch.distributed.checkpoint.state_dict.get_optimizer_state_dict returns, and load it with "
                    f"{_LOADERS[True]}."
                )


def _refuse_state_of_other_size(optimizer: Any, parameters: list[Any]) -> None:
    """Raise if state and its parameter differ in shape. Skip optimizers that may use other shapes for their state."""
    kind = type(optimizer)
    if not kind.__module__.startswith("torch.optim.") or kind in _OVER_WHOLE:
        return
    for each in parameters:
        wrong = {key: its for key, its in _tensors(optimizer.state.get(each)).items() if its.shape != each.shape}
        name = cut_flat([each]) if wrong else None
        if name is not None:
            key, state = next(iter(wrong.items()))
            raise StateError(
                f"This {kind.__name__} has {key!r} of {state.numel()} elements for {name!r}, of which rank "
                f"{dist.get_rank()} has {each.numel()}: it has loaded the state of another rank, or of another number "
                f"of ranks. {_EACH_ITS_OWN} what FullyShardedDataParallel.optim_state_dict(model, optimizer) returns, "
                f"and load it with {_LOADERS[False]}."
            )


def refuse_stepped_by_another(optimizer: Any) -> None:
    """Raise if another optimizer has already stepped with the same gradients during backward."""
    own = vars(optimizer).get("unshard_step_in_backward")
    parameters = optimizer_parameters(optimizer)
    mine = set(map(id, parameters))
    for shard in sharded_grads_of(parameters):
        if (
            shard.stepper is not None
            and shard.stepper() not in (None, own)
            and not mine.isdisjoint(map(id, shard.parameters))
        ):
            raise StateError(
                f"Another optimizer, with flat(..., step_in_backward=True), has stepped {shard.names()} during "
                "backward. Turn that off with flat(that_optimizer, step_in_backward=False) before this one steps. If "
                "you have dropped it, it is part of a reference cycle (a hook that names it is enough): call "
                "gc.collect()."
            )


def _refuse_replaced(optimizer: Any, parameters: list[Any]) -> None:
    held = set(map(id, parameters))
    by_sharding: dict[int, str] = {}
    by_program: dict[int, str] = {}
    for each in parameters:
        group = param_group_of(each)
        if group is None:
            continue
        for param in group.params:
            now = param.sharded
            if now is each or id(now) in held or not now.requires_grad:
                continue
            name = former_name(each)
            if name is not None and (name == param.name or not group.sharded.one_parameter_each):
                by_program[id(each)] = name
            elif param.origin() is each:
                by_sharding[id(each)] = param.name
    if not by_sharding and not by_program:
        return
    elsewhere = {id(each) for module in all_modules() for each in own_parameters(module).values()}
    early = [name for key, name in by_sharding.items() if key not in elsewhere]
    late = [name for key, name in by_program.items() if key not in elsewhere]
    kind = type(optimizer).__name__
    if early:
        raise StateError(
            f"This {kind} {built_too_early(early)} ({len(early)} of its {len(parameters)} parameters). Its steps would "
            "not change the model. Build it from model.parameters() after all sharding."
        )
    if late:
        raise StateError(
            f"This {kind} holds {len(late)} of its {len(parameters)} parameters ({listed(late)}) as they were before "
            "the model was given others, by load_state_dict(..., assign=True) or an assignment to a module's "
            "attribute; its steps would not change the model. Build the optimizer after that, or load without "
            "assign=True, which keeps the parameters."
        )


def _warn_of_dropped(optimizer: Any, parameters: list[Any]) -> None:
    dropped = [names for each in parameters if (names := dropped_name(each)) is not None]
    if dropped:
        pairs = listed(f"{name} is {owner} now" for name, owner in dropped)
        warnings.warn(
            f"This {type(optimizer).__name__} was built before parameters of the model were tied to others: {pairs}. "
            "It still holds the former ones, which no module has. Build it after tying.",
            stacklevel=stack_level_of_program(),
        )


def _refuse_unsharded(optimizer: Any, parameters: list[Any]) -> None:
    for parameter in parameters:
        if name := unsharded_name(parameter):
            raise StateError(
                f"This {type(optimizer).__name__} holds the unsharded parameter {name!r} instead of the sharded one. "
                "Its steps would be lost. Build optimizers while the model is at rest: before the first forward, or "
                "after backward or reshard()."
            )


def _refuse_unsharded_state(optimizer: Any, parameters: list[Any]) -> None:
    """Raise if optimizer state was created for, or saved from, the parameters before they were sharded."""
    entries = {id(each): optimizer.state[each] for each in parameters if each in optimizer.state}
    for group in param_groups_of(parameters) if entries else ():
        sharded = group.sharded
        for param in sharded.params if sharded.one_parameter_each else ():
            tensors, full = _tensors(entries.get(id(param.sharded))), torch.Size(param.sharding.shape)
            # All must be full: some optimizers keep full tensors besides sharded ones. On one rank, all are full.
            whole = all(each.shape == full and not isinstance(each, DTensor) for each in tensors.values())
            if not tensors or param.local.shape == full or not whole:
                continue
            distributed = isinstance(param.sharded, DTensor)
            raise StateError(
                f"This {type(optimizer).__name__} has state of the unsharded parameter {param.name!r}: the shape of "
                f"{next(iter(tensors))!r} is {tuple(full)}. The parameter was sharded{' to a DTensor' * distributed}, "
                f"its shape is {tuple(param.local.shape)} on rank {sharded.rank}. Build the optimizer after the model "
                f"was sharded, and load what was saved from the unsharded model with {_LOADERS[distributed]}."
            )


def _tensors(entry: Any) -> dict[Any, torch.Tensor]:
    """Return the tensors of a parameter's state, except those without dimensions, such as counters."""
    items = entry.items() if isinstance(entry, Mapping) else ()
    return {key: value for key, value in items if isinstance(value, torch.Tensor) and value.ndim}


def _refuse_state_on_the_host(optimizer: Any, parameters: list[Any]) -> None:
    wanted = set(map(id, parameters))
    for group in param_groups_of(parameters):
        sharded = group.sharded
        names = [param.name for param in sharded.params if id(param.sharded) in wanted]
        if sharded.offload.states is not None and names:
            some = listed(map(repr, names), 4)
            raise StateError(
                f"This {type(optimizer).__name__} steps {some} of a unit whose OptimizerOffloadPolicy keeps "
                "optimizer state on the host. Only flat optimizers bring it to the device and back. After building it, "
                "add: optimizer = unshard.optim.flat(optimizer). An optimizer that cannot be flat needs units with "
                "another offload_policy."
            )
