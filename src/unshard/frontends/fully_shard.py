"""`fully_shard`: the API that PyTorch users know as FSDP2."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from functools import cache, partial
from typing import Any, TypeVar

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ..comm.agreement import require_agreement
from ..comm.cover import device_of
from ..engine.borders import bordered, own_door
from ..engine.faces import Home, Slot, home_of
from ..engine.hooks import ShardState, state_of
from ..engine.module_buffers import ModuleBuffers, warn_of_rounding
from ..engine.options import Options
from ..engine.part import Part
from ..engine.residence import Residence, residence_for
from ..engine.unit import Unit
from ..errors import AppliedTwiceError, ArgumentError, StateError, UnsupportedError
from ..policies import MixedPrecisionPolicy, OffloadPolicy
from ..torch_private import is_replicated, own_parameters
from .meshes import DataParallelMeshDims, DataParallelMeshInfo, resolve
from .module import mix_in
from .placements import Choose, Destination, check_parameter, destination, slot_for

_log = logging.getLogger("unshard")
_Modules = TypeVar("_Modules", bound=nn.Module | Sequence[nn.Module])
_Named = dict[nn.Parameter, list[tuple[str, Home]]]


def fully_shard(
    module: _Modules,
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: Choose | None = None,
    mp_policy: MixedPrecisionPolicy | None = None,
    offload_policy: OffloadPolicy | None = None,
    ignored_params: set[nn.Parameter] | None = None,
    dp_mesh_dims: DataParallelMeshDims | None = None,
) -> _Modules:
    """Shard the parameters of `module` that no earlier call took, as one unit. Changes the module and returns it.

    A list of modules becomes one unit: gathered when the first of them runs, freed when the last one has.

    Call it bottom-up, on the blocks and then on the whole model, and build the optimizer afterwards: parameters
    become DTensors, sharded on dim 0 over `mesh` (default: all ranks). A mesh of two dimensions shards over the second
    and keeps replicas over the first. `reshard_after_forward` frees the gathered parameters between forward and
    backward; `None` does so everywhere except on the root, and a number k keeps a slice of 1/k on each rank, so that
    backward gathers among k neighbours only. `shard_placement_fn` may choose another dimension for a parameter, if the
    number of shards divides its size, or another mesh (`ShardPlacementResult`). `ignored_params` are left as they are:
    whole, on their device, their gradients not reduced. Parameters that are DTensors already (tensor parallelism) stay
    distributed as they are and are sharded on top; with `dp_mesh_dims` they are DTensors on `mesh` itself, of which
    the named dimensions shard and replicate.
    """
    _check_modules(module)
    mp_policy = _checked_type("mp_policy", mp_policy, MixedPrecisionPolicy)
    offload_policy = _checked_type("offload_policy", offload_policy, OffloadPolicy, "CPUOffloadPolicy()")
    info = resolve(mesh, dp_mesh_dims)
    _check_choice(shard_placement_fn, info)
    options = _options(reshard_after_forward, info, dp_mesh_dims)
    slices = reshard_after_forward if options.slice_after_forward else None
    device = device_of(info.mesh)
    residence = residence_for(offload_policy, device)

    tops = _tops(module)
    title = ", ".join(type(top).__name__ for top in tops)
    modules = _managed_modules(tops)
    ignored = _checked_ignored(ignored_params)
    parameters = _managed_parameters(tops, modules, ignored)
    to = _destinations(parameters, info, shard_placement_fn)
    facts = _facts(title, parameters, to, mp_policy)
    for transport in info.transports(device):
        require_agreement(transport, device, f"the module {title} that fully_shard was applied to", facts)

    parts = _Parts(parameters, to, dp_mesh_dims, mp_policy, device, residence, slices).make()
    door = own_door([slot for part in parts for slot in part.slots], mp_policy)
    unit = Unit(parts, device, door, options)
    unit.name = title
    _move_buffers(modules, device)
    _attach(unit, tops, modules, mp_policy).ignored = [
        home_of(owner, name)
        for owner in modules
        for name, parameter in own_parameters(owner).items()
        if parameter in ignored
    ]
    return module


fully_shard.state = state_of  # type: ignore[attr-defined]


@dataclass(frozen=True)
class _Parts:
    """What the parts of a unit are made from."""

    parameters: _Named
    to: dict[nn.Parameter, Destination]
    dims: DataParallelMeshDims | None
    policy: MixedPrecisionPolicy
    device: torch.device
    residence: Residence
    slices: int | None

    def make(self) -> list[Part]:
        with torch.no_grad(), torch.inference_mode(False):
            return [self._part(members) for members in _by_ranks(self.parameters, self.to)]

    def _part(self, members: list[nn.Parameter]) -> Part:
        info, device = self.to[members[0]].info, self.device
        shards, replicas = info.transports(device)
        place = partial(slot_for, dims=self.dims, rank=shards.rank, device=self.residence.device, policy=self.policy)
        slots = [place(each, self.parameters[each], self.to[each]) for each in members]
        slicing = info.slicing(_sliceable(slots, self.slices, info), device) if self.slices else None
        return Part(slots, shards, replicas, info.shard_mesh, device, self.residence, slicing, shards.serial())


def _attach(unit: Unit, tops: list[nn.Module], modules: list[nn.Module], policy: MixedPrecisionPolicy) -> ShardState:
    """Give the modules their sharded parameters, what the unit does to their buffers, and its hooks."""
    for slot in unit.slots:
        for home in slot.homes:
            home.put(slot.sharded)
    state = ShardState(unit)
    state.buffer_dtypes = {
        (number, name): buffer.dtype
        for number, top in enumerate(tops)
        for name, buffer in top.named_buffers(remove_duplicate=False)
    }
    borders = bordered(tops, unit.slots, policy)
    for inner, own in borders:
        state.attach_border(inner, own)
    if policy.buffer_dtype is not None and unit.policy is policy:
        overridden = {child for inner, _ in borders for child in inner.modules()}
        cast = [each for each in modules if each not in overridden]
        state.cast_buffers(_cast_buffers(tops, cast, policy, unit.name))
    for top in tops:
        mix_in(top)
        state.attach(top)
    return state


def _check_choice(choose: Choose | None, info: DataParallelMeshInfo) -> None:
    if info.shard_mesh_dim is None and choose is not None:
        raise ArgumentError("shard_placement_fn has nothing to choose: dp_mesh_dims names no dimension that shards.")


def _options(reshard: Any, info: DataParallelMeshInfo, dims: DataParallelMeshDims | None) -> Options:
    if reshard is None or isinstance(reshard, bool):
        return Options(reshard)
    if not isinstance(reshard, int):
        raise ArgumentError(f"reshard_after_forward must be True, False, None or an integer, got {reshard!r}.")
    if dims is not None:
        raise UnsupportedError("An integer reshard_after_forward cannot be combined with dp_mesh_dims.")
    size = _slice_size(reshard, info)
    if size == 1:
        _warn_about_one()
        return Options(False)
    return Options(True) if size == info.shard_mesh_size else Options(True, slice_after_forward=True)


def _slice_size(size: int, info: DataParallelMeshInfo) -> int:
    if not 1 <= size <= info.shard_mesh_size or info.shard_mesh_size % size:
        raise ArgumentError(
            f"reshard_after_forward={size}: the number of slices must divide the number of shards, which is "
            f"{info.shard_mesh_size}."
        )
    return size


@cache
def _warn_about_one() -> None:
    _log.warning("reshard_after_forward=1 keeps parameters whole after forward, as False does; pass False to say so.")


def _sliceable(slots: list[Slot], size: int, info: DataParallelMeshInfo) -> int:
    """The number of slices, if these parameters can be kept in so many."""
    for slot in slots:
        if slot.cut.crossed or slot.whole_spec is not None:
            found = f"is cut along dimension {slot.cut.dim}" if slot.cut.crossed else "is a DTensor already"
            raise UnsupportedError(
                f"Parameter {slot.name!r} {found}; an integer reshard_after_forward is only supported for plain "
                "parameters that are cut along dimension 0. Pass True or False."
            )
    return _slice_size(size, info)


def _destinations(
    parameters: _Named, info: DataParallelMeshInfo, choose: Choose | None
) -> dict[nn.Parameter, Destination]:
    to: dict[nn.Parameter, Destination] = {}
    for parameter, names in parameters.items():
        check_parameter(names[0][0], parameter)
        to[parameter] = destination(names[0][0], parameter, info, choose)
    return to


def _by_ranks(parameters: _Named, to: dict[nn.Parameter, Destination]) -> list[list[nn.Parameter]]:
    """The parameters that are cut over the same ranks together."""
    together: dict[Any, list[nn.Parameter]] = {}
    for parameter in parameters:
        info = to[parameter].info
        together.setdefault((info.shard_process_group, info.replicate_process_group), []).append(parameter)
    return list(together.values())


def _check_modules(module: Any) -> None:
    if isinstance(module, list | tuple):
        if not module:
            raise ArgumentError("fully_shard got an empty list of modules.")
        for each in module:
            _check_module(each)
    else:
        _check_module(module)


def _check_module(module: Any) -> None:
    if not isinstance(module, nn.Module):
        raise ArgumentError(f"fully_shard takes an nn.Module or a list of them, got {type(module).__name__}.")
    name = type(module).__name__
    if state_of(module) is not None:
        raise AppliedTwiceError(f"fully_shard was already applied to this {name}; apply it once per module.")
    if isinstance(module, nn.ModuleList | nn.ModuleDict) and not _defines_forward(module):
        raise ArgumentError(
            f"fully_shard cannot be applied to a {name}: it has no forward, so nothing would ever gather its "
            "parameters. Apply it to each of its modules."
        )
    for child_name, child in module.named_modules():
        state = state_of(child)
        if state is not None and state.is_initialised:
            raise StateError(
                f"fully_shard was applied to {name} after {child_name!r} inside it ran a forward. Shard bottom-up, "
                "the whole model before its first forward."
            )


def _tops(module: nn.Module | Sequence[nn.Module]) -> list[nn.Module]:
    """The modules given, without those inside others of them."""
    given = [module] if isinstance(module, nn.Module) else list(dict.fromkeys(module))
    inside = {child for top in given for child in top.modules() if child is not top}
    return [top for top in given if top not in inside]


def _defines_forward(module: nn.Module) -> bool:
    return type(module).forward not in (nn.Module.forward, nn.ModuleList.forward, nn.ModuleDict.forward)


def _checked_type(name: str, value: Any, expected: type, example: str = "") -> Any:
    if value is None:
        return expected()
    if not isinstance(value, expected):
        found = f"{type(value).__module__}.{type(value).__name__}"
        such = f", such as unshard.{example}" if example else ""
        raise ArgumentError(f"{name} must be an unshard.{expected.__name__}{such}; got a {found}: {value!r}.")
    return value


def _checked_ignored(ignored: Any) -> set[nn.Parameter]:
    """Parameters of other units may be among them: programs pass the same set to every call."""
    given = set(ignored) if isinstance(ignored, Iterable) and not isinstance(ignored, str) else {ignored} - {None}
    for each in given:
        if not isinstance(each, nn.Parameter):
            raise ArgumentError(
                f"ignored_params must be a set of parameters, found a {type(each).__name__}: {each!r:.80}"
            )
    return given


def _managed_modules(tops: list[nn.Module]) -> list[nn.Module]:
    """Modules whose own parameters and buffers belong to this call: not below another call's, nor replicated ones.

    Children first.
    """
    managed: dict[nn.Module, None] = {}
    for top in tops:
        _add_managed(top, managed)
    return list(managed)


def _add_managed(module: nn.Module, managed: dict[nn.Module, None]) -> None:
    if state_of(module) is None and not is_replicated(module) and module not in managed:
        for child in module.children():
            _add_managed(child, managed)
        managed[module] = None


def _managed_parameters(tops: list[nn.Module], modules: list[nn.Module], ignored: set[nn.Parameter]) -> _Named:
    """Each distinct parameter with all names under which it is registered, children's first."""
    prefixes = _prefixes(tops)
    found: _Named = {}
    for owner in modules:
        for name, parameter in own_parameters(owner).items():
            if parameter is not None and parameter not in ignored:
                found.setdefault(parameter, []).append((prefixes[owner] + name, home_of(owner, name)))
    return found


