"""Which kind of state dict a wrapped model gives: what users set, ask for, and set for a while."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from torch import nn

from ..errors import ArgumentError, ConflictError, StateError
from .wrapper_api import (
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
from .wrapper_state import WrapperState, wrapper_states

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
    """Set the kind for all wrapped modules below `module`; returns what was set before."""
    warnings.warn(
        "set_state_dict_type and state_dict_type are deprecated, as in PyTorch. get_state_dict and set_state_dict of "
        "torch.distributed.checkpoint.state_dict take the model after unshard.dropin.install(); without that, use "
        "these, with optim_state_dict and optim_state_dict_to_load for the optimizer.",
        FutureWarning,
        stacklevel=3,
    )
    return _set(module, state_dict_type, state_dict_config, optim_state_dict_config)


def _set(
    module: nn.Module,
    kind: Any,
    config: StateDictConfig | None,
    optim_config: OptimStateDictConfig | None,
) -> StateDictSettings:
    if not isinstance(kind, StateDictType):
        names = ", ".join(f"StateDictType.{each.name}" for each in StateDictType)
        raise ArgumentError(f"state_dict_type must be one of {names}, got {kind!r}.")
    expected, expected_optim = _CONFIGS[kind]
    config, optim_config = config or expected(), optim_config or expected_optim()
    for given, wanted in ((config, expected), (optim_config, expected_optim)):
        if type(given) is not wanted:
            raise StateError(f"{kind.name} takes a {wanted.__name__}, got a {type(given).__name__}.")
    states = wrapper_states(module)
    before = get_state_dict_type(module)
    for state in states:
        state.settings = StateDictSettings(kind, _for_mesh(state, config), _for_mesh(state, optim_config))
    return before


def _for_mesh(state: WrapperState, config: Any) -> Any:
    """Sharded tensors are DTensors where the module was wrapped with a mesh."""
    if isinstance(config, ShardedStateDictConfig | ShardedOptimStateDictConfig):
        return replace(config, _use_dtensor=state.call.groups.mesh is not None)
    return config


def get_state_dict_type(module: nn.Module) -> StateDictSettings:
    """What is set for all wrapped modules below `module`, which must agree."""
    found: StateDictSettings | None = None
    for state in wrapper_states(module):
        if found is not None and state.settings != found:
            raise ConflictError(
                f"Wrapped modules disagree about the kind of state dict: {found} and {state.settings} in {state.unit}."
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
    """As `set_state_dict_type`, until the context ends."""
    before = [(state, state.settings) for state in wrapper_states(module)]
    set_state_dict_type(module, state_dict_type, state_dict_config, optim_state_dict_config)
    try:
        yield
    finally:
        for state, settings in before:
            state.settings = settings
