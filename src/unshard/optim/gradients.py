"""Gradients that are clipped or scaled: their local tensors, and the process group that has to agree on them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from ..comm.agreement import largest_over, smallest_over, sum_over
from ..comm.groups import covering_group, device_of, is_group, ranks_of, staging_device, widest_of
from ..comm.order.waiting import SharedCall
from ..errors import ArgumentError
from ..torch_private import local_of, spec_of


def local_gradient(parameter: torch.Tensor) -> torch.Tensor | None:
    """The local gradient as a plain dense tensor: a write to it changes the gradient.

    None if there is no gradient, or if none of its elements is on this rank.
    """
    gradient = parameter.grad
    if gradient is None:
        return None
    if isinstance(gradient, DTensor):
        gradient = local_of(gradient)
    elif gradient.is_sparse:
        # Entries of one row add up: only their sum has a norm, and it may overflow although the entries did not.
        if not gradient.is_coalesced():
            parameter.grad = gradient = gradient.coalesce()
        gradient = gradient.values()
    return gradient if gradient.numel() else None


@dataclass(frozen=True)
class ReduceGroup:
    """The ranks that hold any part of some parameters. A `group` of None is this process alone."""

    group: Any
    device: torch.device
    """A device that the group can reduce on; gradients may be on the host."""
    call: SharedCall

    @property
    def size(self) -> int:
        return 1 if self.group is None else self.group.size()

    def sum(self, number: torch.Tensor) -> None:
        if self.group is not None:
            sum_over(self.group, number, self.call)

    def max(self, number: torch.Tensor) -> None:
        if self.group is not None:
            largest_over(self.group, number, self.call)

    def min(self, number: torch.Tensor) -> None:
        """A rank without a number passes -1."""
        if self.group is not None:
            smallest_over(self.group, number, self.call)


def reduce_group_of(parameters: Sequence[torch.Tensor], group: Any, otherwise: torch.device, what: str) -> ReduceGroup:
    """All ranks of the parameters' meshes, or those of the user's `group`. `otherwise`: the device if there is neither.

    Parameters without gradients count as well, so a rank without gradients joins the reduction. The order check
    compares that all ranks do `what`.
    """
    meshes = _meshes(parameters)
    if group is not None:
        _check_group(group, meshes)
    sharded_over = [mesh.get_group(dim) for mesh in meshes for dim in range(mesh.ndim)]
    call = SharedCall(what, [group, *sharded_over])
    if group is not None:
        return ReduceGroup(group, device_of(widest_of(meshes)) if meshes else staging_device(group, parameters), call)
    if meshes:
        return ReduceGroup(covering_group(meshes), device_of(widest_of(meshes)), call)
    return ReduceGroup(None, otherwise, call)


def _meshes(parameters: Sequence[torch.Tensor]) -> list[DeviceMesh]:
    """The distinct meshes that this rank is on."""
    meshes = [spec_of(parameter).mesh for parameter in parameters if isinstance(parameter, DTensor)]
    distinct = {id(mesh): mesh for mesh in meshes}  # comparing meshes costs more
    return [mesh for mesh in distinct.values() if mesh.get_coordinate() is not None]


def check_process_group(group: Any) -> None:
    if not is_group(group):
        where = f"rank {dist.get_rank()}" if dist.is_initialized() else "this process"
        raise ArgumentError(f"process_group must be a process group that {where} belongs to, got {group!r}.")


def _check_group(group: Any, meshes: list[DeviceMesh]) -> None:
    check_process_group(group)
    if not meshes or group.size() == dist.get_world_size():
        return
    try:
        members = frozenset(dist.get_process_group_ranks(group))
    except KeyError:  # torch did not create the group, so its ranks are unknown
        return
    for mesh in meshes:
        if not ranks_of(mesh) <= members:
            raise ArgumentError(
                f"process_group has the ranks {sorted(members)}, and parameters on rank {dist.get_rank()} are sharded "
                f"over the ranks {sorted(ranks_of(mesh))}. Pass a group that contains these, or None to find one."
            )
