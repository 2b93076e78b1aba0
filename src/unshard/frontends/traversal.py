"""The flat units of a model, under the names that others look them up by."""

from __future__ import annotations

from torch import nn

from .flat_parameter import Handle
from .wrapper_state import WrapperState, wrapper_state_of


def _get_fsdp_states_with_modules(module: nn.Module) -> tuple[list[WrapperState], list[nn.Module]]:
    """The states below `module` in the order of `modules()`, and the module of each."""
    found: dict[WrapperState, nn.Module] = {}
    for each in module.modules():
        state = wrapper_state_of(each)
        if state is not None:
            found.setdefault(state, each)
    return list(found), list(found.values())


def _get_fsdp_states(module: nn.Module) -> list[WrapperState]:
    return _get_fsdp_states_with_modules(module)[0]


def _get_fsdp_handles(module: nn.Module) -> list[Handle]:
    """One for each state that manages parameters."""
    return [state.handle for state in _get_fsdp_states(module) if state.handle is not None]
