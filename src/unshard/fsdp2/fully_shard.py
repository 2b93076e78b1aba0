"""`fully_shard`, the API that PyTorch users know as FSDP2."""

from __future__ import annotations

import functools
import logging
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import fields
from typing import Any, TypeVar

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from ..comm.agreement import require_agreement
from ..comm.groups import device_of
from ..engine.api import (
    FSDPState,
    ManagedParam,
    ModuleBuffers,
    OffloadPlan,
    Options,
    ParamGroup,
    ShardedParams,
    Unit,
    attributes_of,
    boundary_policy,
    cast_boundaries,
    is_extended,
    is_packed,
    lend,
    location_of,
    offload_plan_for,
    refuse_different_units,
    state_of,
    warn_of_rounding,
)
from ..errors import AppliedTwiceError, ArgumentError, ArgumentTypeError, StateError, UnsupportedError
from ..layout.shardings import RowSharding
from ..policies import MixedPrecisionPolicy, OffloadPolicy
from ..torch_private import frame_not_compiled, is_replicated, local_of, make_sharded_parameter, own_parameters, spec_of
from .module import FSDPModule, sharded_state, swap_class
from .placements import (
    DataParallelMeshDims,
    DataParallelMeshInfo,
    ParamToShard,
    ShardPlacementFn,
    mesh_and_placements,
    resolve_mesh_info,
)

_log = logging.getLogger("unshard")
_Modules = TypeVar("_Modules", bound=nn.Module | Sequence[nn.Module])


def fully_shard(
    module: _Modules,
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: ShardPlacementFn | None = None,
    mp_policy: MixedPrecisionPolicy | None = None,
    offload_policy: OffloadPolicy | None = None,
    ignored_params: set[nn.Parameter] | None = None,
    dp_mesh_dims: DataParallelMeshDims | None = None,
) -> _Modules:
    """Shard the parameters of `module` that no earlier call has sharded, as one unit.

    Changes `module` in place and returns it. Call this function bottom-up, first on the blocks and then on the whole
    model. Build the optimizer afterwards, because the parameters become DTensors. They are sharded on dim 0 over
    `mesh`, which contains all ranks by default. If `mesh` has two dimensions, parameters are sharded over the second
    dimension and replicated over the first. A list of modules becomes one unit, which is unsharded when the first of
    these modules runs and resharded after the last one.

    `reshard_after_forward` controls whether the unsharded parameters are freed between forward and backward. With
    `None`, they are freed except on the root. With an integer k, each rank keeps a slice of 1/k of the unit, so that
    backward all-gathers among k neighbors only. `mp_policy` sets the dtypes of the unit, and `offload_policy` says
    where its parameters, gradients and optimizer state are stored.

    `shard_placement_fn` may choose another dimension for a parameter or, with a `ShardPlacementResult`, another mesh.
    The size of a dimension other than 0 must be divisible by the number of shards. `ignored_params` are neither sharded
    nor moved, and their gradients are not reduced.

    Tensor-parallel parameters (DTensors) keep their placements and are sharded in addition. If `dp_mesh_dims` is set,
    all parameters must be DTensors on `mesh`, and `dp_mesh_dims` names the mesh dimensions that shard and replicate.

    Raises:
        ArgumentError: an argument is invalid (also `AppliedTwiceError`), or the models of the ranks differ.
        StateError: a module inside `module` has already run.
        UnsupportedError: a parameter cannot be sharded.

    Example: `for each in (*model.blocks, model): fully_shard(each)`.
    """
    given = module if isinstance(module, list | tuple) else [module]
    if not given:
        raise ArgumentError("fully_shard got an empty list of modules.")
    for each in given:
        _check_module(each)
    mp_policy = _checked_type("mp_policy", mp_policy, MixedPrecisionPolicy)
    offload_policy = _checked_type("offload_policy", offload_policy, OffloadPolicy, "CPUOffloadPolicy()")
    info = resolve_mesh_info(mesh, dp_mesh_dims)
    if info.shard_mesh_dim is None and shard_placement_fn is not None:
        raise ArgumentError("shard_placement_fn has no effect: dp_mesh_dims names no dimension that shards.")
    options = _options(reshard_after_forward, info, dp_mesh_dims)
    slices = reshard_after_forward if options.slice_after_forward else None
    device = device_of(info.mesh)
    offload = offload_plan_for(offload_policy, device)

    outermost = _outermost(module)
    title = ", ".join(type(each).__name__ for each in outermost)
    prefixes = _prefixes(outermost)
    managed: dict[nn.Module, None] = {}
    for each in outermost:
        _add_managed(each, managed)
    modules = list(managed)
    ignored = _checked_ignored(ignored_params)
    found = _params_to_shard(modules, prefixes, ignored, info)
    params = [param for param in found if param.owner is None]
    shared = [(param, *owner) for param in found if (owner := param.owner) is not None]
    for param, group, theirs in shared:
        param.refuse_same_place(group, theirs)
    for param in params:
        param.choose_placement(shard_placement_fn)
    facts = _facts(title, found, mp_policy)
    for transport in info.transports(device):
        require_agreement(transport, device, f"the module {title} that fully_shard was applied to", facts)

    param_groups = _make_param_groups(params, dp_mesh_dims, mp_policy, device, offload, slices)
    boundary = boundary_policy([param for group in param_groups for param in group.params], mp_policy)
    unit = Unit(param_groups, device, boundary, options)
    unit.name = title
    for param, group, theirs in shared:
        their_mesh = None  # unknown if modules were tied after the parameter was sharded
        if param.parameter is not theirs.sharded:
            their_mesh, _ = mesh_and_placements(param, dp_mesh_dims)
        own_policy = mp_policy.for_parameter(param.names)
        refuse_different_units(group, theirs, unit, param.name, own_policy, ShardedParams.kind, their_mesh)
        lend(group, theirs, param.locations, unit)
    _attach(unit, outermost, {each: prefixes[each] for each in modules}, mp_policy, ignored)
    return module


