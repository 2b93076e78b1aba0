"""Unshards parameters of wrapped modules for programs, and converts tensors for sharded state dicts."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from ..comm.order.waiting import SharedCall
from ..comm.transports import transport_for
from ..engine.api import FlatShardedParams, ManagedParam, Phase, Precision, location_of
from ..errors import ConflictError, UnsupportedError
from ..layout.shardings import RowSharding
from ..torch_private import (
    ShardedTensor,
    as_dtensor,
    concatenated_mesh,
    local_of,
    local_part,
    make_dtensor,
    make_sharded_tensor,
    own_parameters,
    read_sharded_tensor,
)
from .groups import Groups, tensor_parallel_groups
from .state import (
    FLAT_PARAM,
    WrapperState,
    flat_sharded_of,
    in_memory_order,
    in_shape,
    shard_begins,
    states_of,
    wrapper_state_of,
    wrapper_states,
)


@contextmanager
def summon_full_params(
    module: nn.Module,
    recurse: bool = True,
    writeback: bool = True,
    rank0_only: bool = False,
    offload_to_cpu: bool = False,
    with_grads: bool = False,
) -> Iterator[None]:
    """A context manager in which modules hold unsharded parameters under their original names.

    This applies to all wrapped modules in `module`. Without `recurse`, it applies to `module` only. Changes that
    programs make to the parameters persist, unless `writeback` is False. With `rank0_only`, ranks other than rank 0
    keep sharded parameters. `offload_to_cpu` moves the parameters to host memory. With `with_grads`, gradients are also
    unsharded. All ranks must enter the context together. Raises an UnsupportedError for combinations of these.
    """
    if writeback and rank0_only:
        raise UnsupportedError("writeback=True with rank0_only=True would leave the ranks with different parameters.")
    if offload_to_cpu and not rank0_only:
        warnings.warn(
            "offload_to_cpu without rank0_only copies the whole model to the host on every rank.", stacklevel=3
        )
    own = wrapper_state_of(module)
    if own is not None:
        own.find_root(module)
    states = wrapper_states(module) if recurse else ([] if own is None else [own])
    owners = dict.fromkeys(owner for state in states for owner in state.owners)
    states += [each for each in owners if each not in states and not each.in_summon_full_params]
    with full_params(states, writeback, rank0_only, offload_to_cpu, with_grads):
        yield


@contextmanager
def full_params(
    states: list[WrapperState],
    writeback: bool,
    rank0_only: bool = False,
    offload_to_cpu: bool = False,
    with_grads: bool = False,
) -> Iterator[None]:
    """Like `summon_full_params`, but for the units of `states` only, not for other units that own shared parameters."""
    for state in states:
        if state.in_summon_full_params:
            raise ConflictError(f"{state.unit} is already in summon_full_params, which cannot be nested.")
        if state.unit.phase is not Phase.IDLE:
            raise ConflictError(f"{state.unit} is computing. Call summon_full_params outside forward and backward.")
        if with_grads and (offload_to_cpu or not state.use_orig_params):
            raise UnsupportedError("with_grads=True needs use_orig_params=True and no offload_to_cpu.")
        if offload_to_cpu and state.groups.shards is None:
            raise UnsupportedError("offload_to_cpu=True does not support NO_SHARD, whose parameters are not sharded.")
    sharded_over = [state.groups.shards for state in states if state.groups.shards is not None]
    SharedCall("gather full parameters (summon_full_params or a state dict)", sharded_over)
    with ExitStack() as stack:
        for state in states:
            if not state.handle:  # a unit without parameters still strips prefixes from names
                stack.callback(setattr, state, "in_summon_full_params", False)
                state.in_summon_full_params = True
        units = [
            FullParams(state, writeback, rank0_only, offload_to_cpu, with_grads) for state in states if state.handle
        ]
        for each in units:
            each.rest()
        for each in units:
            each.gather()
        for each in units:
            stack.callback(each.exit)
            each.enter()
        if writeback:
            stack.callback(_write_back, units)  # before any unit reshards: a program may swap memory between units
        yield


class FullParams:
    """The parameters of one unit inside `summon_full_params`."""

    def __init__(self, state: WrapperState, writeback: bool, rank0_only: bool, offload: bool, with_grads: bool):
        self._state, self._unit = state, state.unit
        sharded = flat_sharded_of(state.unit)
        assert sharded is not None
        self._sharded: FlatShardedParams = sharded
        self._places = [(location, param) for param in sharded.params for location in param.locations]
        self._writeback, self._offload, self._with_grads = writeback, offload, with_grads
        self._rank = state.transports[0].rank
        self._exposes = not rank0_only or self._rank == 0
        self._precision = self._unit.precision

    def rest(self) -> None:
        """Reshard this unit and units that share its parameters. Parameters may have changed since the all-gather."""
        self._unit.reshard()
        for state in states_of(self._unit.sharers):
            if not state.in_summon_full_params:
                state.unit.reshard()

    def gather(self) -> None:
        """Start the all-gather in the stored dtype."""
        unit, dtypes = self._unit, self._sharded.shard.segments.kinds[0]
        if dtypes.compute != dtypes.original or unit.sharers:
            unit.select(Precision.STORED)
        unit.all_gather()

    def enter(self) -> None:
        """Register the unsharded parameters on the modules instead of the flat parameter."""
        self._state.in_summon_full_params = True
        self._unit.unshard()
        if not self._exposes:
            self._unit.reshard()
            return
        for location, param in self._places:
            parameter, module = param.unsharded, location.module()
            assert parameter is not None
            if self._offload and parameter.device.type != "cpu":
                parameter = nn.Parameter(parameter.detach().cpu(), requires_grad=parameter.requires_grad)
            if module is not None:  # also if the module usually has a plain attribute: `named_parameters` must list it
                location.put(parameter)
                module.__dict__.pop(location.name, None)
                location_of(module, location.name).put(parameter)
        if not self._state.use_orig_params:
            self._sharded.flat.locations[0].parameters.pop(FLAT_PARAM, None)
        if self._with_grads:
            self._unshard_gradients()

    def moved(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return (view of the unsharded buffer, new value) for each parameter that is no longer in the buffer.

        Programs move a parameter out of the buffer by assigning a new tensor to the parameter or its `data`.
        """
        found: list[tuple[torch.Tensor, torch.Tensor]] = []
        if not self._exposes:
            return found
        for location, param in self._places:
            module, place = location.module(), param.unsharded_view
            current = None if module is None else own_parameters(module).get(location.name)
            if current is None or place is None:
                continue
            shape = place.shape if param.tp_spec is None else param.tp_spec.shape
            if current.shape != shape:
                raise ConflictError(
                    f"Parameter {param.name!r} has the shape {tuple(current.shape)} now, expected {tuple(shape)}."
                )
            local = tp_local(param, current.detach())
            if place.numel() and not _same_memory(local, place):
                found.append((place, local))
        return found

    def exit(self) -> None:
        """Write changes back, unless `writeback` is False, and register the sharded parameters again."""
        if self._exposes:
            self._keep_and_unregister()
        self._unit.reshard()
        self._unit.select(self._precision)
        self._state.in_summon_full_params = False

    @torch.no_grad()
    def _keep_and_unregister(self) -> None:
        flat = self._sharded.flat
        if self._writeback and self._with_grads:
            self._write_back_gradients()
        for param in self._sharded.params:
            unsharded, place = param.unsharded, param.unsharded_view
            if unsharded is None:
                continue
            unsharded.grad = None
            if place is not None and param.tp_spec is None and not _same_memory(unsharded, place):
                unsharded.data = place  # otherwise, all-gathers would no longer update this parameter
        if not self._state.use_orig_params:
            for location, _ in self._places:
                module = location.module()
                if module is not None:
                    own_parameters(module).pop(location.name, None)
            self._sharded.flat.locations[0].parameters[FLAT_PARAM] = flat.sharded
        shard_numel = flat.local.numel()
        if self._writeback and flat.padded is not None:  # None if the unit has no elements on this rank
            flat.local.copy_(flat.padded[self._rank * shard_numel : (self._rank + 1) * shard_numel])

    # -- gradients ------------------------------------------------------------------------------------------

    @torch.no_grad()
    def _unshard_gradients(self) -> None:
        shards, shard_numel = self._state.transports[0], self._sharded.flat.local.numel()
        dtype, device = self._sharded.shard.segments.kinds[0].gradient, self._unit.device
        local = torch.zeros(shard_numel, dtype=dtype, device=device)
        any_here = False
        for index, begin in shard_begins(self._sharded, self._rank):
            param = self._sharded.params[index]
            gradient = param.sharded.grad
            if gradient is not None:
                any_here = True
                local[begin : begin + gradient.numel()] = in_memory_order(gradient, param)
        any_rank = torch.tensor([int(any_here)], dtype=torch.int32, device=device)
        shards.all_reduce([any_rank], average=False).wait()
        for group in tensor_parallel_groups(self._sharded.params):  # elements may be on only some of these ranks
            dist.all_reduce(any_rank, group=group)
        if not any_rank.item():
            return
        unsharded = local.repeat(shards.world)
        if shard_numel:
            shards.all_gather([unsharded.view(torch.uint8)], [local.view(torch.uint8)]).wait()
        for param in self._sharded.params:
            assert param.unsharded is not None
            if param.sharded.requires_grad:
                param.unsharded.grad = as_dtensor(in_shape(unsharded, param), param.tp_spec)

    def _write_back_gradients(self) -> None:
        for index, _ in shard_begins(self._sharded, self._rank):
            param = self._sharded.params[index]
            gradient, local = param.unsharded.grad if param.unsharded is not None else None, param.sharded.grad
            if gradient is not None and local is not None:
                gradient = tp_local(param, gradient)
                first, count = param.sharding.elements(self._rank)  # type: ignore[union-attr]
                flat = gradient.as_strided((param.sharding.numel,), (1,), gradient.storage_offset())
                part = flat[first : first + count]
                local.copy_(part if local.ndim == 1 and local.shape == part.shape else gradient)


