"""DTensors made and read without their dispatcher; and the older `ShardedTensor`."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor import Shard as ShardOfTensor
from torch.distributed._shard.sharded_tensor import ShardedTensor as ShardedTensor
from torch.distributed._shard.sharded_tensor import ShardedTensorMetadata, TensorProperties
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec as DTensorSpec
from torch.distributed.tensor._dtensor_spec import TensorMeta
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from .tensors import contiguous_stride


def make_dtensor(local: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement], shape: torch.Size) -> DTensor:
    """A DTensor over exactly `local`, with a contiguous global shape.

    The public `DTensor.from_local` puts a view of `local` inside, so the caller could not tell later whether
    the DTensor still holds the tensor it was given. All versions.
    """
    meta = TensorMeta(shape, contiguous_stride(shape), local.dtype)
    spec = DTensorSpec(mesh, tuple(placements), tensor_meta=meta)
    dtensor = DTensor(_without_offset(local), spec, requires_grad=False)
    rebind_local(dtensor, local)
    return dtensor


def make_sharded_parameter(
    local: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement], shape: torch.Size, requires_grad: bool
) -> nn.Parameter:
    """The same as a parameter, for whose making torch makes the DTensor once more. All versions."""
    parameter = nn.Parameter(make_dtensor(_without_offset(local), mesh, placements, shape), requires_grad)
    rebind_local(parameter, local)
    return parameter


def _without_offset(local: torch.Tensor) -> torch.Tensor:
    """A tensor to make a DTensor with in place of `local`.

    A DTensor keeps the storage offset of the tensor it was made with, though it has no storage, and with one it can be
    neither copied nor saved.
    """
    if type(local) is not torch.Tensor or local.storage_offset() == 0:
        return local
    return local.new_empty(()).expand(local.shape)


def wrap_like(local: torch.Tensor, spec: DTensorSpec | None) -> torch.Tensor:
    """A DTensor over exactly `local` with the given spec; `local` itself without one. As above. All versions."""
    return local if spec is None else DTensor(local, spec, requires_grad=False)


def strided_shard(dim: int, factor: int) -> Placement:
    """A cut of a dimension that a later mesh dimension has cut in `factor` pieces first. All versions."""
    return _StridedShard(dim, split_factor=factor)


# Called for every parameter in every step, hence no Python functions.
local_of: Callable[[torch.Tensor], torch.Tensor] = attrgetter("_local_tensor")
"""The local tensor object itself; `to_local()` makes a new view under autograd. All versions."""
spec_of: Callable[[torch.Tensor], DTensorSpec] = attrgetter("_spec")
"""Mesh and placements in one attribute; the public properties look it up twice. All versions."""


def rebind_local(tensor: torch.Tensor, local: torch.Tensor) -> None:
    """Put `local` inside a DTensor, keeping the object; there is no public way. All versions."""
    tensor._local_tensor = local  # type: ignore[attr-defined]


def make_sharded_tensor(
    local: torch.Tensor,
    pieces: list[tuple[list[int], list[int], int]],
    shape: tuple[int, ...],
    group: Any,
) -> Any:
    """A `ShardedTensor` of which this rank has `local`, maybe nothing; `pieces`: offsets, sizes and ranks of all.

    What sharded state dicts of FSDP1 hold, and `torch.distributed.checkpoint` reads; it has no public name. Made
    from what all ranks know, without asking them. All versions.
    """
    device = local.device
    kind = device.type if device.type == "cpu" else f"{device.type}:{device.index}"
    metadata = [ShardMetadata(offsets, sizes, placement=f"rank:{rank}/{kind}") for offsets, sizes, rank in pieces]
    own = [each for each, (_, _, rank) in zip(metadata, pieces, strict=True) if rank == dist.get_rank()]
    mine = [ShardOfTensor(local, each) for each in own]
    properties = TensorProperties(dtype=local.dtype)
    about = ShardedTensorMetadata(metadata, torch.Size(shape), properties)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # that torch would rather have DTensors helps no user of these
        return ShardedTensor._init_from_local_shards_and_global_metadata(mine, about, process_group=group)


def read_sharded_tensor(tensor: Any) -> tuple[tuple[int, ...], torch.dtype, torch.Tensor | None]:
    """Shape, dtype and this rank's part of a `ShardedTensor`. All versions."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        about, shards = tensor.metadata(), tensor.local_shards()
    return tuple(about.size), about.tensor_properties.dtype, shards[0].tensor if shards else None
