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

from ...errors import StateError, UnsupportedError, listed
from ...torch_private import caller_in_checkpoint, inside_backward, stepped_by_plain_scaler
from ..param_group import ParamGroup, param_groups_of
from ..params.param import unsharded_name
from ..params.writes import Steps, steps_of_this_rank
from ..reduce.listeners import LISTENERS
from ..root import Root
from ..shard_lookup import cut_flat, replaced_by_shards, roots_of_groups, sharded_grads_of
from .caller import stack_level_of_program


class _Checked(NamedTuple):
    """An optimizer as it was when it was last looked at."""

    parameters: int
    state: int
    """Which object its state was: a load makes another."""
    groups: weakref.WeakSet[ParamGroup]
    """The param groups of its parameters."""
    steps: set[Steps]
    """What counts the steps for these, and for the units of this rank."""


_checked: weakref.WeakKeyDictionary[Any, _Checked] = weakref.WeakKeyDictionary()
_guarded: weakref.WeakSet[Any] = weakref.WeakSet()
"""Optimizers whose state dict is checked."""


def watch_optimizers() -> None:
    """To be called for every unit: what was looked at before may be out of date now."""
    _register()
    _checked.clear()


@cache
def _register() -> None:
    """Once per process."""
    register_optimizer_step_pre_hook(_look)
    register_optimizer_step_post_hook(_go_on)


def _go_on(optimizer: Any, *unused: Any) -> None:
    """After a step."""
    if "unshard_step_in_backward" not in vars(optimizer):
        note_optimizer_step(optimizer)
        return
    # One that steps in backward has noted it already: shards that were copied since are up to date.
    mine = {id(parameter) for parameter in _parameters(optimizer)}
    for root in _roots(optimizer):
        root.upload_first_units(mine)


def note_optimizer_step(optimizer: Any) -> None:
    """The step writes parameters, or has written them."""
    for steps in _looked_at(optimizer).steps:
        steps.taken += 1


def _parameters(optimizer: Any) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _roots(optimizer: Any) -> list[Root]:
    return roots_of_groups(_looked_at(optimizer).groups)


def _looked_at(optimizer: Any) -> _Checked:
    """As it was before the step. It is looked at again if another rank, in another thread, has made a unit since."""
    return _checked.get(optimizer) or _look_at(optimizer)


def _look_at(optimizer: Any) -> _Checked:
    parameters = _parameters(optimizer)
    groups = param_groups_of(parameters)
    steps = {steps_of_this_rank(), *(group.sharded.steps for group in groups)}
    return _Checked(len(parameters), id(optimizer.state), weakref.WeakSet(groups), steps)


def _look(optimizer: Any, *unused: Any) -> None:
    """Before a step: at what backward has left, and at the optimizer itself if it was not looked at before."""
    count, state = sum([len(group["params"]) for group in optimizer.param_groups]), id(optimizer.state)
    checked = _checked.get(optimizer)
    if checked is None or checked[:2] != (count, state):
        _check(optimizer, _parameters(optimizer))
        checked = _checked[optimizer] = _look_at(optimizer)
    if not inside_backward():
        for root in roots_of_groups(checked.groups):
            root.refuse_unreduced_gradients(lambda: set(map(id, _parameters(optimizer))))
            root.wait_for_uploads()  # of a forward since the backward
    if LISTENERS:
        _refuse_stepped_by_another(optimizer)


def _check(optimizer: Any, parameters: list[Any]) -> None:
    _refuse_unsharded(optimizer, parameters)
    _refuse_replaced(optimizer, parameters)
    if not getattr(optimizer, "streams_state", False):
        _refuse_state_on_the_host(optimizer, parameters)
    _refuse_unsharded_state(optimizer, parameters)
    _warn_of_plain_scaler(parameters)
    if optimizer not in _guarded:
        optimizer.register_state_dict_pre_hook(_refuse_local_state)
        _guarded.add(optimizer)


def _refuse_local_state(optimizer: Any) -> None:
    """Of state that lies in plain tensors, a shard on each rank, a checkpoint keeps that of one rank.

    Noticed where `torch.distributed.checkpoint` itself asks for the state dict. A user may save it for each rank.
    """
    caller = caller_in_checkpoint()
    name = None if caller is None else cut_flat(_parameters(optimizer))
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


def _refuse_stepped_by_another(optimizer: Any) -> None:
    """With the same gradients, during backward."""
    own = vars(optimizer).get("unshard_step_in_backward")
    mine = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    for shard in sharded_grads_of(_parameters(optimizer)):
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
    """An optimizer of parameters that modules do not have any more: nothing would ever learn."""
    replaced = replaced_by_shards(parameters)
    if not replaced:
        return
    some = listed(replaced.values())
    found = f"This {type(optimizer).__name__} was built before the model was sharded, which has replaced its parameters"
    if len(replaced) == len(parameters):
        raise StateError(
            f"{found} ({some}); its steps would change nothing. Build it of model.parameters() afterwards."
        )
    warnings.warn(f"{found} {some}: it will never move these. Build it after all sharding.", stacklevel=5)


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
