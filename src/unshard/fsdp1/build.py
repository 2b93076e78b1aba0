"""Builds a flat unit and its state from the arguments of the wrapper or of `composable.fully_shard`."""

from __future__ import annotations

import os
import warnings
import weakref
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.weak import WeakTensorKeyDictionary

from ..comm.agreement import broadcast_tensors, require_agreement
from ..comm.groups import current_device
from ..comm.interface import Transport
from ..engine.api import (
    FlatShardedParams,
    ManagedParam,
    Options,
    ParamGroup,
    ParamLocation,
    Unit,
    attributes_of,
    is_packed,
    lend,
    location_of,
    offload_plan_for,
    param_group_of,
    refuse_different_units,
    refuse_opaque,
    state_of,
    unregistered_location_of,
)
from ..errors import ArgumentError, ArgumentTypeError, PolicyError, StateError
from ..layout.shardings import FlatSharding, flat_offsets, is_dense
from ..names import behind_checkpoints, modules_until
from ..policies import CPUOffloadPolicy, OffloadPolicy
from ..torch_private import (
    contiguous_stride,
    is_replicated,
    local_part,
    own_buffers,
    own_parameters,
    served_device_types,
    spec_of,
    stack_level_of_program,
)
from .api import BackwardPrefetch, CPUOffload, MixedPrecision, WrapperPolicy
from .groups import Groups, check_tensor_parallel
from .state import FLAT_PARAM, Handle, WrapperState, flat_sharded_of

Places = list[tuple[str, nn.Module, str]]
"""All places where modules register a parameter, as tuples (full name, module, name in this module)."""
Parameters = dict[nn.Parameter, Places]

_wrapped_in = WeakTensorKeyDictionary()
"""Maps each original parameter to the class name of the module that was wrapped. The unit may no longer exist."""


def build_state(
    module: nn.Module,
    groups: Groups,
    ignored: Ignored,
    mixed_precision: MixedPrecision,
    cpu_offload: CPUOffload,
    *,
    param_init_fn: Callable[[nn.Module], Any] | None,
    device_id: int | torch.device | None,
    sync_module_states: bool,
    backward_prefetch: BackwardPrefetch | None = BackwardPrefetch.BACKWARD_PRE,
    limit_all_gathers: bool = True,
    use_orig_params: bool = True,
    legacy: bool = False,
) -> WrapperState:
    """Build a unit from parameters of `module` that no other unit owns. The caller must attach the returned state."""
    if param_init_fn is not None and not callable(param_init_fn):
        raise ArgumentError(f"param_init_fn must be a function of a module, got {param_init_fn!r}.")
    modules, parameters = _managed_by(module, ignored)
    device = _compute_device(device_id, groups, [*parameters, *_buffers(modules)])
    if _initialize_from_meta(modules, parameters, device, param_init_fn):
        modules, parameters = _managed_by(module, ignored)
    owned = [each for each in parameters if (group := param_group_of(each)) and group.param_of(each)]
    shared = {each: parameters.pop(each) for each in owned}
    _check_parameters(type(module).__name__, parameters, groups, mixed_precision.param_dtype, use_orig_params)
    for each in modules:
        for name, buffer in own_buffers(each).items():
            if buffer is not None and buffer.device != device and not buffer.is_meta:
                own_buffers(each)[name] = buffer.to(device)
    if sync_module_states:
        tensors = map(local_part, [*parameters, *_buffers(modules)])
        broadcast_tensors(tensors, [each for each in (groups.replicas, groups.own) if each is not None], device)
    options = groups.options()
    if backward_prefetch is not BackwardPrefetch.BACKWARD_PRE:
        options.backward_prefetch = []
    policy = WrapperPolicy(
        param_dtype=mixed_precision.param_dtype,
        reduce_dtype=mixed_precision.reduce_dtype,
        cast_forward_inputs=mixed_precision.cast_forward_inputs,
        full_precision_in_eval=os.environ.get("FSDP_USE_FULL_PREC_IN_EVAL", "") == "1",
        cast_root_forward_inputs=mixed_precision.cast_root_forward_inputs,
        keep_low_precision_grads=mixed_precision.keep_low_precision_grads,
        shards_params=groups.shards is not None,
        every_module_is_root=legacy,
    )
    if parameters:
        offload = CPUOffloadPolicy(pin_memory=device.type != "cpu") if cpu_offload.offload_params else OffloadPolicy()
        unit, handle = _flat_unit(module, parameters, groups, device, policy, options, offload, use_orig_params)
    else:
        unit, handle = Unit([], device, policy, options), None
    unit.name = type(module).__name__
    state = WrapperState(
        unit, handle, groups, modules, mixed_precision, cpu_offload, use_orig_params, limit_all_gathers
    )
    for parameter, places in shared.items():
        _borrow(parameter, places, unit, policy, use_orig_params)
    state.ignored = [
        location_of(owner, name)
        for owner in module.modules()
        for name, parameter in own_parameters(owner).items()
        if parameter in ignored.parameters
    ]
    return state


