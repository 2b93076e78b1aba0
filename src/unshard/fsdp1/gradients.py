"""Methods of `FullyShardedDataParallel` for gradients: `no_sync`, `clip_grad_norm_` and `register_comm_hook`."""

from __future__ import annotations

import dataclasses
import functools
import math
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ..comm.interface import Done, Label, Tensors, Transport, Work
from ..comm.order.waiting import SharedCall
from ..engine.api import FlatShardedParams, refuse_in_scope
from ..errors import ArgumentError, ConflictError
from ..optim.clip import CLIP, checked_limit, checked_order, clip
from ..torch_private import foreach_norm, low_precision_of, stack_level_of_program
from .groups import Groups
from .state import WrapperState, flat_sharded_of, shard_begins, states_below_root

Params = dict[nn.Parameter, None]
"""An ordered set of parameters."""
Kind = tuple[bool, tuple[Any, ...]]
"""A pair (is_sharded, groups) that describes gradients. `is_sharded` is True if data-parallel ranks hold shards of the
gradients, and False if they hold copies. `groups` are process groups over which the gradients are tensor parallel."""


@contextmanager
def no_sync(self: nn.Module) -> Iterator[None]:
    """Accumulate unsharded gradients inside this context. The next backward outside the context reduces them.

    Call this on the root. After `composable.fully_shard`, call `FullyShardedDataParallel.no_sync(module)`.
    """
    states = states_below_root(self, "no_sync")
    before = [(state.unit.options, state.unit.options.reshard_after_backward) for state in states]
    for options, _ in before:
        options.synchronize = options.all_reduce = False
        if options.reshard_after_forward is False:
            options.reshard_after_backward = False
    try:
        yield
    finally:
        for options, reshard_after_backward in before:
            options.synchronize = options.all_reduce = True
            options.reshard_after_backward = reshard_after_backward


# -- `clip_grad_norm_` -----------------------------------------------------------------------------------------------


