"""Which type of state dict a wrapped module gives and takes."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from torch import nn

from ..errors import ArgumentError, ConflictError, StateError
from .api import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    LocalOptimStateDictConfig,
    LocalStateDictConfig,
    OptimStateDictConfig,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    StateDictConfig,
    StateDictSettings,
    StateDictType,
    default_settings,
)
from .state import WrapperState, wrapper_states

_CONFIGS: dict[StateDictType, tuple[type[StateDictConfig], type[OptimStateDictConfig]]] = {
    StateDictType.FULL_STATE_DICT: (FullStateDictConfig, FullOptimStateDictConfig),
    StateDictType.LOCAL_STATE_DICT: (LocalStateDictConfig, LocalOptimStateDictConfig),
    StateDictType.SHARDED_STATE_DICT: (ShardedStateDictConfig, ShardedOptimStateDictConfig),
}


def set_state_dict_type(
    module: nn.Module,
    state_dict_type: StateDictType,
    state_dict_config: StateDictConfig | None = None,
    optim_state_dict_config: OptimStateDictConfig | None = None,
) -> StateDictSettings:
    """Set the type for all wrapped modules below `module`; returns the previous settings."""
    warnings.warn(
        # PyTorch's helpers for checkpoints ignore a warning that begins so.
        "FSDP.state_dict_type() and FSDP.set_state_dict_type() are deprecated, as in PyTorch. get_state_dict and "
        "set_state_dict of torch.distributed.checkpoint.state_dict take the model after unshard.dropin.install(); "
        "without that, use these, with optim_state_dict and optim_state_dict_to_load for the optimizer.",
        FutureWarning,
        stacklevel=3,
    )
    given: Any = state_dict_type
    if not isinstance(given, StateDictType):
        names = ", ".join(f"StateDictType.{each.name}" for each in StateDictType)
        raise ArgumentError(f"state_dict_type must be one of {names}, got {given!r}.")
    expected, expected_optim = _CONFIGS[state_dict_type]
    config = state_dict_config or expected()
    optim_config = optim_state_dict_config or expected_optim()
    for each, wanted in ((config, expected), (optim_config, expected_optim)):
        if type(each) is not wanted:
            raise StateError(f"{state_dict_type.name} takes a {wanted.__name__}, got a {type(each).__name__}.")
    states = wrapper_states(module)
    before = get_state_dict_type(module)
    for state in states:
        state.settings = StateDictSettings(state_dict_type, _for_mesh(state, config), _for_mesh(state, optim_config))
    return before


def _for_mesh(state: WrapperState, config: Any) -> Any:
    """Sharded tensors are DTensors if the module was wrapped with a mesh."""
    if isinstance(config, ShardedStateDictConfig | ShardedOptimStateDictConfig):
        return replace(config, _use_dtensor=state.call.groups.mesh is not None)
    return config


def get_state_dict_type(module: nn.Module) -> StateDictSettings:
    """The settings of all wrapped modules below `module`, which must be the same."""
    found: StateDictSettings | None = None
    for state in wrapper_states(module):
        if found is not None and state.settings != found:
            raise ConflictError(
                f"Wrapped modules disagree about the type of state dict: {found} and {state.settings} in "
                f"{state.unit}. Call set_state_dict_type with a module that contains all of them."
            )
        found = state.settings
    return found or default_settings()


@contextmanager
def state_dict_type(
    module: nn.Module,
    state_dict_type: StateDictType,
    state_dict_config: StateDictConfig | None = None,
    optim_state_dict_config: OptimStateDictConfig | None = None,
) -> Iterator[None]:
    """The same as `set_state_dict_type`, until the context ends."""
    before = [(state, state.settings) for state in wrapper_states(module)]
    set_state_dict_type(module, state_dict_type, state_dict_config, optim_state_dict_config)
    try:
        yield
    finally:
        for state, settings in before:
            state.settings = settings