# -- which parameters are in the unit ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ignored:
    """Modules and parameters to exclude from sharding. `modules` includes all modules inside ignored modules."""

    arguments: dict[str, Any] = field(default_factory=dict)
    """The user's `ignored_modules` or `ignored_states`, as keyword arguments for wrapping inner modules."""
    modules: frozenset[nn.Module] = frozenset()
    parameters: frozenset[nn.Parameter] = frozenset()


def resolve_ignored(root: nn.Module, modules: Any, states: Any) -> Ignored:
    """Check the arguments `ignored_modules` and `ignored_states`, and return the modules and parameters to exclude."""
    if modules is not None and states is not None:
        raise ArgumentError("Pass ignored_states or ignored_modules, not both; the former takes modules too.")
    name, given = ("ignored_modules", modules) if modules is not None else ("ignored_states", states)
    if given is None:
        return Ignored()
    if isinstance(given, str) or not isinstance(given, Iterable):
        raise PolicyError(f"{name} must be a list, got {type(given).__name__}.")
    each_given: list[Any] = list(given)
    if name == "ignored_states" and all(isinstance(each, nn.Parameter) for each in each_given):
        return Ignored({name: each_given}, parameters=frozenset(each_given))
    if not all(isinstance(each, nn.Module) for each in each_given):
        classes = ", ".join(sorted({type(each).__name__ for each in each_given}))
        if name == "ignored_states":
            raise ArgumentError(f"{name} takes parameters only or modules only, got {classes}.")
        raise ArgumentTypeError(f"{name} takes modules, got {classes}; ignored_states takes parameters, too.")
    for each in each_given:
        if state_of(each) is not None:
            raise ArgumentError(f"{name} contains a {type(each).__name__} that is wrapped; a unit cannot be ignored.")
        if each is root:
            warnings.warn(
                f"{name} contains the {type(each).__name__} that is to be wrapped: nothing of it will be sharded.",
                stacklevel=stack_level_of_program(),
            )
    inside = frozenset(child for each in each_given for child in each.modules() if state_of(child) is None)
    own = frozenset(parameter for child in inside for parameter in child.parameters(recurse=False))
    return Ignored({name: each_given}, inside, own)


def _managed_by(module: nn.Module, ignored: Ignored) -> tuple[list[nn.Module], Parameters]:
    """Return modules and parameters for a new unit of `module`, parents first. Skip other units and ignored modules."""
    modules: list[nn.Module] = []
    parameters: Parameters = {}

    def stop(each: nn.Module) -> bool:
        return each in ignored.modules or state_of(each) is not None or is_replicated(each)

    for prefix, each in modules_until(module, stop):
        modules.append(each)
        for name, parameter in own_parameters(each).items():
            if parameter is not None and parameter not in ignored.parameters:
                parameters.setdefault(parameter, []).append((prefix + name, each, name))
    return modules, parameters


def _buffers(modules: Iterable[nn.Module]) -> list[torch.Tensor]:
    return [each for module in modules for each in own_buffers(module).values() if each is not None]


