"""Clips gradients by their total norm. The gradients may be distributed in any way.

Except for norms of order 0, the ranks reduce a single number. For models wrapped in `FullyShardedDataParallel`,
`fsdp1/gradients.py` computes the norm, and uses the argument checks and `clip` of this file. The last part of this file
finds local gradients and the ranks that clip or unscale them together. The gradient scalers use this part as well.
"""

from __future__ import annotations

import math
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from ..comm.agreement import largest_over, smallest_over, sum_over
from ..comm.groups import covering_group, device_of, is_group, ranks_of, staging_device, widest_of
from ..comm.order.waiting import SharedCall
from ..engine.api import Scalable, cut_flat, param_group_of, refuse_in_scope, scalable_gradients
from ..errors import ArgumentError, GradientError, listed
from ..torch_private import DTensorSpec, foreach_mul, foreach_norm, local_of, spec_of

CLIP = "clip gradients (clip_grad_norm_)"


@torch.no_grad()
def clip_grad_norm_(
    parameters: torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
    *,
    process_group: Any = None,
    pipeline_stages: int = 1,
) -> torch.Tensor:
    """Scale all gradients by one factor so that their norm is at most `max_norm`. Returns the norm before scaling.

    The result is equivalent to `torch.nn.utils.clip_grad_norm_` on the unsharded model. Parameters may be plain tensors
    or DTensors on any meshes. Every rank that holds any of the parameters must call this function, even if the rank has
    no gradients. The returned norm is a plain tensor and the same on all ranks.

    A parameter that several ranks hold counts once. If ranks hold different plain parameters, the norm is the power
    mean (of order `norm_type`) of the norms on the ranks. For pipeline stages, the norm of all stages together is
    needed: pass a `process_group` of the ranks of all stages, and the number of stages as `pipeline_stages`.

    As in PyTorch, the norm of order 0 is the number of gradients that are not all zero, and the norm of order -inf is
    the smallest absolute value.

    `foreach` selects torch's multi-tensor kernels, as in PyTorch.

    Raises:
        ArgumentError: an argument is invalid, or flat shards of the wrapper are passed on several ranks.
        GradientError: the norm is not finite, and `error_if_nonfinite` is True. Nothing is scaled.

    Example::

        norm = unshard.optim.clip_grad_norm_(model.parameters(), 1.0)
    """
    given = _checked(parameters)
    order, limit = checked_order(norm_type), checked_limit(max_norm)
    _check_stages(pipeline_stages, process_group)
    if (name := cut_flat(given)) is not None:
        raise ArgumentError(
            f"{name!r} is a flat shard of FullyShardedDataParallel or composable.fully_shard, which does not say what "
            "other ranks hold. Call FullyShardedDataParallel.clip_grad_norm_(model, max_norm) instead, with the "
            "outermost module; a wrapped module has it as a method."
        )
    refuse_in_scope(given, "clip_grad_norm_()", "The ranks have not added up their gradients yet")
    device = given[0].device if given else torch.device("cpu")
    ranks = reduce_group_of(given, process_group, otherwise=device, what=CLIP)
    scalable = scalable_gradients(given)
    if order <= 0:
        # Flat gradients hold several parameters, whose norms count separately, and zeros between them.
        scalable = Scalable([], given, [])
    gradients = _local_gradients(scalable, ranks.size)
    if order == 0:
        power = _nonzero_gradients(given, gradients, ranks)
    else:
        power = _power_of_norm(gradients, order, ranks, foreach)
    if pipeline_stages > 1 and not math.isinf(order):
        power *= pipeline_stages  # stages have equally many ranks, so the mean times the number of stages is the sum
    double = bool(given) and all(parameter.dtype == torch.float64 for parameter in given)
    is_norm = order == 0 or math.isinf(order)
    norm = (power if is_norm else power.pow(1 / order)).to(torch.float64 if double else torch.float32)
    if error_if_nonfinite and not norm.isfinite():
        _refuse_nonfinite(norm, order, given)
    clip([each.scaled for each in gradients], norm, limit, foreach)
    scalable.clean()
    return norm


@dataclass(frozen=True)
class LocalGradient:
    """This rank's elements of one gradient, or of several gradients that are adjacent in memory.

    `measured` contributes to the norm. `scaled` is clipped. The two differ only for partial gradients.
    """

    scaled: torch.Tensor
    measured: torch.Tensor
    weight: float
    """Factor for the power of the norm of `measured`, so that the sum over all ranks counts each gradient once."""
    parameter: torch.Tensor | None = None
    """None if `scaled` holds the gradients of several parameters."""


def _local_gradients(scalable: Scalable, ranks: int) -> list[LocalGradient]:
    found = [LocalGradient(each.tensor, each.tensor, _weight(each.spec, ranks)) for each in scalable.flat_gradients]
    weights: dict[Any, float] = {}
    for parameter in scalable.others:
        gradient, local = parameter.grad, local_gradient(parameter)
        measured, weight = local, 1 / ranks
        if isinstance(gradient, DTensor):
            placements = spec_of(gradient).placements
            if any(each.is_partial() for each in placements):
                # A partial gradient has no norm yet: its sum is measured, and the partial gradient itself is scaled.
                gradient = gradient.redistribute(
                    placements=[Replicate() if each.is_partial() else each for each in placements]
                )
                measured = local_of(gradient)
            spec = spec_of(gradient)
            key = id(spec.mesh), spec.placements
            if key not in weights:
                weights[key] = _weight(spec, ranks)
            weight = weights[key]
        if local is not None and measured is not None:
            found.append(LocalGradient(local, measured, weight, parameter))
    return found