@torch.no_grad()
def _write_back(units: list[FullParams]) -> None:
    moved = [pair for unit in units for pair in unit.moved()]
    buffers = {place.untyped_storage().data_ptr() for place, _ in moved}
    # A program may have swapped parameters, so clone the values that are in a buffer before writing to the buffer.
    values = [each.clone() if each.untyped_storage().data_ptr() in buffers else each for _, each in moved]
    for (place, _), value in zip(moved, values, strict=True):
        place.copy_(value)


def _same_memory(tensor: torch.Tensor, place: torch.Tensor) -> bool:
    # A transposed tensor has the same pointer, but other strides.
    same = tensor.data_ptr() == place.data_ptr() and tensor.dtype == place.dtype
    return same and tensor.shape == place.shape and tensor.stride() == place.stride()


# -- sharded tensors of state dicts (ShardedTensor, DTensor) --------------------------------------------------------


def shard_tensor(unsharded: torch.Tensor, state: WrapperState, offload: bool) -> Any:
    """Convert an unsharded tensor to a ShardedTensor or DTensor. A tensor-parallel tensor must be a DTensor.

    If the model has tensor-parallel parameters, plain tensors are replicated over the tensor-parallel mesh.
    """
    groups, meshes = state.groups, state.tensor_parallel_meshes()
    if isinstance(unsharded, DTensor):
        return _shard_on_meshes(unsharded, groups, unsharded.device_mesh, offload)
    if len(meshes) == 1 and groups.mesh is not None:
        return _shard_on_meshes(unsharded, groups, meshes[0], offload)
    return _shard_rows(offloaded(unsharded, offload), groups.own, groups.mesh)


