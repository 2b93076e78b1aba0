"""The legacy composable `fully_shard`: what the wrapper does, without a wrapper."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch
from torch import nn

from ..engine.hooks import state_of
from ..errors import AppliedTwiceError
from .auto_wrap import Policy, auto_wrap
from .checkpoint_helpers import attach_to_helpers
from .flat_call import flat_state
from .ignored import resolve_ignored
from .wrapper_api import BackwardPrefetch, CPUOffload, MixedPrecision, ShardingStrategy
from .wrapper_arguments import check_module, checked_cpu_offload, checked_mixed_precision
from .wrapper_groups import resolve_groups
from .wrapper_precision import CallPolicy
from .wrapper_state import Call
from .wrapper_state_dict import HookedStateDicts

_Module = TypeVar("_Module", bound=nn.Module)


def fully_shard(
    module: _Module,
    *,
    process_group: Any = None,
    policy: Policy | None = None,
    strategy: ShardingStrategy | None = None,
    mixed_precision: MixedPrecision | None = None,
    cpu_offload: CPUOffload | None = None,
    ignored_modules: Iterable[nn.Module] | None = None,
    device_id: int | torch.device | None = None,
    param_init_fn: Callable[[nn.Module], None] | None = None,
    sync_module_states: bool = False,
    forward_prefetch: bool = False,
    ignored_states: Iterable[nn.Parameter] | Iterable[nn.Module] | None = None,
) -> _Module:
    """Shard the parameters of `module` that no earlier call took as one flat unit; changes the module and returns it.

    As `FullyShardedDataParallel(module, use_orig_params=True, ...)`, but names stay as they are, and every module that
    it is applied to casts its inputs as the outermost one does (`cast_root_forward_inputs`). Static methods of that
    class (`state_dict_type`, `summon_full_params`, `optim_state_dict`, ...) take such modules too; `state_dict()` is
    a full one unless another kind is set.
    """
    check_module(module, "fully_shard")
    precision, offload = checked_mixed_precision(mixed_precision), checked_cpu_offload(cpu_offload)
    if state_of(module) is not None:
        raise AppliedTwiceError(f"fully_shard was already applied to this {type(module).__name__}.")
    groups = resolve_groups(process_group, None, strategy, policy is not None)
    ignored = resolve_ignored(module, ignored_modules, ignored_states)
    common: dict[str, Any] = {
        "param_init_fn": param_init_fn,
        "device_id": device_id,
        "sync_module_states": sync_module_states,
    }
    if policy is not None:
        inside = {
            **groups.arguments(),
            **ignored.given,
            **common,
            "strategy": groups.strategy,
            "cpu_offload": cpu_offload,
            "mixed_precision": mixed_precision,
            "forward_prefetch": forward_prefetch,
            "use_orig_params": True,
        }
        auto_wrap(module, policy, _apply_inside, inside, ignored.modules, ignored.parameters)
    call = Call(groups, precision, offload, True, True)
    prefetch = BackwardPrefetch.BACKWARD_PRE
    state = flat_state(module, call, ignored, backward_prefetch=prefetch, policy_kind=CallPolicy, **common)
    state.attach(module)
    HookedStateDicts(state).attach(module)
    attach_to_helpers(module)
    return module


def _apply_inside(module: nn.Module, use_orig_params: bool = True, **options: Any) -> nn.Module:
    """What a policy chose; the original parameters are always what users see."""
    return fully_shard(module, **options)