def _prefixes(tops: list[nn.Module]) -> dict[nn.Module, str]:
    """What comes before a name in each module; modules of a list are told apart by their places in it."""
    prefixes: dict[nn.Module, str] = {}
    for number, top in enumerate(tops):
        for name, child in top.named_modules(prefix=str(number) if len(tops) > 1 else ""):
            prefixes[child] = f"{name}." if name else ""
    return prefixes


def _cast_buffers(
    tops: list[nn.Module], modules: list[nn.Module], policy: MixedPrecisionPolicy, title: str
) -> ModuleBuffers:
    prefixes = _prefixes(tops)
    named = [(prefixes[each], each) for each in modules]
    warn_of_rounding(named, policy, title)
    return ModuleBuffers(named, policy, title)


def _facts(
    title: str,
    parameters: _Named,
    to: dict[nn.Parameter, Destination],
    policy: MixedPrecisionPolicy,
) -> list[str]:
    """What must be the same on every rank."""
    return [
        f"module {title}",
        *(f"policy {field.name}={getattr(policy, field.name)}" for field in fields(policy)),
        *(
            f"parameter {names[0][0]!r} of shape {tuple(each.shape)}, {each.dtype}, cut along {to[each].dim}"
            for each, names in parameters.items()
        ),
    ]


def _move_buffers(modules: list[nn.Module], device: torch.device) -> None:
    for module in modules:
        for buffer in module.buffers(recurse=False):
            if buffer.device != device and not buffer.is_meta:
                buffer.data = buffer.to(device)
