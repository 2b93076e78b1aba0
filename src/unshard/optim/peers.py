"""The ranks that hold any part of some parameters, and so have to agree on what is done to their gradients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from ..comm.cover import covering_group, device_of, ranks_of, widest_of
from ..comm.number import largest_over, sum_over
from ..errors import ArgumentError
from ..torch_private import served_device_types, spec_of


@dataclass(frozen=True)
class Peers:
    """A process group, and the device on which it can reduce; gradients may lie elsewhere, on the host."""

    group: Any
    device: torch.device

    @property
    def size(self) -> int:
        return 1 if self.group is None else self.group.size()

    def sum(self, number: torch.Tensor) -> None:
        if self.group is not None:
            sum_over(self.group, number)

    def largest(self, number: torch.Tensor) -> None:
        if self.group is not None:
            largest_over(self.group, number)


def peers_of(parameters: Sequence[torch.Tensor], group: Any, otherwise: torch.device) -> Peers:
    """The peers of this rank; `group` if a user gave one. `otherwise` is the device if there is nobody to talk to.

    Parameters count whether or not they have gradients: a rank without any must come to the reduction, too.
    """
    meshes = _meshes(parameters)
    if group is not None:
        _check(group, meshes)
        return Peers(group, device_of(widest_of(meshes)) if meshes else _served(group, parameters))
    if meshes:
        return Peers(covering_group(meshes), device_of(widest_of(meshes)))
    return Peers(None, otherwise)


def _meshes(parameters: Sequence[torch.Tensor]) -> list[DeviceMesh]:
    """Each mesh once, without those that this rank is not on."""
    meshes = [spec_of(parameter).mesh for parameter in parameters if isinstance(parameter, DTensor)]
    distinct = {id(mesh): mesh for mesh in meshes}  # comparing meshes costs more
    return [mesh for mesh in distinct.values() if mesh.get_coordinate() is not None]


def _check(group: Any, meshes: list[DeviceMesh]) -> None:
    if not isinstance(group, dist.ProcessGroup):
        raise ArgumentError(
            f"process_group must be a process group that rank {dist.get_rank()} belongs to, got {group!r}."
        )
    if group.size() == dist.get_world_size():
        return
    members = frozenset(dist.get_process_group_ranks(group))
    for mesh in meshes:
        if not ranks_of(mesh) <= members:
            raise ArgumentError(
                f"process_group has the ranks {sorted(members)}, and parameters on rank {dist.get_rank()} lie on the "
                f"ranks {sorted(ranks_of(mesh))}. Pass a group that contains these, or none to have it found."
            )


def _served(group: Any, parameters: Sequence[torch.Tensor]) -> torch.device:
    """A device that the group can reduce on: the parameters' own, if it can, or does not say what it can."""
    types = served_device_types(group)
    for parameter in parameters:
        if parameter.device.type in types or not types:
            return parameter.device
    if "cpu" in types or not types:
        return torch.device("cpu")
    return torch.device(types[0], torch.accelerator.current_device_index())
