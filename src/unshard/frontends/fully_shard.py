"""`fully_shard`: the API that PyTorch users know as FSDP2."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from ..comm.agreement import require_agreement
from ..comm.process_group import transport_for
from ..comm.solo import SoloTransport
from ..engine.faces import Home, Slot, home_of
from ..engine.hooks import ShardState, state_of
from ..engine.options import Options
from ..engine.residence import residence_for
from ..engine.unit import Unit
from ..errors import AppliedTwiceError, ArgumentError, DimensionError, StateError, UnnamedMeshError, UnsupportedError
from ..layout.rows import Cut
from ..policies import MixedPrecisionPolicy, OffloadPolicy
from ..torch_private import is_replicated, local_of, make_dtensor, own_parameters
from .module import mix_in

_Modules = TypeVar("_Modules", bound=nn.Module | Sequence[nn.Module])


def fully_shard(
    module: _Modules,
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | None = None,
    shard_placement_fn: Callable[[nn.Parameter], Shard | None] | None = None,
    mp_policy: MixedPrecisionPolicy | None = None,
    offload_policy: OffloadPolicy | None = None,
    ignored_params: set[nn.Parameter] | None = None,
) -> _Modules:
    """Shard the parameters of `module` that no earlier call took, as one unit. Changes the module and returns it.

    A list of modules becomes one unit: gathered when the first of them runs, freed when the last one has.

    Call it bottom-up, on the blocks and then on the whole model, and build the optimizer afterwards: parameters
    become DTensors, sharded on dim 0 over `mesh` (default: all ranks). A mesh of two dimensions shards over the second
    and keeps replicas over the first. `reshard_after_forward` frees the gathered parameters between forward and
    backward; `None` does so everywhere except on the root. `shard_placement_fn` may choose another dimension for a
    parameter, if the number of shards divides its size. `ignored_params` are left as they are: whole, on their device,
    their gradients not reduced.
    """
    _check_arguments(module, reshard_after_forward)
    mp_policy = _checked_type("mp_policy", mp_policy, MixedPrecisionPolicy)
    offload_policy = _checked_type("offload_policy", offload_policy, OffloadPolicy)
    mesh = _default_mesh() if mesh is None else _checked_mesh(mesh)
    device = _device_of(mesh)
    residence = residence_for(offload_policy, device)
    shard_dim = mesh.ndim - 1
    shards = transport_for(mesh.get_group(shard_dim), device)
    replicas = transport_for(mesh.get_group(0), device) if mesh.ndim == 2 else SoloTransport()
    tops = _tops(module)
    modules = _managed_modules(tops)
    parameters = _managed_parameters(tops, modules, ignored_params or set())
    for parameter, names in parameters.items():
        _check_parameter(names[0][0], parameter)
    dims = {
        parameter: _shard_dim(names[0][0], parameter, shard_placement_fn, shards.world)
        for parameter, names in parameters.items()
    }
    title = ", ".join(type(top).__name__ for top in tops)
    facts = _facts(title, parameters, dims, mp_policy)
    for transport in (shards, replicas):
        require_agreement(transport, device, f"the module {title} that fully_shard was applied to", facts)
    _move_buffers(modules, device)
    with torch.no_grad(), torch.inference_mode(False):
        slots = [
            _slot(parameter, names, mesh, dims[parameter], shards.rank, residence.device)
            for parameter, names in parameters.items()
        ]
        unit = Unit(slots, shards, replicas, device, residence, mp_policy, Options(reshard_after_forward))
    unit.name = title
    for slot in slots:
        for home in slot.homes:
            home.put(slot.sharded)
    state = ShardState(unit, mesh.get_group(shard_dim))
    for top in tops:
        mix_in(top)
        state.attach(top)
    return module


fully_shard.state = state_of  # type: ignore[attr-defined]


def _check_arguments(module: Any, reshard_after_forward: Any) -> None:
    if reshard_after_forward is not None and not isinstance(reshard_after_forward, bool):
        raise ArgumentError(f"reshard_after_forward must be True, False or None, got {reshard_after_forward!r}.")
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


def _checked_type(name: str, value: Any, expected: type) -> Any:
    if value is None:
        return expected()
    if not isinstance(value, expected):
        found = f"{type(value).__module__}.{type(value).__name__}"
        raise ArgumentError(f"{name} must be an unshard.{expected.__name__}, got a {found}: {value!r}.")
    return value


def _default_mesh() -> DeviceMesh:
    if not dist.is_initialized():
        dist.init_process_group()
    # A CUDA build of torch on a machine without GPU names CUDA unless asked whether it is there.
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return init_device_mesh(accelerator.type if accelerator else "cpu", (dist.get_world_size(),))


def _checked_mesh(mesh: Any) -> DeviceMesh:
    if not isinstance(mesh, DeviceMesh):
        raise ArgumentError(f"mesh must be a DeviceMesh, got {type(mesh).__name__}.")
    if mesh.ndim not in (1, 2):
        raise ArgumentError(f"fully_shard takes a mesh of one or two dimensions, got {mesh.ndim}: {mesh}.")
    if mesh.ndim == 2 and mesh.mesh_dim_names is None:
        raise UnnamedMeshError(
            f"A mesh of two dimensions needs names, the first for replicas, the second for shards: {mesh}. Pass "
            'mesh_dim_names=("replicate", "shard") to init_device_mesh.'
        )
    if mesh.get_coordinate() is None:
        raise ArgumentError(f"Rank {dist.get_rank()} is not part of {mesh}; call fully_shard only on its ranks.")
    return mesh


def _device_of(mesh: DeviceMesh) -> torch.device:
    if mesh.device_type == "cpu":
        return torch.device("cpu")
    return torch.device(mesh.device_type, torch.accelerator.current_device_index())


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


def _managed_parameters(
    tops: list[nn.Module], modules: list[nn.Module], ignored: set[nn.Parameter]
) -> dict[nn.Parameter, list[tuple[str, Home]]]:
    """Each distinct parameter with all names under which it is registered, children's first."""
    prefixes = {child: f"{name}." if name else "" for top in tops for name, child in top.named_modules()}
    found: dict[nn.Parameter, list[tuple[str, Home]]] = {}
    for owner in modules:
        for name, parameter in own_parameters(owner).items():
            if parameter is not None and parameter not in ignored:
                found.setdefault(parameter, []).append((prefixes[owner] + name, home_of(owner, name)))
    return found


