"""Gradients of a wrapped model: `clip_grad_norm_` and `register_comm_hook`."""

from __future__ import annotations

import dataclasses
import functools
import math
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ..comm.interface import Done, Label, Tensors, Transport, Work
from ..comm.order.waiting import SharedCall
from ..engine.api import division
from ..errors import ArgumentError, ConflictError
from ..optim.clip import CLIP, checked_limit, checked_order, clip
from ..torch_private import foreach_norm, low_precision_of
from .api import Groups
from .state import WrapperState, flat_sharded_of, shard_begins, states_below_root, wrapper_states

Params = dict[nn.Parameter, None]
"""An ordered set."""
Kind = tuple[bool, tuple[Any, ...]]
"""True if the wrapper's ranks hold shards, False if they hold copies; and the groups that tensor parallelism shards
over."""


def clip_grad_norm(root: nn.Module, max_norm: Any, norm_type: Any) -> torch.Tensor:
    """Return the norm of all gradients below `root` before scaling, in the dtype that their dtypes promote to."""
    limit, order = checked_limit(max_norm), checked_order(norm_type, positive=True)
    states = wrapper_states(root)
    sharded: Params = {}
    others: Params = {}
    for state in states:
        flat = flat_sharded_of(state.unit)
        if flat is not None and state.handle is not None:
            own = [param.sharded for param in flat.params] if flat.originals else [flat.flat.sharded]
            (sharded if state.handle.uses_sharded_strategy else others).update(dict.fromkeys(own))
    if not sharded:
        others.clear()  # PyTorch then adds up in the order of parameters(), not of units
    others.update(dict.fromkeys(each for each in root.parameters() if each not in sharded))
    gradients = _gradients({**sharded, **others})
    apart = _take_tensor_parallel(states, sharded, others)
    norm = _total_norm(sharded, others, apart, order, states[0].unit.device, states[0].call.groups)
    if states[0].call.cpu_offload.offload_params:
        norm = norm.cpu()
    clip(gradients, norm, limit)
    if not gradients:
        warnings.warn(
            f"Rank {dist.get_rank()} has no gradients; it returns the norm of the other ranks' gradients, in float32.",
            stacklevel=4,
        )
        return norm
    return norm.to(functools.reduce(torch.promote_types, [each.dtype.to_real() for each in gradients]))


def _total_norm(
    sharded: Params,
    others: Params,
    apart: dict[Kind, list[torch.Tensor]],
    order: float,
    device: torch.device,
    groups: Groups,
) -> torch.Tensor:
    """The norm over the ranks of `groups.own`, which hold shards of some parameters and copies of the others."""
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


def _take_tensor_parallel(
    states: list[WrapperState], sharded: Params, others: Params
) -> dict[Kind, list[torch.Tensor]]:
    """Remove the parameters that tensor parallelism shards from `sharded` and `others`; return their gradients by kind.

    The kinds and their order are the same on all ranks, whichever gradients there are. A flat parameter is taken as a
    whole, and its gradients may be of several kinds.
    """
    found: dict[Kind, list[torch.Tensor]] = {}
    for state in states:
        flat, rank = flat_sharded_of(state.unit), state.transports[0].rank
        if flat is None or state.handle is None:
            continue
        is_sharded = state.handle.uses_sharded_strategy
        kinds = [(is_sharded, _tensor_parallel_groups(param.tp_spec)) for param in flat.params]
        if not any(tensor_parallel for _, tensor_parallel in kinds):
            continue
        if flat.originals:
            taken = {param.sharded: kind for param, kind in zip(flat.params, kinds, strict=True) if kind[1]}
            for parameter, kind in taken.items():
                found.setdefault(kind, []).extend(_gradients({parameter: None}))
        else:
            taken = {flat.flat.sharded: kinds[0]}
            for kind in kinds:
                found.setdefault(kind, [])
            whole = flat.flat.sharded.grad
            for index, begin in shard_begins(flat, rank):
                count = flat.params[index].sharding.elements(rank)[1]  # type: ignore[union-attr]
                if whole is not None and count:
                    found[kinds[index]].append(whole[begin : begin + count])
        for parameter in taken:
            sharded.pop(parameter, None)
            others.pop(parameter, None)
    return found


