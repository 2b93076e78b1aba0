"""What optimizers do to parameters that are sharded, seen through hooks on every optimizer's step."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Mapping
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ...comm.order.check import Order
from ...errors import StateError, UnsupportedError, listed
from ...names import optimizer_parameters
from ...torch_private import (
    caller_in_checkpoint,
    inside_backward,
    never_compiled,
    own_parameters,
    stack_level_of_program,
    stepped_by_plain_scaler,
)
from ..param_group import ParamGroup, param_groups_of
from ..params.param import Replacements, Steps, dropped_name, steps_of_this_rank, unsharded_name
from ..reduce.sharded_grad import LISTENERS
from ..root import Root
from ..shard_lookup import cut_flat, lost_to, orders_of_groups, roots_of_groups, sharded_grads_of
from .saved_shards import rank_of_other_shard
from .shared_parameters import all_modules


class _Checked(NamedTuple):
    """An optimizer as it was when it was last looked at."""

    parameters: int
    state: int
    """Which object its state was: a load makes another."""
    replacements: int
    """How many parameters had been replaced, of any model."""
    groups: weakref.WeakSet[ParamGroup]
    """The param groups of its parameters."""
    steps: set[Steps]
    """What counts the steps for these, and for the units of this rank."""
    orders: list[Order]
    """What compares the steps of the ranks, for each process group of these."""


_checked: weakref.WeakKeyDictionary[Any, _Checked] = weakref.WeakKeyDictionary()
_guarded: weakref.WeakSet[Any] = weakref.WeakSet()
"""Optimizers whose state dict is checked."""


def watch_optimizers() -> None:
    """To be called for every unit: what was looked at before may be out of date now."""
    _register()
    _checked.clear()


@cache
def _register() -> None:
    """Once per process. A compiled step calls the hooks between its graphs: traced, they would run only once."""
    register_optimizer_step_pre_hook(never_compiled(_look))
    register_optimizer_step_post_hook(never_compiled(_go_on))


def _go_on(optimizer: Any, *unused: Any) -> None:
    """After a step."""
    if "unshard_step_in_backward" not in vars(optimizer):
        note_optimizer_step(optimizer)
        return
    # One that steps in backward has noted it already: shards that were copied since are up to date.
    mine = {id(parameter) for parameter in optimizer_parameters(optimizer)}
    for root in _roots(optimizer):
        root.upload_first_units(mine)


def note_optimizer_step(optimizer: Any) -> None:
    """The step writes parameters, or has written them."""
    for steps in _looked_at(optimizer).steps:
        steps.taken += 1


def _roots(optimizer: Any) -> list[Root]:
    return roots_of_groups(_looked_at(optimizer).groups)


def _looked_at(optimizer: Any) -> _Checked:
    """As it was before the step. It is looked at again if another rank, in another thread, has made a unit since."""
    return _checked.get(optimizer) or _look_at(optimizer)


def _look_at(optimizer: Any) -> _Checked:
    parameters = optimizer_parameters(optimizer)
    groups = param_groups_of(parameters)
    steps = {steps_of_this_rank(), *(group.sharded.steps for group in groups)}
    orders = orders_of_groups(groups)
    return _Checked(len(parameters), id(optimizer.state), Replacements.seen, weakref.WeakSet(groups), steps, orders)


def _look(optimizer: Any, *unused: Any) -> None:
    """Before a step: at what backward has left, and at the optimizer itself if it was not looked at before."""
    count = sum([len(group["params"]) for group in optimizer.param_groups])
    seen = (count, id(optimizer.state), Replacements.seen)
    checked = _checked.get(optimizer)
    if checked is None or checked[:3] != seen:
        _check(optimizer, optimizer_parameters(optimizer))
        checked = _checked[optimizer] = _look_at(optimizer)
    if not inside_backward():
        for root in roots_of_groups(checked.groups):
            root.before_step(lambda: set(map(id, optimizer_parameters(optimizer))))
            root.wait_for_uploads()  # of a forward since the backward
        for order in checked.orders:
            order.compare_step()
    if LISTENERS:
        _refuse_stepped_by_another(optimizer)


def _check(optimizer: Any, parameters: list[Any]) -> None:
    _refuse_unsharded(optimizer, parameters)
    _refuse_replaced(optimizer, parameters)
    _warn_of_dropped(optimizer, parameters)
    if not getattr(optimizer, "streams_state", False):
        _refuse_state_on_the_host(optimizer, parameters)
    _refuse_unsharded_state(optimizer, parameters)
    _warn_of_plain_scaler(parameters)
    _warn_of_parts(optimizer, parameters)
    _refuse_state_of_another_rank(optimizer, parameters)
    if optimizer not in _guarded:
        optimizer.register_state_dict_pre_hook(_refuse_local_state)
        optimizer.register_load_state_dict_post_hook(_forget)
        _guarded.add(optimizer)


def _forget(optimizer: Any) -> None:
    """After a load, it is looked at again. The id of the new state may be that of the old one, which is gone."""
    _checked.pop(optimizer, None)


def _refuse_local_state(optimizer: Any) -> None:
    """Of state that lies in plain tensors, a shard on each rank, a checkpoint keeps that of one rank.

    Noticed where `torch.distributed.checkpoint` itself asks for the state dict. A user may save it for each rank.
    """
    caller = caller_in_checkpoint()
    name = None if caller is None else cut_flat(optimizer_parameters(optimizer))
    if name is not None:
        raise UnsupportedError(
            f"{caller} asks this {type(optimizer).__name__} for its state dict, in which rank {dist.get_rank()} has "
            f"its own shard of the state of {name!r} as a plain tensor: a checkpoint would keep that of one rank. Save "
            "FullyShardedDataParallel.optim_state_dict(model, optimizer) instead, and load it with "
            "FullyShardedDataParallel.optim_state_dict_to_load(model, optimizer, state_dict), inside "
            "FullyShardedDataParallel.state_dict_type(model, StateDictType.SHARDED_STATE_DICT)."
        )


def _warn_of_plain_scaler(parameters: list[Any]) -> None:
    """Noticed at the first step, and no error: a rank that skips it would not raise."""
    name = cut_flat(parameters) if stepped_by_plain_scaler() else None
    if name is not None:
        warnings.warn(
            f"torch.amp.GradScaler looks for infinities in this rank's shard of {name!r} only, so ranks may skip "
            "different steps and train different weights. Use unshard.optim.ShardedGradScaler.",
            stacklevel=stack_level_of_program(),
        )


def _warn_of_parts(optimizer: Any, parameters: list[Any]) -> None:
    """Plain tensors with this rank's elements do not know the rest of the parameter, as DTensors do."""
    over = next((_OVER_WHOLE[each] for each in type(optimizer).__mro__ if each in _OVER_WHOLE), None)
    name = cut_flat(parameters) if over else None
    if name is not None:
        warnings.warn(
            f"{type(optimizer).__name__} computes {over}, but rank {dist.get_rank()} has only its own elements of "
            f"{name!r}, as a plain tensor: the steps differ from those of the unsharded model. Use an optimizer that "
            "steps each element by itself (AdamW, SGD), or fully_shard.",
            stacklevel=stack_level_of_program(),
        )


