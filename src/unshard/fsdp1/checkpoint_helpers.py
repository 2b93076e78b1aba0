"""PyTorch's helpers for checkpoints refuse what they would get wrong: they do not know our wrapper by its class."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn

from ..errors import UnsupportedError
from ..names import optimizer_parameters
from ..torch_private import HELPERS, HelperCall, helper_call
from .optim_state import units_of

ASKED_FOR = "_fqn_modifiers"
"""What the helpers ask every module for, before they do anything: names of children that do not show in state dicts."""

DROPIN = "unshard.dropin.install() at the start of the program makes these functions work, too"


def answer(module: nn.Module, inner: Callable[[], Any], wrapped: bool) -> Any:
    """What `_fqn_modifiers()` of a sharded module returns: `inner()`, unless the call would go wrong.

    `wrapped`: a wrapper is part of the names of its parameters, and not of those in state dicts.
    """
    call = helper_call()
    if call is not None and not call.knows_wrapper:
        _refuse_optimizers(module, call)
        if wrapped and call.name.startswith("set_") and call.full_state_dict:
            raise UnsupportedError(
                f"{HELPERS}.{call.name} does not know the names of unshard's FullyShardedDataParallel: with "
                "full_state_dict=True it would not find its parameters in the state dict. Call "
                "model.load_state_dict(state_dict) with the full state dict on all ranks. "
                f"{DROPIN}."
            )
    return inner()


def _refuse_optimizers(module: nn.Module, call: HelperCall) -> None:
    """Their state is a shard on each rank, in plain tensors, of which a checkpoint keeps those of one rank."""
    theirs = {id(each) for optim in call.optimizers for each in optimizer_parameters(optim)}
    for unit in units_of(module) if theirs else ():
        if theirs.isdisjoint(id(parameter) for parameter, _ in unit.parameters()):
            continue
        raise UnsupportedError(
            f"{HELPERS}.{call.name} does not know unshard's FullyShardedDataParallel: it would take each rank's shard "
            f"of the optimizer state of {unit.state.unit} for all of it, and a checkpoint would keep one rank's. "
            "Call FullyShardedDataParallel.optim_state_dict(model, optimizer) to save and "
            "FullyShardedDataParallel.optim_state_dict_to_load(model, optimizer, state_dict) to load it, inside "
            "FullyShardedDataParallel.state_dict_type(model, StateDictType.SHARDED_STATE_DICT) for "
            f"torch.distributed.checkpoint. {DROPIN}."
        )


def attach_to_helpers(module: nn.Module) -> None:
    """For a module that has no wrapper, whose class is not ours."""
    reference = weakref.ref(module)  # a module must not refer to itself

    def asked() -> Any:
        alive = reference()
        assert alive is not None
        own = getattr(type(alive), ASKED_FOR, None)
        return answer(alive, dict if own is None else partial(own, alive), wrapped=False)

    module.__dict__[ASKED_FOR] = asked
