"""The legacy composable API `fully_shard(module, mixed_precision=MixedPrecision(...))`, FSDP1 without a wrapper."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch
from torch import nn

from .engine.api import refuse_shared_memory, state_of
from .errors import AppliedTwiceError
from .fsdp1.api import (
    CPUOffload,
    MixedPrecision,
    ShardingStrategy,
    check_module,
    checked_cpu_offload,
    checked_mixed_precision,
)
from .fsdp1.auto_wrap import Policy, auto_wrap
from .fsdp1.build import build_state, resolve_ignored
from .fsdp1.groups import resolve_groups
from .fsdp1.optim_state import refuse_helpers
from .fsdp1.state_dict import StateDictHandler

__all__ = ["fully_shard"]

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
    """Shard the parameters of `module` that are in no other unit, as one flat parameter. Returns `module`.

    This does the same as `FullyShardedDataParallel(module, use_orig_params=True, ...)`, with two differences. Names do
    not change, and every sharded module casts its inputs as a root does (`cast_root_forward_inputs`). `policy` is the
    `auto_wrap_policy` and `strategy` the `sharding_strategy`. `process_group`, `mixed_precision`, `cpu_offload`,
    `ignored_modules`, `ignored_states`, `device_id`, `param_init_fn`, `sync_module_states` and `forward_prefetch` are
    those of the wrapper.

    Static methods of `FullyShardedDataParallel`, such as `state_dict_type`, `summon_full_params` and
    `optim_state_dict`, also accept the returned module. `state_dict()` returns full tensors unless another state dict
    type is set. A second call raises an AppliedTwiceError.

    Example::

        model = unshard.composable.fully_shard(model, policy=ModuleWrapPolicy({Block}))
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
            **ignored.arguments,
            **common,
            "strategy": groups.strategy,
            "cpu_offload": cpu_offload,
            "mixed_precision": mixed_precision,
            "forward_prefetch": forward_prefetch,
            "use_orig_params": True,
        }
        auto_wrap(module, policy, _apply_inside, inside, ignored.modules, ignored.parameters)
    state = build_state(module, groups, ignored, precision, offload, **common, legacy=True)
    state.attach(module)
    StateDictHandler(state, wrapper_prefix="").attach(module)
    for name, method in (("_fqn_modifiers", _fqn_modifiers), ("_apply", _apply)):
        module.__dict__[name] = _bound_weakly(method, module)
    return module


def _bound_weakly(method: Callable[..., Any], module: nn.Module) -> Callable[..., Any]:
    # A bound method as an attribute of the module would keep the module alive.
    reference = weakref.ref(module)
    return lambda *args, **kwargs: method(reference(), *args, **kwargs)


def _fqn_modifiers(self: nn.Module) -> Any:
    """Raise if the caller in `torch.distributed.checkpoint.state_dict` would save or load wrong values.

    Otherwise, return what the class's own `_fqn_modifiers` returns, or an empty dict.
    """
    refuse_helpers(self, wrapped=False)
    own = getattr(type(self), "_fqn_modifiers", None)
    return {} if own is None else own(self)


def _apply(self: nn.Module, fn: Any, recurse: bool = True) -> Any:
    """Convert the sharded parameters. `.to()`, `.half()` and similar methods call this."""
    state = state_of(self)
    assert state is not None
    refuse_shared_memory(state.unit, fn)
    state.unit.reshard()
    result = type(self)._apply(self, fn, recurse)
    state.unit.rebind_params()
    return result


def _apply_inside(module: nn.Module, use_orig_params: bool = True, **options: Any) -> nn.Module:
    # `use_orig_params` is always True here, and `fully_shard` does not take it.
    return fully_shard(module, **options)