def _weight(spec: DTensorSpec, ranks: int) -> float:
    mesh = spec.mesh
    # Replicated mesh dimensions hold copies, which count once.
    copies = math.prod(mesh.size(dim) for dim, placement in enumerate(spec.placements) if placement.is_replicate())
    return mesh.size() / (ranks * copies)


def _power_of_norm(
    gradients: list[LocalGradient], order: float, ranks: ReduceGroup, foreach: bool | None
) -> torch.Tensor:
    """Return the norm over all ranks, raised to the power of `order`. If `order` is infinite, return the norm itself.

    The result is float64, because powers of large numbers may overflow even if the norm does not.
    """
    buckets: dict[tuple[torch.device, torch.dtype, float], list[torch.Tensor]] = defaultdict(list)
    for each in gradients:
        buckets[each.measured.device, each.measured.dtype, each.weight].append(each.measured)
    powers = [] if order < 0 and buckets else [torch.zeros((), dtype=torch.float64, device=ranks.device)]
    for (_, dtype, weight), tensors in buckets.items():
        # float16 would overflow at norms of 65504. Norms of complex gradients are real, so pass no dtype for these.
        wide = torch.float32 if dtype in (torch.float16, torch.bfloat16) else None
        if foreach is False:
            norms = [torch.linalg.vector_norm(tensor, order, dtype=wide) for tensor in tensors]
        else:
            norms = list(foreach_norm(tensors, order, dtype=wide))
        stacked = torch.stack(norms).double()
        if math.isinf(order):
            power = stacked.amin() if order < 0 else stacked.amax()
        else:
            power = stacked.pow(order).sum() * weight
        powers.append(power.to(ranks.device))
    if order < 0:
        smallest = torch.stack(powers).amin() if gradients else powers[0] - 1  # -1: this rank has no gradients
        ranks.reduce(smallest_over, smallest)
        return smallest.clamp_(min=0)  # 0 if no rank has gradients, as in torch
    if math.isinf(order):
        largest = torch.stack(powers).amax()
        ranks.reduce(largest_over, largest)
        return largest
    total = torch.stack(powers).sum()
    ranks.reduce(sum_over, total)
    return total


def _nonzero_gradients(
    parameters: list[torch.Tensor], gradients: list[LocalGradient], ranks: ReduceGroup
) -> torch.Tensor:
    """Return the number of gradients that have a nonzero element on any rank of the parameter's mesh.

    PyTorch computes the norm of the gradients' norms. With order 0, this is the number of nonzero norms, not the number
    of nonzero elements. The ranks of a mesh therefore reduce one flag per parameter.
    """
    nonzero = {id(each.parameter): each.measured.any() for each in gradients}
    by_mesh: dict[int, list[torch.Tensor]] = defaultdict(list)
    for parameter in parameters:
        by_mesh[id(spec_of(parameter).mesh) if isinstance(parameter, DTensor) else 0].append(parameter)
    total = torch.zeros((), dtype=torch.float64, device=ranks.device)
    for members in by_mesh.values():
        mesh = reduce_group_of(members, None, otherwise=ranks.device, what=CLIP)
        zero = torch.zeros((), device=mesh.device)
        flags = torch.stack([nonzero[id(each)].to(zero) if id(each) in nonzero else zero for each in members])
        mesh.reduce(sum_over, flags)
        total += flags.count_nonzero().to(ranks.device)
    total /= ranks.size  # each rank counts each of its parameters once
    ranks.reduce(sum_over, total)
    return total


def clip(gradients: list[torch.Tensor], norm: torch.Tensor, limit: float, foreach: bool | None = None) -> None:
    """Scale the gradients in place. Their total norm is `norm` before and at most `limit` after the call.

    The gradients are multiplied even if the factor is 1, because reading the factor would make the host wait for the
    device.
    """
    factor = torch.clamp(limit / (norm + 1e-6), max=1.0)
    buckets: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = defaultdict(list)
    for each in gradients:
        buckets[each.device, each.dtype].append(each)
    for (device, _), tensors in buckets.items():
        # Not in the gradients' dtype: in float16 the factor for a large norm is zero.
        here = factor.to(device)
        if foreach is False:
            for tensor in tensors:
                tensor.mul_(here)
        else:
            foreach_mul(tensors, here)