def _shard_rows(unsharded: torch.Tensor, group: Any, mesh: DeviceMesh | None) -> Any:
    """Return a DTensor on `mesh` or, if `mesh` is None, a ShardedTensor of `group`, with this rank's rows.

    A rank without rows gets an empty shard. If the ShardedTensor had no shard, `torch.distributed.checkpoint` would
    skip it, mistake the checkpoint for one in an older format, and not find the optimizer's `param_groups`.
    """
    cut = RowSharding(tuple(unsharded.shape), group.size())
    rows = unsharded.narrow(0, *cut.rows(group.rank())).clone()
    if mesh is not None:
        placements = (*[Replicate()] * (mesh.ndim - 1), Shard(0))
        return make_dtensor(rows, mesh, placements, unsharded.shape)
    shards = []
    for rank in range(group.size()):
        offsets = [cut.rows(rank)[0], *[0] * (unsharded.ndim - 1)]
        shards.append((offsets, list(cut.local_shape(rank)), dist.get_global_rank(group, rank)))
    return make_sharded_tensor(rows, shards, tuple(unsharded.shape), group)


def shard_flat(local: torch.Tensor, length: int, group: Any) -> Any:
    """Convert this rank's padded shard of a flat tensor to a ShardedTensor without padding."""
    shard_numel, rank = local.numel(), group.rank()
    shards = []
    for each in range(group.size()):
        first, count = each * shard_numel, min(max(length - each * shard_numel, 0), shard_numel)
        if count or (each == 0 and not length):  # torch refuses a ShardedTensor without shards
            shards.append(([first], [count], dist.get_global_rank(group, each)))
    mine = min(max(length - rank * shard_numel, 0), shard_numel)
    return make_sharded_tensor(local[:mine].clone(), shards, (length,), group)


