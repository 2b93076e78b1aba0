"""Units of the flat layout inside a model, under the names by which programs that look inside ask for them."""

from __future__ import annotations

from torch import nn

from .flat_parameter import Handle
from .wrapper import FullyShardedDataParallel
from .wrapper_state import WrapperState, wrapper_state_of, wrapper_states

State = FullyShardedDataParallel | WrapperState


def _get_module_fsdp_state(module: nn.Module | WrapperState) -> State | None:
    """A wrapper is its own state; a module that the legacy call was applied to has one."""
    return module if isinstance(module, FullyShardedDataParallel | WrapperState) else wrapper_state_of(module)


def _get_fsdp_states_with_modules(module: nn.Module) -> tuple[list[State], list[nn.Module]]:
    """The states of the units at and below `module`, and the modules that have them, in the order of `modules()`."""
    found = {state: each for each in module.modules() if (state := _get_module_fsdp_state(each)) is not None}
    return list(found), list(found.values())


def _get_fsdp_states(module: nn.Module) -> list[State]:
    return _get_fsdp_states_with_modules(module)[0]


def _get_fsdp_handles(module: nn.Module) -> list[Handle]:
    """One for each unit that has parameters."""
    return [state.handle for state in wrapper_states(module) if state.handle is not None]