@torch.no_grad()
def clip_grad_norm_(self: nn.Module, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
    """Scale all gradients so that their norm of order `norm_type` is at most `max_norm`. Return the norm before.

    Call this on the root. After `composable.fully_shard`, call `FullyShardedDataParallel.clip_grad_norm_(module, ...)`.
    """
    states = states_below_root(self, "clip_grad_norm_")
    limit, order = checked_limit(max_norm), checked_order(norm_type, positive=True)
    refuse_in_scope(self.parameters(), "clip_grad_norm_()", "The ranks have not added up their gradients yet")
    sharded: Params = {}
    others: Params = {}
    apart: dict[Kind, list[torch.Tensor]] = {}
    tensor_parallel: Params = {}
    for state in states:
        flat, shards = flat_sharded_of(state.unit), state.transports[0]
        if flat is not None:
            own = [param.sharded for param in flat.params] if flat.originals else [flat.flat.sharded]
            (sharded if shards.world > 1 else others).update(dict.fromkeys(own))
            tensor_parallel.update(dict.fromkeys(_add_tensor_parallel(flat, shards, apart)))
    if not sharded:
        others.clear()  # without shards, PyTorch sums in the order of `parameters()`
    others.update(dict.fromkeys(each for each in self.parameters() if each not in sharded))
    gradients = _gradients({**sharded, **others})
    for parameter in tensor_parallel:
        sharded.pop(parameter, None)
        others.pop(parameter, None)
    norm = _total_norm(sharded, others, apart, order, states[0].unit.device, states[0].groups)
    if states[0].cpu_offload.offload_params:
        norm = norm.cpu()
    clip(gradients, norm, limit)
    if not gradients:
        warnings.warn(
            f"Rank {dist.get_rank()} has no gradients; it returns the norm of the other ranks' gradients, in float32.",
            stacklevel=stack_level_of_program(),
        )
        return norm
    return norm.to(functools.reduce(torch.promote_types, [each.dtype.to_real() for each in gradients]))


def _add_tensor_parallel(
    flat: FlatShardedParams, shards: Transport, apart: dict[Kind, list[torch.Tensor]]
) -> Iterable[nn.Parameter]:
    """Add the gradients of tensor-parallel parameters to `apart`, by kind. Return these parameters.

    All ranks add the same kinds in the same order, even if a kind has no gradients: each kind needs collectives.
    If the unit has a flat parameter, return it, and split its gradient by kind.
    """
    kinds: list[Kind] = []
    for spec in [param.tp_spec for param in flat.params]:
        over: list[Any] = []
        if spec is not None:
            over = [spec.mesh.get_group(dim) for dim, each in enumerate(spec.placements) if each.is_shard()]
        kinds.append((shards.world > 1, tuple(over)))
    if not any(tensor_parallel for _, tensor_parallel in kinds):
        return []
    if flat.originals:
        taken = {param.sharded: kind for param, kind in zip(flat.params, kinds, strict=True) if kind[1]}
        for parameter, kind in taken.items():
            apart.setdefault(kind, []).extend(_gradients([parameter]))
        return taken
    for kind in kinds:
        apart.setdefault(kind, [])
    whole = flat.flat.sharded.grad
    for index, begin in shard_begins(flat, shards.rank):
        count = flat.params[index].sharding.elements(shards.rank)[1]  # type: ignore[union-attr]
        if whole is not None and count:
            apart[kinds[index]].append(whole[begin : begin + count])
    return [flat.flat.sharded]


def _total_norm(
    sharded: Params,
    others: Params,
    apart: dict[Kind, list[torch.Tensor]],
    order: float,
    device: torch.device,
    groups: Groups,
) -> torch.Tensor:
    """Return the norm of all gradients. The ranks of `groups.own` hold shards of `sharded` and copies of `others`."""
    if not sharded and not apart:
        return _norm(_gradients(others), order, device)
    call, largest = SharedCall(CLIP, [groups.own, groups.replicas]), math.isinf(order)
    op = dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM
    add = torch.maximum if largest else torch.add
    totals = {True: torch.zeros((), device=device), False: torch.zeros((), device=device)}
    measured: list[tuple[bool, tuple[Any, ...], list[torch.Tensor]]]
    measured = [(True, (), _gradients(sharded)), (False, (), _gradients(others))]
    measured += [(*kind, gradients) for kind, gradients in apart.items()]
    for is_sharded, tensor_parallel, gradients in measured:
        own = _norm(gradients, order, device)
        own = own if largest else own.pow(order)
        for group in tensor_parallel:
            call.run(partial(dist.all_reduce, own, op, group))
        totals[is_sharded] = add(totals[is_sharded], own)
    if largest:
        found = torch.maximum(totals[True], totals[False])
        call.run(partial(dist.all_reduce, found, op, groups.own))
        return found
    if sharded or any(is_sharded for is_sharded, _ in apart):
        call.run(partial(dist.all_reduce, totals[True], op, groups.own))
    return (totals[True] + totals[False]).pow(1 / order)


def _gradients(parameters: Iterable[nn.Parameter]) -> list[torch.Tensor]:
    return [each.grad for each in parameters if each.grad is not None]


def _norm(gradients: list[torch.Tensor], order: float, device: torch.device) -> torch.Tensor:
    if not gradients:
        return torch.zeros((), device=device)
    gradients = [each.abs() if each.is_complex() else each for each in gradients]
    dtype = functools.reduce(torch.promote_types, [each.dtype for each in gradients], torch.float32)
    norms = [each.to(gradients[0].device) for each in foreach_norm(gradients, order, dtype=dtype)]
    return torch.linalg.vector_norm(torch.stack(norms), order, dtype=dtype).to(device, torch.float32)


# -- `register_comm_hook` --------------------------------------------------------------------------------------------


def register_comm_hook(self: nn.Module, state: object, hook: Callable[..., Any]) -> None:
    """Reduce and divide the gradients of all units with `hook`. Call this once on the root, before the first forward.

    Each call is `hook(state, gradient, output)` with an unsharded flat gradient. The hook must write this rank's
    reduced shard to `output`. With NO_SHARD, each call is `hook(state, gradient)` and must reduce `gradient` in place.

    Raises:
        ArgumentError: this is not the root, or `hook` is no function.
        ConflictError: a hook is already registered, or the strategy is hybrid.
    """
    if not callable(hook):
        raise ArgumentError(f"hook must be a function, got {hook!r}.")
    states = states_below_root(self, "register_comm_hook", ConflictError)
    for each in states:
        if each.has_comm_hook:
            raise ConflictError("A communication hook is already registered.")
        if each.groups.replicas is not None:
            raise ConflictError(f"{each.groups.strategy.name} reduces in two steps, which hooks cannot do.")
    for each in states:
        each.has_comm_hook = True
        sharded = flat_sharded_of(each.unit)
        if sharded is None:
            continue
        group, options = each.unit.param_groups[0], each.unit.options
        dtype = _compressed_dtype(hook, state, each, {param.sharded.dtype for param in sharded.params})
        if dtype is not None:
            group.gradients.forget_buffers()
            sharded.reduce_in(dtype)
        else:
            options.divide_factor, options.divide_in_halves = 1.0, True
            group.wrap_reduce_transport(lambda inner: HookedTransport(inner, state, hook))


class HookedTransport(Transport):
    """All-gathers with the inner transport, and reduces with the user's hook, as `register_comm_hook` describes."""

    divides = True

    def __init__(self, inner: Transport, state: Any, hook: Callable[..., Any]):
        self._inner, self._state, self._hook = inner, state, hook
        self.rank, self.world = inner.rank, inner.world
        self.traits = dataclasses.replace(inner.traits, reduces_in_place=False, waits_in_stream=False)
        self.pool = inner.pool

    def all_gather(self, outputs: Tensors, inputs: Tensors, *, label: Label | None = None) -> Work:
        return self._inner.all_gather(outputs, inputs, label=label)

    def reduce_scatter(self, outputs: Tensors, inputs: Tensors, *, label: Label | None = None, average: bool) -> Work:
        for output, unreduced in zip(outputs, inputs, strict=True):
            if self.world > 1:
                self._call_hook(unreduced, output)
            else:  # one rank: the unit is not sharded
                self._call_hook(unreduced)
                output.copy_(unreduced[: output.numel()])
        return Done()

    def all_reduce(self, tensors: list[torch.Tensor], *, label: Label | None = None, average: bool) -> Work:
        for tensor in tensors:
            self._call_hook(tensor)
        return Done()

    def carrier(self, dtype: torch.dtype) -> torch.dtype:
        return self._inner.carrier(dtype)

    def _call_hook(self, *tensors: torch.Tensor) -> None:
        given = [each.detach() for each in tensors]
        self._hook(self._state, *given)
        # PyTorch's low-precision hooks (`algorithms._comm_hooks.default_hooks`) replace the memory of their arguments.
        if given[-1].data_ptr() != tensors[-1].data_ptr():
            tensors[-1].copy_(given[-1])


def _compressed_dtype(hook: Any, state: Any, wrapper: WrapperState, originals: set[torch.dtype]) -> Any:
    """Return the dtype of `hook` if it is a PyTorch compression hook that the engine can replace, and None otherwise.

    The engine reduces in this dtype instead of calling the hook, so the reduction overlaps with backward on any device.
    `originals` has the dtypes of the unit's parameters.
    """
    names = ("process_group", "gradient_predivide_factor", "gradient_postdivide_factor")
    same_ranks = [getattr(state, name, None) for name in names] == [wrapper.process_group, *wrapper.division()]
    restores = {getattr(state, "parameter_type", None)} == originals
    return low_precision_of(hook) if same_ranks and restores else None