def is_sharded(value: Any) -> bool:
    return isinstance(value, DTensor | ShardedTensor)


@torch.no_grad()
def full_tensor(value: Any, group: Any, device: torch.device) -> Any:
    """Unshard a DTensor or ShardedTensor. Return any other value unchanged. All ranks of `group` must call this."""
    if isinstance(value, DTensor):
        return value.full_tensor()
    if not isinstance(value, ShardedTensor):
        return value
    shape, dtype, local = read_sharded_tensor(value)
    cut = RowSharding(shape, group.size())
    padded = torch.zeros((cut.chunk, *shape[1:]), dtype=dtype, device=device)
    if local is not None:
        padded[: local.shape[0]] = local.to(device)
    return all_gathered(padded, group, device)[: shape[0]]


def all_gathered(shard: torch.Tensor, group: Any, device: torch.device) -> torch.Tensor:
    if group is None or group.size() == 1:
        return shard
    shard = shard.contiguous().to(device)  # sent as bytes, because backends do not support all dtypes
    unsharded = shard.new_empty((shard.shape[0] * group.size(), *shard.shape[1:]))
    transport_for(group, device).all_gather([unsharded.view(torch.uint8)], [shard.view(torch.uint8)]).wait()
    return unsharded


def offloaded(tensor: torch.Tensor, offload: bool) -> torch.Tensor:
    return tensor.cpu() if offload else tensor


# -- tensor-parallel parameters ----------------------------------------------------------------------------------


def full_value(value: torch.Tensor) -> torch.Tensor:
    """Return `value` or, if it is a DTensor, its full tensor. All ranks of the DTensor's mesh must call this."""
    return value.full_tensor() if isinstance(value, DTensor) else value


def tp_local(param: ManagedParam, value: Any) -> Any:
    """Return this rank's tensor-parallel part of a full parameter or state. Return any other value unchanged.

    `value` may also be a DTensor on the tensor-parallel mesh, as in `summon_full_params`.
    """
    spec = param.tp_spec
    if spec is None or not isinstance(value, torch.Tensor) or value.shape != spec.shape:
        return value
    if isinstance(value, DTensor):
        if value.device_mesh == spec.mesh and value.placements == spec.placements:
            return local_of(value)
        value = value.full_tensor()
    return _cut(value, spec.mesh, spec.placements).contiguous()


def _shard_on_meshes(value: torch.Tensor, groups: Groups, tp_mesh: DeviceMesh, offload: bool) -> DTensor:
    """Convert an unsharded parameter or state to a DTensor over the unit's mesh combined with `tp_mesh`.

    As in PyTorch, data parallelism shards dim 0 first, and tensor parallelism shards the result.
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
    """Return a view of this rank's elements of `whole`. Each mesh dimension splits the previous dimension's result."""
    for number, placement in enumerate(placements):
        if isinstance(placement, Shard):
            rows = RowSharding((whole.shape[placement.dim],), mesh.size(number))
            whole = whole.narrow(placement.dim, *rows.rows(mesh.get_local_rank(number)))
    return whole