_OVER_WHOLE: dict[type, str] = {
    torch.optim.LBFGS: "inner products over all parameters",
    torch.optim.Adafactor: "means over the rows and columns of each parameter",
}


def _refuse_state_of_another_rank(optimizer: Any, parameters: list[Any]) -> None:
    """Saved by one rank and loaded by all: moments of other elements.

    DTensors know whose shards they are. Plain tensors tell by their size alone: shards of one size look the same.
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
    """Only for torch's optimizers, all of whose states have the parameter's shape, or no dimensions."""
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


_EACH_ITS_OWN = (
    "optimizer.state_dict() has the shards of one rank, and each rank can load only what it saved itself. For a file "
    "of all ranks, save"
)


def _refuse_stepped_by_another(optimizer: Any) -> None:
    """With the same gradients, during backward."""
    own = vars(optimizer).get("unshard_step_in_backward")
    mine = {id(parameter) for parameter in optimizer_parameters(optimizer)}
    for shard in sharded_grads_of(optimizer_parameters(optimizer)):
        if (
            shard.stepper is not None
            and shard.stepper() not in (None, own)
            and not mine.isdisjoint(map(id, shard.parameters()))
        ):
            raise StateError(
                f"Another optimizer, with flat(..., step_in_backward=True), has stepped {shard.names()} during "
                "backward. Turn that off with flat(that_optimizer, step_in_backward=False) before this one steps. If "
                "you have dropped it, it is part of a reference cycle (a hook that names it is enough): call "
                "gc.collect()."
            )


def _refuse_replaced(optimizer: Any, parameters: list[Any]) -> None:
    """An optimizer of parameters that modules do not have any more: they would never learn."""
    by_sharding, by_program = lost_to(parameters)
    if not by_sharding and not by_program:
        return
    elsewhere = {id(each) for module in all_modules() for each in own_parameters(module).values()}
    early = [name for key, name in by_sharding.items() if key not in elsewhere]
    late = [name for key, name in by_program.items() if key not in elsewhere]
    kind = type(optimizer).__name__
    if early:
        raise StateError(
            f"This {kind} was built before the model was sharded, which has replaced {len(early)} of its "
            f"{len(parameters)} parameters ({listed(early)}); its steps would change nothing of these. Build it of "
            "model.parameters() after all sharding."
        )
    if late:
        raise StateError(
            f"This {kind} holds {len(late)} of its {len(parameters)} parameters ({listed(late)}) as they were before "
            "the model was given others, by load_state_dict(..., assign=True) or an assignment to a module's "
            "attribute; its steps would change nothing of these. Build the optimizer after that, or load without "
            "assign=True, which keeps the parameters."
        )


def _warn_of_dropped(optimizer: Any, parameters: list[Any]) -> None:
    """An optimizer that was built before parameters were tied still has those that the model has no more."""
    dropped = [names for each in parameters if (names := dropped_name(each)) is not None]
    if dropped:
        pairs = listed(f"{name} is {owner} now" for name, owner in dropped)
        warnings.warn(
            f"This {type(optimizer).__name__} was built before parameters of the model were tied to others: {pairs}. "
            "It still holds the former ones, which no module has any more. Build it after tying.",
            stacklevel=5,
        )


def _refuse_unsharded(optimizer: Any, parameters: list[Any]) -> None:
    """An optimizer that was built while parameters were gathered would step copies."""
    for parameter in parameters:
        if name := unsharded_name(parameter):
            raise StateError(
                f"This {type(optimizer).__name__} holds the gathered parameter {name!r} instead of the sharded one, so "
                "its steps would be lost. Build optimizers while the model is at rest: before the first forward, or "
                "after backward or reshard()."
            )


def _refuse_unsharded_state(optimizer: Any, parameters: list[Any]) -> None:
    """State that was made for, or saved from, the parameters before they were sharded."""
    entries = {id(each): optimizer.state[each] for each in parameters if each in optimizer.state}
    for group in param_groups_of(parameters) if entries else ():
        sharded = group.sharded
        for param in sharded.params if sharded.one_parameter_each else ():
            tensors, full = _tensors(entries.get(id(param.sharded))), torch.Size(param.sharding.shape)
            # Some optimizers keep other things of that shape, besides; or local tensors, full on a rank alone.
            if not tensors or param.local.shape == full or not all(_is(full, each) for each in tensors.values()):
                continue
            distributed = isinstance(param.sharded, DTensor)
            raise StateError(
                f"This {type(optimizer).__name__} has state of the unsharded parameter {param.name!r}: the shape of "
                f"{next(iter(tensors))!r} is {tuple(full)}. The parameter was sharded{' to a DTensor' * distributed}, "
                f"its shape is {tuple(param.local.shape)} on rank {sharded.rank}. Build the optimizer after the model "
                f"was sharded, and load what was saved from the unsharded model with {_LOADERS[distributed]}."
            )


_LOADERS = {
    False: "optimizer.load_state_dict(FullyShardedDataParallel.optim_state_dict_to_load(model, optimizer, state))",
    True: "torch.distributed.checkpoint.state_dict.set_optimizer_state_dict",
}


def _is(full: torch.Size, tensor: torch.Tensor) -> bool:
    return tensor.shape == full and not isinstance(tensor, DTensor)


def _tensors(entry: Any) -> dict[Any, torch.Tensor]:
    """What of a parameter's state has dimensions; counters have none."""
    items = entry.items() if isinstance(entry, Mapping) else ()
    return {key: value for key, value in items if isinstance(value, torch.Tensor) and value.ndim}


def _refuse_state_on_the_host(optimizer: Any, parameters: list[Any]) -> None:
    """It would keep the state on the device, where a user has said there is no room for it."""
    wanted = set(map(id, parameters))
    for group in param_groups_of(parameters):
        sharded = group.sharded
        names = [param.name for param in sharded.params if id(param.sharded) in wanted]
        if sharded.offload.states is not None and names:
            some = listed(map(repr, names), 4)
            raise StateError(
                f"This {type(optimizer).__name__} steps {some} of a unit whose OptimizerOffloadPolicy keeps "
                "optimizer state on the host. Only flat optimizers bring it to the device and back. After building it, "
                "add: optimizer = unshard.optim.flat(optimizer). One that cannot be flat needs units with another "
                "offload_policy."
            )