def _check_parameter(name: str, parameter: nn.Parameter) -> None:
    if isinstance(parameter, DTensor):
        raise UnsupportedError(
            f"Parameter {name!r} is already a DTensor on {parameter.device_mesh}. If an outer module was sharded "
            "before this one, shard bottom-up instead: blocks first, the whole model last."
        )
    if parameter.ndim == 0:
        raise ArgumentError(
            f"Parameter {name!r} is a scalar and has no dimension to cut. Make it a tensor of one element: "
            "nn.Parameter(value.reshape(1))."
        )
    if parameter.is_complex() or parameter.is_sparse:
        raise UnsupportedError(f"Parameter {name!r} is {parameter.dtype}, {parameter.layout}; it cannot be sharded.")


def _shard_dim(
    name: str, parameter: nn.Parameter, choose: Callable[[nn.Parameter], Shard | None] | None, shards: int
) -> int:
    """The dimension that the user chose for a parameter, or the first."""
    placement = choose(parameter) if choose is not None else None
    if placement is None:
        return 0
    if not isinstance(placement, Shard):
        raise ArgumentError(f"shard_placement_fn must return a Shard or None, got {placement!r} for {name!r}.")
    dim = placement.dim + parameter.ndim if placement.dim < 0 else placement.dim
    if not 0 <= dim < parameter.ndim:
        raise DimensionError(
            f"shard_placement_fn chose {placement} for {name!r}, which has {parameter.ndim} dimensions."
        )
    if dim and parameter.shape[dim] % shards:
        raise UnsupportedError(
            f"Dimension {dim} of {name!r} has size {parameter.shape[dim]}, which {shards} shards do not divide. Only "
            "dimension 0 may be uneven: return None or Shard(0) for this parameter."
        )
    return dim


def _facts(
    title: str,
    parameters: dict[nn.Parameter, list[tuple[str, Home]]],
    dims: dict[nn.Parameter, int],
    policy: MixedPrecisionPolicy,
) -> list[str]:
    """What must be the same on every rank."""
    return [
        f"module {title}",
        f"policy {policy}",
        *(
            f"parameter {names[0][0]!r} of shape {tuple(each.shape)}, {each.dtype}, cut along {dims[each]}"
            for each, names in parameters.items()
        ),
    ]


def _move_buffers(modules: list[nn.Module], device: torch.device) -> None:
    for module in modules:
        for buffer in module.buffers(recurse=False):
            if buffer.device != device and not buffer.is_meta:
                buffer.data = buffer.to(device)


def _slot(
    parameter: nn.Parameter,
    names: list[tuple[str, Home]],
    mesh: DeviceMesh,
    dim: int,
    rank: int,
    device: torch.device,
) -> Slot:
    """The parameter's place in the unit, its rank's rows as sharded face. The unit copies them into its shard."""
    placements = (Shard(dim),) if mesh.ndim == 1 else (Replicate(), Shard(dim))
    cut = Cut(tuple(parameter.shape), mesh.size(mesh.ndim - 1), dim)
    local = parameter.detach().narrow(dim, *cut.rows(rank)).contiguous()
    if not local.is_meta:
        local = local.to(device)
    dtensor = make_dtensor(local, mesh, placements, parameter.shape)
    sharded = nn.Parameter(dtensor, requires_grad=parameter.requires_grad)
    return Slot(names[0][0], [home for _, home in names], cut, weakref.ref(parameter), sharded, local_of(sharded))
