"""Which original parameters are inside the parameters that an optimizer of a wrapped model has.

PyTorch's checkpoint helpers do not know that, so they are refused here.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from ..engine.api import FlatShardedParams
from ..errors import UnsupportedError
from ..names import clean_tensor_name, optimizer_parameters
from ..state.model import OptimizedParam, optimized_param
from ..torch_private import HELPERS, HelperCall, helper_call
from .flat_parameter import flat_sharded_of, in_memory_order, shard_begins
from .state import WrapperState, wrapper_states


@dataclass(frozen=True)
class UnitParams:
    """A unit with parameters, and their original names, in order."""

    state: WrapperState
    sharded: FlatShardedParams
    names: tuple[str, ...]
    parameters: list[tuple[nn.Parameter, list[OptimizedParam]]]
    """The parameters that an optimizer has, each with the original parameters inside it."""

    @property
    def group(self) -> Any:
        """The process group of the ranks that hold the shards; None if the unit is not sharded."""
        return self.state.call.groups.own if self.state.call.groups.traits.shards else None

    def shard(self, states: dict[int, torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
        """This rank's shard of one state, from the states of the optimizer's parameters, by number; zero otherwise."""
        if states and not self.sharded.originals:
            return next(iter(states.values()))
        flat = torch.zeros_like(self.sharded.flat.local, dtype=dtype)
        for number, begin in shard_begins(self.sharded, self.state.transports[0].rank):
            if number in states:
                here = in_memory_order(states[number], self.sharded.params[number])
                flat[begin : begin + here.numel()] = here.to(flat.device)
        return flat

    def of_param(self, unsharded: torch.Tensor, number: int) -> torch.Tensor:
        """A copy of one original parameter's elements of an unsharded state, in the parameter's shape."""
        cut = self.sharded.params[number].sharding
        return unsharded.as_strided(cut.shape, cut.stride, cut.begin).clone()  # type: ignore[arg-type, union-attr]


def units_of(model: nn.Module) -> list[UnitParams]:
    """The units below `model` that have parameters, in the order of `modules()`."""
    paths = {id(module): clean_tensor_name(f"{name}.") if name else "" for name, module in model.named_modules()}
    found = []
    for state in wrapper_states(model):
        sharded = flat_sharded_of(state.unit)
        if sharded is None:
            continue
        first = [param.locations[0] for param in sharded.params]
        names = tuple(f"{paths.get(id(each.module()), '')}{each.name}" for each in first)
        group = state.unit.param_groups[0]
        pairs = [optimized_param(name, group, param) for name, param in zip(names, sharded.params, strict=True)]
        parameters = [(parameter, [inside]) for parameter, inside in pairs]
        if not sharded.originals:
            parameters = [(sharded.flat.sharded, [inside for _, inside in pairs])]
        found.append(UnitParams(state, sharded, names, parameters))
    return found


def names_of(model: nn.Module, units: list[UnitParams]) -> dict[int, list[str]]:
    """Original names by the parameter's id; a flat parameter has several."""
    names = {id(parameter): [clean_tensor_name(name)] for name, parameter in model.named_parameters()}
    for unit in units:
        names.update({id(parameter): [each.name for each in inside] for parameter, inside in unit.parameters})
    return names


# -- PyTorch's checkpoint helpers ------------------------------------------------------------------------------------

ASKED_FOR = "_fqn_modifiers"
"""The method that the helpers call on every module first: it returns names of children to omit from state dicts."""

DROPIN = "unshard.dropin.install() at the start of the program makes these functions work, too"


def answer(module: nn.Module, inner: Callable[[], Any], wrapped: bool) -> Any:
    """The result of `_fqn_modifiers()` of a sharded module: `inner()`, unless the helper would get the names wrong.

    `wrapped`: a wrapper adds a prefix to the names of its parameters, but not in state dicts.
    """
    call = helper_call()
    if call is not None and not call.knows_wrapper:
        _refuse_optimizers(module, call)
        if wrapped and call.name.startswith("set_") and call.full_state_dict:
            raise UnsupportedError(
                f"{HELPERS}.{call.name} does not know the names of unshard's FullyShardedDataParallel: with "
                "full_state_dict=True it would not find its parameters in the state dict. Call "
                f"model.load_state_dict(state_dict) with the full state dict on all ranks. {DROPIN}."
            )
    return inner()


def _refuse_optimizers(module: nn.Module, call: HelperCall) -> None:
    """Refuse optimizers of wrapped models: their state is a plain tensor that differs on each rank."""
    theirs = {id(each) for optim in call.optimizers for each in optimizer_parameters(optim)}
    for unit in units_of(module) if theirs else ():
        if theirs.isdisjoint(id(parameter) for parameter, _ in unit.parameters):
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
    """Give `_fqn_modifiers` to a module without a wrapper."""
    reference = weakref.ref(module)  # a module must not refer to itself

    def asked() -> Any:
        alive = reference()
        assert alive is not None
        own = getattr(type(alive), ASKED_FOR, None)
        return answer(alive, dict if own is None else partial(own, alive), wrapped=False)

    module.__dict__[ASKED_FOR] = asked
