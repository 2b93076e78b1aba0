"""What optimizers do to parameters that are sharded, seen through hooks on every optimizer's step."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ..errors import StateError, UnsupportedError
from ..torch_private import caller_in_checkpoint, inside_backward
from .arrivals import REFS
from .faces import full_name
from .flat import replaced_by_shards
from .flat_sharded import FlatSharded
from .grad_shard import GradShard
from .root import Root
from .sharded import Sharded
from .writes import note_optimizer_step

# How many parameters an optimizer had when it was last looked at, and which object its state was: a load makes another.
_checked: weakref.WeakKeyDictionary[Any, tuple[int, int]] = weakref.WeakKeyDictionary()


_guarded: weakref.WeakSet[Any] = weakref.WeakSet()


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
    if "unshard_ahead" not in vars(optimizer):
        note_optimizer_step()
        return
    # One that steps ahead has noted it already: what was sent since is as it should be.
    mine = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    for root in Root.living:
        root.send_first(mine)


def _look(optimizer: Any, *unused: Any) -> None:
    """Before a step: at what backward has left, and at the optimizer itself if it was not looked at before."""
    if not inside_backward():
        for root in Root.living:
            root.refuse_unseen_backward(
                lambda: {id(each) for group in optimizer.param_groups for each in group["params"]}
            )
            root.wait_for_uploads()  # of a forward since the backward
    if REFS:
        _refuse_stepped_by_another(optimizer)
    groups = optimizer.param_groups
    now = sum([len(group["params"]) for group in groups]), id(optimizer.state)
    if _checked.get(optimizer) == now:
        return
    parameters = [parameter for group in groups for parameter in group["params"]]
    _refuse_full_faces(optimizer, parameters)
    _refuse_replaced(optimizer, parameters)
    if not getattr(optimizer, "streams_state", False):
        _refuse_state_on_the_host(optimizer, parameters)
    _refuse_whole_state(optimizer, parameters)
    _guard_state_dict(optimizer)
    _checked[optimizer] = now


def _guard_state_dict(optimizer: Any) -> None:
    if optimizer not in _guarded:
        optimizer.register_state_dict_pre_hook(_refuse_plain_pieces)
        _guarded.add(optimizer)


def _refuse_plain_pieces(optimizer: Any) -> None:
    """Of state that lies in plain tensors, a piece on each rank, a checkpoint keeps those of one rank.

    Noticed where `torch.distributed.checkpoint` itself asks for the state dict. A user may save it for each rank.
    """
    caller = caller_in_checkpoint()
    if caller is None:
        return
    mine = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    for sharded in FlatSharded.living:
        for slot in sharded.slots:
            if slot.cut.world == 1 or id(slot.sharded) not in mine:
                continue
            raise UnsupportedError(
                f"{caller} asks this {type(optimizer).__name__} for its state dict, in which rank {sharded.rank} has "
                f"its own piece of the state of {slot.name!r} as a plain tensor: a checkpoint would keep "
                "the piece of one rank. Save FullyShardedDataParallel.optim_state_dict(model, optimizer) instead, and "
                "load it with FullyShardedDataParallel.optim_state_dict_to_load(model, optimizer, state_dict), inside "
                "FullyShardedDataParallel.state_dict_type(model, StateDictType.SHARDED_STATE_DICT)."
            )


def _refuse_stepped_by_another(optimizer: Any) -> None:
    """With the same gradients, during backward."""
    own = vars(optimizer).get("unshard_ahead")
    mine = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    for shard in GradShard.living:
        if (
            shard.stepper is not None
            and shard.stepper() not in (None, own)
            and not mine.isdisjoint(map(id, shard.parameters()))
        ):
            raise StateError(
                f"Another optimizer, made flat with ahead=True, has stepped {shard.names()} during backward. Tell it "
                "to stop with flat(that_optimizer, ahead=False) before this one takes over. If you have dropped it, it "
                "is part of a reference cycle (a hook that names it is enough): gc.collect() ends that."
            )


def _refuse_replaced(optimizer: Any, parameters: list[Any]) -> None:
    """An optimizer of parameters that modules do not have any more: nothing would ever learn."""
    replaced = replaced_by_shards(parameters)
    if not replaced:
        return
    some = ", ".join(list(replaced.values())[:3]) + (", ..." if len(replaced) > 3 else "")
    found = f"This {type(optimizer).__name__} was built before the model was sharded, which has replaced its parameters"
    if len(replaced) == len(parameters):
        raise StateError(
            f"{found} ({some}); its steps would change nothing. Build it of model.parameters() afterwards."
        )
    warnings.warn(f"{found} {some}: it will never move these. Build it after all sharding.", stacklevel=5)


def _refuse_full_faces(optimizer: Any, parameters: list[Any]) -> None:
    """An optimizer that was built while parameters were gathered would step copies."""
    for parameter in parameters:
        if name := full_name(parameter):
            raise StateError(
                f"This {type(optimizer).__name__} holds the gathered parameter {name!r} instead of the sharded one, so "
                "its steps would be lost. Build optimizers while the model is at rest: before the first forward, or "
                "after backward or reshard()."
            )


def _refuse_whole_state(optimizer: Any, parameters: list[Any]) -> None:
    """State that was made for, or saved from, the parameters before they were sharded."""
    entries = {id(each): optimizer.state[each] for each in parameters if each in optimizer.state}
    for sharded in (*Sharded.living, *FlatSharded.living) if entries else ():
        for slot in sharded.slots if sharded.has_own_faces else ():
            tensors, whole = _tensors(entries.get(id(slot.sharded))), torch.Size(slot.cut.shape)
            # Some optimizers keep other things of that shape, besides; or local tensors, which a rank alone has whole.
            if not tensors or slot.local.shape == whole or not all(_is(whole, each) for each in tensors.values()):
                continue
            distributed = isinstance(slot.sharded, DTensor)
            raise StateError(
                f"This {type(optimizer).__name__} has state of the whole parameter {slot.name!r}: the shape of "
                f"{next(iter(tensors))!r} is {tuple(whole)}. The parameter was sharded{' to a DTensor' * distributed}, "
                f"its shape is {tuple(slot.local.shape)} on rank {sharded.rank}. Build the optimizer after the model "
                f"was sharded, and load what was saved from the whole model with {_LOADERS[distributed]}."
            )


_LOADERS = {
    False: "optimizer.load_state_dict(FullyShardedDataParallel.optim_state_dict_to_load(model, optimizer, state))",
    True: "torch.distributed.checkpoint.state_dict.set_optimizer_state_dict",
}


def _is(whole: torch.Size, tensor: torch.Tensor) -> bool:
    return tensor.shape == whole and not isinstance(tensor, DTensor)


def _tensors(entry: Any) -> dict[Any, torch.Tensor]:
    """What of a parameter's state has dimensions; counters have none."""
    items = entry.items() if isinstance(entry, Mapping) else ()
    return {key: value for key, value in items if isinstance(value, torch.Tensor) and value.ndim}


def _refuse_state_on_the_host(optimizer: Any, parameters: list[Any]) -> None:
    """It would keep the state on the device, where a user has said there is no room for it."""
    wanted = set(map(id, parameters))
    for sharded in Sharded.living:
        names = [slot.name for slot in sharded.slots if id(slot.sharded) in wanted]
        if sharded.residence.states is not None and names:
            listed = ", ".join([*map(repr, names[:4]), *(["..."] if len(names) > 4 else [])])
            raise StateError(
                f"This {type(optimizer).__name__} steps {listed} of a unit whose OptimizerOffloadPolicy keeps "
                "optimizer state on the host. Only flat optimizers bring it to the device and back. After building it, "
                "add: optimizer = unshard.optim.flat(optimizer). One that cannot be flat needs units with another "
                "offload_policy."
            )
