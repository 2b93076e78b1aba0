"""`FullyShardedDataParallel`: the wrapper that PyTorch users know as FSDP1."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ..engine.hooks import WRAPPED, ShardState, state_of
from ..engine.residence import residence_for
from ..errors import ArgumentError, StateError
from ..policies import CPUOffloadPolicy, OffloadPolicy
from .auto_wrap import Policy, auto_wrap
from .flatten import Where, check_parameters, flat_unit, managed_by
from .ignored import resolve_ignored
from .materialise import broadcast, compute_device, materialise, move_buffers, states_to_send
from .wrapper_api import BackwardPrefetch, CPUOffload, MixedPrecision, ShardingStrategy
from .wrapper_groups import resolve_groups
from .wrapper_precision import policy_for

FSDP_WRAPPED_MODULE = WRAPPED.rstrip(".")


class FullyShardedDataParallel(nn.Module):
    """Wraps a module whose parameters are cut over ranks, laid end to end as one unit."""

    def __init__(
        self,
        module: nn.Module,
        process_group: Any = None,
        sharding_strategy: ShardingStrategy | None = None,
        cpu_offload: CPUOffload | None = None,
        auto_wrap_policy: Policy | None = None,
        backward_prefetch: BackwardPrefetch | None = BackwardPrefetch.BACKWARD_PRE,
        mixed_precision: MixedPrecision | None = None,
        ignored_modules: Iterable[nn.Module] | None = None,
        param_init_fn: Callable[[nn.Module], None] | None = None,
        device_id: int | torch.device | None = None,
        sync_module_states: bool = False,
        forward_prefetch: bool = False,
        limit_all_gathers: bool = True,
        use_orig_params: bool = False,
        ignored_states: Iterable[nn.Parameter] | Iterable[nn.Module] | None = None,
        device_mesh: DeviceMesh | None = None,
    ):
        super().__init__()
        if param_init_fn is not None and not callable(param_init_fn):
            raise ArgumentError(f"param_init_fn must be a function of a module, got {param_init_fn!r}.")
        groups = resolve_groups(process_group, device_mesh, sharding_strategy, auto_wrap_policy is not None)
        ignored = resolve_ignored(module, ignored_modules, ignored_states)
        if auto_wrap_policy is not None:
            inside = {
                **groups.arguments(),
                **ignored.given,
                "sharding_strategy": groups.strategy,
                "cpu_offload": cpu_offload,
                "backward_prefetch": backward_prefetch,
                "mixed_precision": mixed_precision,
                "param_init_fn": param_init_fn,
                "device_id": device_id,
                "sync_module_states": sync_module_states,
                "forward_prefetch": forward_prefetch,
                "limit_all_gathers": limit_all_gathers,
                "use_orig_params": use_orig_params,
            }
            auto_wrap(module, auto_wrap_policy, type(self), inside, ignored.modules, ignored.parameters)
        self.mixed_precision = mixed_precision or MixedPrecision()
        self.cpu_offload = cpu_offload or CPUOffload()
        self._groups = groups

        def find() -> Any:
            return managed_by(module, ignored.modules, ignored.parameters)

        managed = find()
        device = compute_device(device_id, device_mesh, groups.own, managed)
        managed = materialise(managed, device, param_init_fn, find)
        check_parameters(type(module).__name__, managed.parameters, one=not use_orig_params)
        move_buffers(managed, device)
        if sync_module_states:
            both = [each for each in (groups.replicas, groups.own) if each is not None]
            broadcast(states_to_send(managed), both, device)
        offload: OffloadPolicy = OffloadPolicy()
        if self.cpu_offload.offload_params:
            offload = CPUOffloadPolicy(pin_memory=device.type != "cpu")
        where = Where(*groups.transports(device), device, residence_for(offload, device))
        options = groups.meaning.options()
        if backward_prefetch is not BackwardPrefetch.BACKWARD_PRE:
            options.backward_prefetch = []
        policy = policy_for(self.mixed_precision, groups.meaning.cuts)
        unit, flat = flat_unit(module, managed, where, policy, options, use_orig_params)
        setattr(self, FSDP_WRAPPED_MODULE, module)
        ShardState(unit).attach_wrapper(self)

    # -- forward and backward -------------------------------------------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        state = state_of(self)
        assert state is not None
        return state.run(self, self.module, args, kwargs)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward in here keeps gradients whole on this rank; the next one outside reduces the sums. Root only."""
        states = self._states_of_root("no_sync")
        before = [(state.unit.options, state.unit.options.reshard_after_backward) for state in states]
        for options, _ in before:
            options.synchronise = options.all_reduce = False
            if options.reshard_after_forward is False:
                options.reshard_after_backward = False
        try:
            yield
        finally:
            for options, reshards in before:
                options.synchronise = options.all_reduce = True
                options.reshard_after_backward = reshards

    def _states_of_root(self, method: str) -> list[ShardState]:
        state = state_of(self)
        assert state is not None
        root = state.find_root(self)
        if root.unit is not state.unit:
            raise StateError(f"{method} is for the outermost wrapped module, and this {self.module} is inside another.")
        found = (state_of(module) for module in self.modules())
        return [each for each in found if each is not None]

    # -- what it looks like ---------------------------------------------------------------------------------

    @property
    def module(self) -> nn.Module:
        """The module inside."""
        return self._modules[FSDP_WRAPPED_MODULE]  # type: ignore[return-value]

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == FSDP_WRAPPED_MODULE:
                raise
            return getattr(self._modules[FSDP_WRAPPED_MODULE], name)

    def __getitem__(self, key: Any) -> Any:
        return self.module[key]  # type: ignore[index]

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """`.to()`, `.half()`: they convert the sharded parameters."""
        state = state_of(self)
        assert state is not None
        state.unit.reshard()
        result = super()._apply(fn, recurse)
        state.unit.settle()
        return result
