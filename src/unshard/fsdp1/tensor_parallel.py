"""Tensor-parallel parameters in a flat unit: which are accepted, and their state dicts in two and more dimensions.

`ManagedParam.tp_spec` is how `parallelize_module` distributed a parameter. A flat unit shards this rank's part of it;
the unsharded parameter is a DTensor on the tensor-parallel mesh again.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from ..comm.groups import ranks_of
from ..engine.api import ManagedParam
from ..errors import UnsupportedError
from ..layout.rows import RowSharding
from ..torch_private import concatenated_mesh, local_of, local_part, make_dtensor
from .api import ShardingStrategy
from .groups import STRATEGIES, Groups
from .state import wrapper_states


def check_tensor_parallel(where: str, parameter: DTensor, groups: Groups) -> None:
    """Refuse DTensors that a flat unit cannot shard. `where` names the parameter."""
    mesh = parameter.device_mesh
    for placement in parameter.placements:
        if type(placement) not in (Shard, Replicate):
            raise UnsupportedError(
                f"{where} is a DTensor with the placement {placement}; tensor-parallel parameters have Shard or "
                "Replicate. Redistribute it first."
            )
    for group in (groups.own, groups.replicas):
        shared = ranks_of(mesh) & set(dist.get_process_group_ranks(group)) if group is not None else set()
        if len(shared) > 1:
            raise UnsupportedError(
                f"{where} is already a DTensor over the ranks {sorted(ranks_of(mesh))}, and the module is to be "
                f"sharded or replicated over {sorted(shared)} of them. Take both meshes from one: mesh = "
                'init_device_mesh(..., mesh_dim_names=("dp", "tp")), parallelize_module(module, mesh["tp"], ...), '
                'device_mesh=mesh["dp"].'
            )


def data_parallel_mesh(mesh: Any, strategy: Any, module: nn.Module) -> Any:
    """`mesh` without its last dimension, if it has one more than the strategy asks for.

    Ranks of that dimension are tensor parallel, or share nothing. Anything else is returned, to be checked with the
    other arguments; also a mesh for a hybrid strategy whose last dimension is not tensor parallel.
    """
    traits = STRATEGIES.get(strategy, STRATEGIES[ShardingStrategy.FULL_SHARD])
    hybrid = traits.shards and traits.replicates
    if not isinstance(mesh, DeviceMesh) or mesh.ndim != (3 if hybrid else 2):
        return mesh
    names = mesh.mesh_dim_names
    is_parallel = names is not None and _has_parameters_on(mesh[names[-1]], module)
    if hybrid:
        return mesh[names[:-1]] if names is not None and is_parallel else mesh
    if not is_parallel and mesh.size(1) > 1:
        first, last = (0, 1) if names is None else map(repr, names)
        warnings.warn(
            f"device_mesh has two dimensions: this {type(module).__name__} is sharded over {first}, as in PyTorch, and "
            f"nothing is averaged over {last}, where it has no tensor-parallel parameters. Give the ranks of {last} "
            "the same data. For shards and replicas pass sharding_strategy=ShardingStrategy.HYBRID_SHARD.",
            stacklevel=3,
        )
    return DeviceMesh.from_group(mesh.get_group(0), mesh.device_type) if names is None else mesh[names[0]]


def _has_parameters_on(mesh: DeviceMesh, module: nn.Module) -> bool:
    found = [each.device_mesh for each in module.parameters() if isinstance(each, DTensor)]
    for state in wrapper_states(module):
        found += [param.tp_spec.mesh for param in state.unit.params if param.tp_spec is not None]
    return any(each == mesh for each in {id(each): each for each in found}.values())


def tensor_parallel_groups(params: Iterable[ManagedParam]) -> list[Any]:
    """The process groups of the tensor-parallel meshes of these parameters, each once."""
    meshes = {id(param.tp_spec.mesh): param.tp_spec.mesh for param in params if param.tp_spec is not None}
    return list(dict.fromkeys(group for mesh in meshes.values() for group in mesh.get_all_groups()))


# -- from unsharded parameters to what state dicts hold, and back -----------------------------------------------------


def full_value(value: torch.Tensor) -> torch.Tensor:
    """All of an unsharded parameter or state. All ranks of the tensor-parallel mesh have to call."""
    return value.full_tensor() if isinstance(value, DTensor) else value


def tp_part(param: ManagedParam, value: Any) -> Any:
    """This rank's part of `value`, all of a parameter or of its state; `value` itself if it is neither.

    Also of a DTensor on the tensor-parallel mesh, as `summon_full_params` gives.
    """
    spec = param.tp_spec
    if spec is None or not isinstance(value, torch.Tensor) or value.shape != spec.shape:
        return value
    if isinstance(value, DTensor):
        if value.device_mesh == spec.mesh and value.placements == spec.placements:
            return local_of(value)
        value = value.full_tensor()
    return _cut(value, spec.mesh, spec.placements).contiguous()


def shard_on_meshes(value: torch.Tensor, groups: Groups, tp_mesh: DeviceMesh, offload: bool) -> DTensor:
    """An unsharded parameter or state as a DTensor over the mesh of the unit and `tp_mesh` together.

    As PyTorch's wrapper does it: data parallelism shards dim 0 first, and then tensor parallelism what is left.
    """
    if groups.mesh is None:
        raise UnsupportedError(
            "A sharded state dict of a model with tensor-parallel parameters needs the mesh of the other ranks: wrap "
            'with device_mesh=mesh["dp"] instead of process_group, or set FULL_STATE_DICT.'
        )
    over_tp: Sequence[Placement] = value.placements if isinstance(value, DTensor) else [Replicate()] * tp_mesh.ndim
    mesh = concatenated_mesh([groups.mesh, tp_mesh])
    placements = (*[Replicate()] * (groups.mesh.ndim - 1), Shard(0), *over_tp)
    if any(each.is_shard(0) for each in over_tp):
        mine = _cut(full_value(value), mesh, placements)
    else:
        mine = _cut(local_part(value), groups.mesh, placements[: groups.mesh.ndim])
    mine = mine.cpu() if offload and mine.device.type != "cpu" else mine.clone()
    return make_dtensor(mine.contiguous(), mesh, placements, value.shape)


def _cut(whole: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> torch.Tensor:
    """This rank's part, a view: each mesh dimension in turn chunks what the ones before it left."""
    for number, placement in enumerate(placements):
        if isinstance(placement, Shard):
            rows = RowSharding((whole.shape[placement.dim],), mesh.size(number))
            whole = whole.narrow(placement.dim, *rows.rows(mesh.get_local_rank(number)))
    return whole