def _tensor_parallel_groups(spec: Any) -> tuple[Any, ...]:
    """The groups of the mesh dimensions over which tensor parallelism shards a parameter."""
    placements = () if spec is None else spec.placements
    return tuple(spec.mesh.get_group(number) for number, each in enumerate(placements) if each.is_shard())


def _gradients(parameters: Params) -> list[torch.Tensor]:
    return [each.grad for each in parameters if each.grad is not None]


def _norm(gradients: list[torch.Tensor], order: float, device: torch.device) -> torch.Tensor:
    """A norm of norms in float32, whatever dtypes the gradients have; float64 is rounded at the end."""
    if not gradients:
        return torch.zeros((), device=device)
    gradients = [each.abs() if each.is_complex() else each for each in gradients]
    dtype = functools.reduce(torch.promote_types, [each.dtype for each in gradients], torch.float32)
    norms = [each.to(gradients[0].device) for each in foreach_norm(gradients, order, dtype=dtype)]
    return torch.linalg.vector_norm(torch.stack(norms), order, dtype=dtype).to(device, torch.float32)


# -- `register_comm_hook` --------------------------------------------------------------------------------------------


def register_comm_hook(root: nn.Module, hook_state: object, hook: Callable[..., Any]) -> None:
    """Let a user's hook reduce and divide the gradients of all units below `root`."""
    if not callable(hook):
        raise ArgumentError(f"hook must be a function, got {hook!r}.")
    states = states_below_root(root, "register_comm_hook", ConflictError)
    for state in states:
        if state.has_comm_hook:
            raise ConflictError("A communication hook is already registered.")
        if state.call.groups.replicas is not None:
            raise ConflictError(f"{state.call.groups.strategy.name} reduces in two steps, which hooks cannot do.")
    for state in states:
        state.has_comm_hook = True
        sharded = flat_sharded_of(state.unit)
        if sharded is None:
            continue
        group, options = state.unit.param_groups[0], state.unit.options
        originals = {param.sharded.dtype for param in sharded.params}
        dtype = _compressed_dtype(hook, hook_state, state.call.groups.own, originals)
        if dtype is not None:
            group.gradients.forget_buffers()
            sharded.reduce_in(dtype)
        else:
            options.divide_factor, options.divide_in_halves = 1.0, True
            group.wrap_reduce_transport(lambda inner: HookedTransport(inner, hook_state, hook))


class HookedTransport(Transport):
    """Gathers through the transport inside, and gives gradients to a user's hook.

    The hook of a sharded unit gets (state, flat gradient, this rank's shard to fill). The hook of a unit that is not
    sharded gets (state, gradient) and changes the gradient in place.
    """

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
        """Call the hook and copy its result back if necessary.

        PyTorch's low-precision hooks (`torch.distributed.algorithms._comm_hooks.default_hooks`) replace the memory of
        the tensors that they get.
        """
        given = [each.detach() for each in tensors]
        self._hook(self._state, *given)
        if given[-1].data_ptr() != tensors[-1].data_ptr():
            tensors[-1].copy_(given[-1])


def _compressed_dtype(hook: Callable[..., Any], state: Any, group: Any, originals: set[torch.dtype]) -> Any:
    """The dtype that PyTorch's compression hooks reduce in; None if the hook does, or may do, anything else.

    The engine then reduces in that dtype itself, like `MixedPrecision(reduce_dtype=...)`: overlapped, on any device.
    `originals`: the dtypes of the unit's parameters.
    """
    usual = division(group.size(), 1, frozenset(), None, False, in_halves=True)
    factors = (
        getattr(state, "gradient_predivide_factor", None),
        getattr(state, "gradient_postdivide_factor", None),
    )
    same_ranks = getattr(state, "process_group", None) is group and factors == (usual.before, usual.after)
    restores = {getattr(state, "parameter_type", None)} == originals
    return low_precision_of(hook) if same_ranks and restores else None