def _refuse_nonfinite(norm: torch.Tensor, order: float, parameters: list[torch.Tensor]) -> None:
    bad = []
    for index, parameter in enumerate(parameters):
        local = local_gradient(parameter)
        if local is not None and not local.isfinite().all():
            bad.append(_named(parameter, f"{index} of shape {tuple(parameter.shape)}"))
    rank = dist.get_rank() if dist.is_initialized() else 0
    here = "All gradients on this rank are finite, so look at the other ranks"
    if bad:
        here = f"{len(bad)} gradients on this rank are not finite: parameters {listed(bad, most=8)}"
    raise GradientError(
        f"Rank {rank} expected finite gradients and found a norm (order {order:g}) of {norm.item()}. {here}. Nothing "
        "was scaled. Skip the step (a GradScaler does, for overflows in float16) or lower the learning rate; pass "
        "error_if_nonfinite=False to scale by that norm anyway."
    )


def _named(parameter: torch.Tensor, otherwise: str) -> str:
    group = param_group_of(parameter)
    param = None if group is None else group.param_of(parameter)
    if group is None or param is None:
        return otherwise
    return f"{param.name!r} of unit {group.unit_name!r}"


def _checked(parameters: Any) -> list[torch.Tensor]:
    if isinstance(parameters, torch.Tensor):
        return [parameters]
    if isinstance(parameters, torch.nn.Module) or not isinstance(parameters, Iterable):
        hint = " Pass model.parameters()." if isinstance(parameters, torch.nn.Module) else ""
        raise ArgumentError(f"parameters must be tensors, got a {type(parameters).__name__}.{hint}")
    given = list(dict.fromkeys(parameters))
    for each in given:
        if not isinstance(each, torch.Tensor):
            hint = " Pass model.parameters(), not named_parameters()." if isinstance(each, tuple) else ""
            raise ArgumentError(f"parameters must be tensors, got a {type(each).__name__}.{hint}")
    if not given and isinstance(parameters, Iterator):
        warnings.warn("parameters is an exhausted iterator: no gradients are clipped.", stacklevel=4)
    return given


def checked_order(norm_type: Any, positive: bool = False) -> float:
    order = _number("norm_type", norm_type)
    if not (order > 0 if positive else order >= 0 or order == -math.inf):
        allowed = "positive or infinite" if positive else "0, positive or infinite"
        raise ArgumentError(f"norm_type must be {allowed}, got {norm_type!r}.")
    return order


def _number(name: str, value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        raise ArgumentError(f"{name} must be a number, got {value!r}.") from None


def checked_limit(max_norm: Any) -> float:
    limit = _number("max_norm", max_norm)
    if not limit >= 0:
        raise ArgumentError(f"max_norm must not be negative, got {max_norm!r}.")
    return limit


def _check_stages(stages: Any, group: Any) -> None:
    if not isinstance(stages, int) or stages < 1:
        raise ArgumentError(f"pipeline_stages must be a positive integer, got {stages!r}.")
    if stages > 1 and (group is None or group.size() % stages):
        found = "none" if group is None else f"one of {group.size()} ranks"
        raise ArgumentError(
            f"pipeline_stages={stages} needs a process_group of all ranks of all stages, equally many in each; "
            f"got {found}."
        )


# -- local gradients, and the ranks that agree on them ------------------------------------------------------------


def local_gradient(parameter: torch.Tensor) -> torch.Tensor | None:
    """Return this rank's part of the gradient as a plain dense tensor. Writes to this tensor change the gradient.

    Return None if there is no gradient, or if this rank holds none of its elements.
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
    """The ranks that reduce a number together. If `group` is None, only this process takes part."""

    group: Any
    device: torch.device
    """The device for tensors that the group reduces. The gradients themselves may be on the host."""
    call: SharedCall

    @property
    def size(self) -> int:
        return 1 if self.group is None else self.group.size()

    def reduce(self, over: Callable[[Any, torch.Tensor, SharedCall], None], number: torch.Tensor) -> None:
        """Reduce `number` in place over the group. `over` is one of the reductions in `comm/agreement.py`."""
        if self.group is not None:
            over(self.group, number, self.call)


def reduce_group_of(parameters: Sequence[torch.Tensor], group: Any, otherwise: torch.device, what: str) -> ReduceGroup:
    """Return the ranks that clip or unscale the gradients of these parameters together.

    These are the ranks of `group`, or the ranks of the parameters' meshes if `group` is None. If there is no mesh
    either, return this process alone, with the device `otherwise`. Parameters without gradients count as well, so a
    rank without gradients joins the reduction. `what` describes the call, which the order check compares across ranks.
    """
    specs = [spec_of(parameter) for parameter in parameters if isinstance(parameter, DTensor)]
    distinct = {id(spec.mesh): spec.mesh for spec in specs}  # by id, because comparing meshes is slower
    meshes = [mesh for mesh in distinct.values() if mesh.get_coordinate() is not None]  # contains this rank
    if group is not None:
        _check_group(group, meshes)
    sharded_over = [mesh.get_group(dim) for mesh in meshes for dim in range(mesh.ndim)]
    call = SharedCall(what, [group, *sharded_over])
    if group is not None:
        return ReduceGroup(group, device_of(widest_of(meshes)) if meshes else staging_device(group, parameters), call)
    if meshes:
        return ReduceGroup(covering_group(meshes), device_of(widest_of(meshes)), call)
    return ReduceGroup(None, otherwise, call)


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