fully_shard.state = state_of  # type: ignore[attr-defined]


# -- sharded modules -------------------------------------------------------------------------------------------


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Make `module.<method_name>()` unshard the parameters first and reshard them afterwards, as `forward` does.

    Call this for methods other than `forward` that use parameters, such as `generate`. No-op if `module` is not
    sharded.

    Raises:
        ArgumentError: `module` has no method `method_name`.

    Example::

        register_fsdp_forward_method(model, "generate")
        model.generate(tokens)
    """
    state = state_of(module)
    if state is None:
        return
    method = getattr(module, method_name, None)
    if method is None:
        raise ArgumentError(f"{type(module).__name__} has no method {method_name!r} to register.")
    # A bound method as an attribute of the module would create a reference cycle and keep the module alive.
    function = getattr(method, "__func__", method)
    is_bound, owner = function is not method, weakref.ref(module)

    @frame_not_compiled
    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        here = owner()
        assert here is not None
        call = functools.partial(function, here) if is_bound else function
        return state.run(here, call, args, kwargs)

    setattr(module, method_name, run)


def share_comm_ctx(modules: list[FSDPModule]) -> None:
    """No-op for compatibility. All roots of a process already share the side streams (`engine/side_stream.py`).

    `modules` are sharded modules. Example: `share_comm_ctx([encoder, decoder])`.
    """
    for module in modules:
        sharded_state(module)


# -- arguments ---------------------------------------------------------------------------------------------


def _check_module(module: Any) -> None:
    if not isinstance(module, nn.Module):
        raise ArgumentTypeError(f"fully_shard takes an nn.Module or a list of them, got {type(module).__name__}.")
    name = type(module).__name__
    if state_of(module) is not None:
        raise AppliedTwiceError(f"fully_shard was already applied to this {name}; apply it once per module.")
    no_forward = (nn.Module.forward, nn.ModuleList.forward, nn.ModuleDict.forward)
    if isinstance(module, nn.ModuleList | nn.ModuleDict) and type(module).forward in no_forward:
        raise ArgumentError(
            f"fully_shard cannot be applied to a {name}: it has no forward, so its parameters would never be "
            "unsharded. Apply it to each of its modules."
        )
    for child_name, child in module.named_modules():
        state = state_of(child)
        if state is not None and state.is_initialized:
            raise StateError(
                f"fully_shard was applied to {name} after {child_name!r} inside it ran a forward. Shard bottom-up, "
                "the whole model before its first forward."
            )


def _checked_type(name: str, value: Any, expected: type, example: str = "") -> Any:
    if value is None:
        return expected()
    if not isinstance(value, expected):
        found = f"{type(value).__module__}.{type(value).__name__}"
        such = f", such as unshard.{example}" if example else ""
        raise ArgumentTypeError(f"{name} must be an unshard.{expected.__name__}{such}; got a {found}: {value!r}.")
    return value


def _checked_ignored(ignored: Any) -> set[nn.Parameter]:
    # The set may contain parameters of other units, because programs pass the same set to every call.
    given = set(ignored) if isinstance(ignored, Iterable) and not isinstance(ignored, str) else {ignored} - {None}
    for each in given:
        if not isinstance(each, nn.Parameter):
            raise ArgumentTypeError(
                f"ignored_params must be a set of parameters, found a {type(each).__name__}: {each!r:.80}"
            )
    return given


def _options(reshard: Any, info: DataParallelMeshInfo, dims: DataParallelMeshDims | None) -> Options:
    if reshard is None or isinstance(reshard, bool):
        return Options(reshard)
    if not isinstance(reshard, int):
        raise ArgumentTypeError(f"reshard_after_forward must be True, False, None or an integer, got {reshard!r}.")
    if dims is not None:
        raise UnsupportedError("An integer reshard_after_forward cannot be combined with dp_mesh_dims.")
    _check_slices(reshard, info)
    if reshard == 1:
        _warn_about_one()
        return Options(False)
    return Options(True) if reshard == info.shard_mesh_size else Options(True, slice_after_forward=True)


def _check_slices(slices: int, info: DataParallelMeshInfo) -> None:
    if not 1 <= slices <= info.shard_mesh_size or info.shard_mesh_size % slices:
        raise ArgumentError(
            f"reshard_after_forward={slices}: the number of slices must divide the number of shards, which is "
            f"{info.shard_mesh_size}."
        )


@functools.cache
def _warn_about_one() -> None:
    _log.warning("reshard_after_forward=1 does not reshard after forward. Pass False instead.")


# -- modules and parameters of the unit --------------------------------------------------------------------


def _outermost(module: nn.Module | Sequence[nn.Module]) -> list[nn.Module]:
    given = [module] if isinstance(module, nn.Module) else list(dict.fromkeys(module))
    inside = {child for each in given for child in each.modules() if child is not each}
    return [each for each in given if each not in inside]


def _prefixes(outermost: list[nn.Module]) -> dict[nn.Module, str]:
    # With several outermost modules, each prefix starts with the index of one of them.
    prefixes: dict[nn.Module, str] = {}
    for number, each in enumerate(outermost):
        for name, child in each.named_modules(prefix=str(number) if len(outermost) > 1 else ""):
            prefixes[child] = f"{name}." if name else ""
    return prefixes


def _add_managed(module: nn.Module, managed: dict[nn.Module, None]) -> None:
    """Add `module` and the modules inside it to `managed`, children first.

    Skip replicated modules, modules that another call has sharded, and everything inside such modules.
    """
    if state_of(module) is None and not is_replicated(module) and module not in managed:
        for child in module.children():
            _add_managed(child, managed)
        managed[module] = None


def _params_to_shard(
    modules: list[nn.Module], prefixes: dict[nn.Module, str], ignored: set[nn.Parameter], info: DataParallelMeshInfo
) -> list[ParamToShard]:
    found: dict[nn.Parameter, ParamToShard] = {}
    for module in modules:
        for name, parameter in own_parameters(module).items():
            if parameter is not None and parameter not in ignored:
                param = found.setdefault(parameter, ParamToShard(parameter, [], [], info))
                param.names.append(prefixes[module] + name)
                param.locations.append(location_of(module, name))
    return list(found.values())


def _facts(title: str, params: list[ParamToShard], policy: MixedPrecisionPolicy) -> list[str]:
    """Return one line of text for each property that must be equal on all ranks."""
    return [
        f"module {title}",
        *(f"policy {field.name}={getattr(policy, field.name)}" for field in fields(policy)),
        *(
            f"parameter {param.name!r} of shape {tuple(param.parameter.shape)}, {param.parameter.dtype}, "
            f"sharded along dim {param.dim}{' by another unit' if param.owner else ''}"
            for param in params
        ),
    ]


# -- the unit ----------------------------------------------------------------------------------------------


def _make_param_groups(
    params: list[ParamToShard],
    dims: DataParallelMeshDims | None,
    policy: MixedPrecisionPolicy,
    device: torch.device,
    offload: OffloadPlan,
    slices: int | None,
) -> list[ParamGroup]:
    """Group parameters that are sharded and replicated over the same ranks. Make one param group for each set."""
    by_ranks: dict[Any, list[ParamToShard]] = {}
    for param in params:
        info = param.mesh_info
        by_ranks.setdefault((info.shard_process_group, info.replicate_process_group), []).append(param)
    param_groups = []
    with torch.no_grad(), torch.inference_mode(False):
        for members in by_ranks.values():
            info = members[0].mesh_info
            shards, replicas = info.transports(device)
            managed = [_make_managed_param(each, dims, shards.rank, offload.device, policy) for each in members]
            slicing = None
            if slices is not None:
                _check_sliceable(managed)
                _check_slices(slices, info)
                slicing = info.slices_after_forward(slices, device)
            number = shards.next_unit_number()
            param_groups.append(
                ParamGroup(managed, shards, replicas, info.shard_mesh, device, offload, slicing, number)
            )
    return param_groups


def _make_managed_param(
    param: ParamToShard,
    dims: DataParallelMeshDims | None,
    rank: int,
    device: torch.device,
    policy: MixedPrecisionPolicy,
) -> ManagedParam:
    """Make the sharded parameter and the `ManagedParam` that describes it.

    The unit later copies the values into its own shard.
    """
    parameter, local = param.parameter, param.local
    mesh, placements = mesh_and_placements(param, dims)
    sharding = RowSharding(tuple(local.shape), param.mesh_info.shard_mesh_size, param.dim)
    shard = local.narrow(param.dim, *sharding.rows(rank)).contiguous()
    if is_extended(shard, param.name):
        shard = shard.clone()  # the engine keeps this tensor; a view would keep the whole parameter's memory alive
    if not shard.is_meta:
        shard = shard.to(device)
    sharded = make_sharded_parameter(shard, mesh, placements, parameter.shape, parameter.requires_grad)
    own_policy = policy.for_parameter(param.names)
    if is_packed(parameter):
        own_policy = own_policy.without_casts
    managed = ManagedParam(
        param.name, param.locations, sharding, weakref.ref(parameter), sharded, local_of(sharded), own_policy
    )
    managed.attributes = attributes_of(parameter)
    if isinstance(parameter, DTensor):
        managed.tp_spec = spec_of(parameter)
        if dims is not None:
            index = managed.tp_spec.mesh.mesh_dim_names.index  # type: ignore[union-attr]
            managed.partial_dims = frozenset(map(index, dims.shard_names + dims.replicate_names))
    return managed


def _check_sliceable(params: list[ManagedParam]) -> None:
    for param in params:
        if param.sharding.needs_copy or param.tp_spec is not None:
            found = (
                f"sharded along dimension {param.sharding.dim}" if param.sharding.needs_copy else "already a DTensor"
            )
            raise UnsupportedError(
                f"Parameter {param.name!r} is {found}. An integer reshard_after_forward supports only plain parameters "
                "that are sharded along dimension 0. Pass True or False."
            )


def _attach(
    unit: Unit,
    outermost: list[nn.Module],
    prefixes: dict[nn.Module, str],
    policy: MixedPrecisionPolicy,
    ignored: set[nn.Parameter],
) -> None:
    """Register sharded parameters, buffer casts and hooks on the modules.

    `prefixes` maps each managed module to the prefix of its parameters' names.
    """
    for module in prefixes:
        for buffer in module.buffers(recurse=False):
            if buffer.device != unit.device and not buffer.is_meta:
                buffer.data = buffer.to(unit.device)
    for param in unit.params:
        for location in param.locations:
            location.put(param.sharded)
    state = FSDPState(unit)
    state.buffer_dtypes = {
        (number, name): buffer.dtype
        for number, each in enumerate(outermost)
        for name, buffer in each.named_buffers(remove_duplicate=False)
    }
    boundaries = cast_boundaries(outermost, unit.params, policy)
    for inner, own_policy in boundaries:
        state.attach_cast_boundary(inner, own_policy)
    if policy.buffer_dtype is not None and unit.policy is policy:
        overridden = {child for inner, _ in boundaries for child in inner.modules()}
        named = [(prefix, each) for each, prefix in prefixes.items() if each not in overridden]
        warn_of_rounding(named, policy, unit.name)
        state.buffers = ModuleBuffers(named, policy, unit.name)
    for each in outermost:
        swap_class(each)
        state.attach(each)
    state.ignored = [
        location_of(owner, name)
        for owner in prefixes
        for name, parameter in own_parameters(owner).items()
        if parameter in ignored
    ]