def _check_parameters(
    title: str, parameters: Parameters, groups: Groups, param_dtype: torch.dtype | None, use_orig_params: bool
) -> None:
    named = {places[0][0]: parameter for parameter, places in parameters.items()}
    for name, parameter in named.items():
        if isinstance(parameter, DTensor):
            check_tensor_parallel(f"Parameter {name!r} of {title}", parameter, groups)
        refuse_opaque(local_part(parameter), name, "Pass it in ignored_states to keep all of it on every rank.")
        owner = _wrapped_in.get(parameter)
        if owner is not None:
            raise ArgumentError(
                f"Parameter {name!r} of {title} already belongs to another wrapped module ({owner}). Shared "
                "parameters must be in one unit: wrap a module that contains both."
            )
        if parameter.ndim == 0:
            raise ArgumentError(
                f"Parameter {name!r} of {title} is a scalar; make it a tensor of one element: "
                "nn.Parameter(value.reshape(1))."
            )
        if not (parameter.is_floating_point() or parameter.is_complex()):
            raise ArgumentError(
                f"Parameter {name!r} of {title} is {parameter.dtype}; a flat parameter holds floating-point or complex "
                "numbers only. Pass it in ignored_states."
            )
        if is_packed(parameter) and param_dtype not in (None, parameter.dtype):
            raise ArgumentError(
                f"Parameter {name!r} of {title} has packed, quantized values in {parameter.dtype}, which a cast to "
                f"param_dtype={param_dtype} would destroy. Quantize with quant_storage={param_dtype}, or use "
                "fully_shard, which does not cast packed parameters."
            )
    _require_one("dtype", {name: each.dtype for name, each in named.items()}, title, "Wrap the modules separately")
    if not use_orig_params:
        trained = {name: each.requires_grad for name, each in named.items()}
        _require_one("requires_grad", trained, title, "Wrap them separately, or pass use_orig_params=True")


def _require_one(what: str, values: dict[str, Any], title: str, remedy: str) -> None:
    if len(set(values.values())) > 1:
        (first, usual), *others = values.items()
        name, other = next((name, value) for name, value in others if value != usual)
        raise ArgumentError(
            f"The parameters of {title} become one unit and must have the same {what}, but {first!r} has {usual} and "
            f"{name!r} has {other}. {remedy}."
        )


# -- the unit --------------------------------------------------------------------------------------------------------


def _flat_unit(
    module: nn.Module,
    parameters: Parameters,
    groups: Groups,
    device: torch.device,
    policy: WrapperPolicy,
    options: Options,
    offload: OffloadPolicy,
    use_orig_params: bool,
) -> tuple[Unit, Handle]:
    title = type(module).__name__
    shards, replicas = groups.transports(device)
    dtype = next(iter(parameters)).dtype
    itemsize = (policy.param_dtype or dtype).itemsize
    locals_ = list(map(local_part, parameters))
    flat = flat_offsets([each.numel() for each in locals_], shards.world, itemsize, use_orig_params)
    # Do not compare names. They contain numbers, which differ if a rank ignores more modules than other ranks.
    facts = [f"a parameter of shape {tuple(each.shape)}" for each in locals_]
    for transport in (shards, replicas):
        require_agreement(transport, device, f"the wrapped module {title}", [f"{title} in {dtype}", *facts])
    params = []
    for (parameter, places), begin in zip(parameters.items(), flat.begins, strict=True):
        params.append(_managed_param(parameter, places, begin, flat.shard_numel, shards, policy, use_orig_params))
        if use_orig_params:
            _wrapped_in[parameter] = title
    holder = behind_checkpoints(module)  # activation-checkpoint wrappers rename state dict entries
    locations: list[ParamLocation] = [] if use_orig_params else [location_of(holder, FLAT_PARAM)]
    make = partial(FlatShardedParams, locations=locations, length=flat.length, originals=use_orig_params)
    plan = offload_plan_for(offload, device)
    with torch.no_grad(), torch.inference_mode(False):
        group = ParamGroup(params, shards, replicas, None, device, plan, None, shards.next_unit_number(), make)
    group.show_sharded()
    unit = Unit([group], device, policy, options)
    sharded = flat_sharded_of(unit)
    assert sharded is not None
    if not use_orig_params:
        for places in parameters.values():
            for _, owner, name in places:
                del own_parameters(owner)[name]
        own_parameters(holder)[FLAT_PARAM] = sharded.flat.sharded
    return unit, Handle(module, sharded, flat, shards, groups.strategy)


