"""From the arguments of a front-end with a flat layout to a unit: the wrapper and the legacy call both do this."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ..engine.faces import home_of
from ..engine.residence import residence_for
from ..errors import ArgumentError
from ..policies import CPUOffloadPolicy, OffloadPolicy
from ..torch_private import own_parameters
from .flat_parameter import Handle
from .flatten import Managed, Where, check_parameters, flat_sharded_of, flat_unit, managed_by
from .ignored import Ignored
from .materialise import broadcast, compute_device, materialise, move_buffers, states_to_send
from .wrapper_api import BackwardPrefetch
from .wrapper_buffers import CastBuffers
from .wrapper_precision import WrapperPolicy, policy_for
from .wrapper_state import Call, WrapperState


def flat_state(
    module: nn.Module,
    call: Call,
    ignored: Ignored,
    *,
    backward_prefetch: BackwardPrefetch | None,
    param_init_fn: Callable[[nn.Module], Any] | None,
    device_id: int | torch.device | None,
    sync_module_states: bool,
    policy_kind: type[WrapperPolicy] = WrapperPolicy,
) -> WrapperState:
    """Take the parameters of `module` that no other unit has; the caller attaches the result."""
    if param_init_fn is not None and not callable(param_init_fn):
        raise ArgumentError(f"param_init_fn must be a function of a module, got {param_init_fn!r}.")

    def find() -> Managed:
        return managed_by(module, ignored.modules, ignored.parameters)

    groups, managed = call.groups, find()
    device = compute_device(device_id, groups.mesh, groups.own, managed)
    managed = materialise(managed, device, param_init_fn, find)
    check_parameters(type(module).__name__, managed.parameters, one=not call.use_orig_params)
    move_buffers(managed, device)
    if sync_module_states:
        both = [each for each in (groups.replicas, groups.own) if each is not None]
        broadcast(states_to_send(managed), both, device)
    offload: OffloadPolicy = OffloadPolicy()
    if call.cpu_offload.offload_params:
        offload = CPUOffloadPolicy(pin_memory=device.type != "cpu")
    where = Where(*groups.transports(device), device, residence_for(offload, device))
    options = groups.meaning.options()
    if backward_prefetch is not BackwardPrefetch.BACKWARD_PRE:
        options.backward_prefetch = []
    policy = policy_for(call.mixed_precision, groups.meaning.cuts, policy_kind)
    unit, flat = flat_unit(module, managed, where, policy, options, call.use_orig_params)
    sharded, handle = flat_sharded_of(unit), None
    if sharded is not None and flat is not None:
        handle = Handle(module, sharded, flat, where.shards, groups.strategy)
    state = WrapperState(unit, call, handle, CastBuffers(managed.modules, call.mixed_precision.buffer_dtype))
    state.ignored = [
        home_of(owner, name)
        for owner in module.modules()
        for name, parameter in own_parameters(owner).items()
        if parameter in ignored.parameters
    ]
    return state