def _managed_param(
    parameter: nn.Parameter,
    places: Places,
    begin: int,
    shard_numel: int,
    shards: Transport,
    policy: WrapperPolicy,
    use_orig_params: bool,
) -> ManagedParam:
    value = local_part(parameter).detach()
    if not is_dense(value.shape, value.stride()):
        value = value.contiguous()
    stride = value.stride() if value.numel() else contiguous_stride(value.shape)
    cut = FlatSharding(tuple(value.shape), tuple(stride), begin, shard_numel, shards.world)
    first, count = cut.elements(shards.rank)
    local = value if shards.world == 1 else value.as_strided((count,), (1,), value.storage_offset() + first)
    make_location = location_of if use_orig_params else unregistered_location_of
    locations = [make_location(owner, name) for _, owner, name in places]
    managed = ManagedParam(places[0][0], locations, cut, weakref.ref(parameter), parameter, local, policy)
    managed.attributes = attributes_of(parameter)
    if isinstance(parameter, DTensor):
        # The sharded parameter is plain, because `.data` of a DTensor cannot be a view of some of its elements.
        managed.tp_spec, managed.sharded = spec_of(parameter), nn.Parameter(local, parameter.requires_grad)
    return managed


def _borrow(parameter: nn.Parameter, places: Places, unit: Unit, policy: WrapperPolicy, use_orig_params: bool) -> None:
    """Let modules of `unit` use a parameter that another unit owns."""
    group = param_group_of(parameter)
    theirs = None if group is None else group.param_of(parameter)
    assert group is not None and theirs is not None
    refuse_different_units(group, theirs, unit, places[0][0], policy, FlatShardedParams.kind_of(use_orig_params))
    make_location = location_of if use_orig_params else unregistered_location_of
    if not use_orig_params:
        for _, owner, name in places:
            del own_parameters(owner)[name]
    lend(group, theirs, [make_location(owner, name) for _, owner, name in places], unit)


# -- before sharding: the compute device, and values for meta tensors -------------------------------------------------


def _compute_device(device_id: Any, groups: Groups, tensors: list[torch.Tensor]) -> torch.device:
    found = {each.device for each in tensors if not each.is_meta}
    on_accelerator = {device for device in found if device.type != "cpu"}
    if len(on_accelerator) > 1 or (len(found) > 1 and device_id is None):
        raise StateError(
            f"The module has parameters and buffers on several devices ({', '.join(sorted(map(str, found)))}). Move it "
            "to one device. If these are the host and one device, pass device_id."
        )
    if device_id is not None:
        device = _resolve_device_id(device_id)
        if on_accelerator and on_accelerator != {device}:
            raise ArgumentError(
                f"device_id is {device}, but the module is on {on_accelerator.pop()}. Pass the same device."
            )
        return device
    if on_accelerator:
        return on_accelerator.pop()
    if groups.mesh is not None:
        return current_device(groups.mesh.device_type)
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return torch.device("cpu")
    if accelerator.type not in served_device_types(groups.own):
        warnings.warn(
            f"The module stays on the CPU and computes there: its process group has no backend for {accelerator.type}. "
            "Initialize the group with one, or pass device_id=torch.device('cpu') if this is intended.",
            stacklevel=stack_level_of_program(),
        )
        return torch.device("cpu")
    return current_device(accelerator.type)


def _resolve_device_id(device_id: Any) -> torch.device:
    if type(device_id) is int:
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        return torch.device("cpu") if accelerator is None else torch.device(accelerator.type, device_id)
    device = torch.device(device_id)
    if str(device) == device.type != "cpu":
        chosen = current_device(device.type)
        message = f"device_id={device_id} has no index; {chosen} is used."
        warnings.warn(message, stacklevel=stack_level_of_program())
        return chosen
    return torch.device("cpu") if device.type == "cpu" else device


def _initialize_from_meta(
    modules: list[nn.Module],
    parameters: Collection[nn.Parameter],
    device: torch.device,
    init: Callable[[nn.Module], Any] | None,
) -> bool:
    """Initialize modules on the meta device with `init`. By default, call `to_empty` and `reset_parameters`.

    Return True if any module was on the meta device.
    """
    on_meta = [
        module
        for module in modules
        if any(each.is_meta for each in own_parameters(module).values() if each in parameters)
        or any(each.is_meta for each in _buffers([module]))
    ]
    for module in on_meta:
        if init is not None:
            init(module)
            continue
        name = type(module).__name__
        reset: Any = getattr(module, "reset_parameters", None)
        if reset is None:
            warnings.warn(
                f"{name} has parameters or buffers on meta and no reset_parameters() to give them values.",
                stacklevel=stack_level_of_program(),
            )
            raise StateError(
                f"{name} is on meta and has no reset_parameters(). Give it one that initializes its own parameters and "
                "buffers, or pass param_init_fn."
            )
        module.to_empty(device=device, recurse=False)
        with torch.no_grad():
            reset()
    return bool(on_meta)
