"""Finds the shards, gradients, roots and order checks of parameters. Optimizers, clipping and scalers use this module.

An elementwise operation on a range of a shard has the same result as the operation on each parameter in the range, if
padding and gaps are zero and stay zero. A range of the sharded gradient corresponds to a range of the shard if the
gradients have the same order and the same gaps as the parameters.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter

import torch

from ..comm.order.check import Order
from ..errors import StateError, listed
from ..torch_private import foreach_zero, local_of
from .param_group import ParamGroup, param_group_of, param_groups_of
from .params.buffers import META, Shard
from .params.flat_sharded import FlatShardedParams
from .params.offload import OffloadPlan
from .root import Root
from .sharded_grad import FlatGradient, FlatShardedGrad, ShardedGrad


@dataclass(frozen=True)
class ShardRange:
    """The bytes of a parameter in a shard, and `order`, the parameter's position in the memory order of the shard."""

    shard: Shard
    order: int
    begin: int
    end: int
    states: OffloadPlan | None
    """Set if the optimizer state of the parameter is on the host and must be uploaded for a step. Otherwise None."""

    def precedes(self, other: ShardRange) -> bool:
        """Return True if `other` comes next in the same shard, with at most padding in between."""
        return self.shard is other.shard and self.order + 1 == other.order


@dataclass(frozen=True)
class GradRange:
    """The location of a gradient in a sharded gradient: `order` is its position in memory, `begin` its first byte."""

    shard: ShardedGrad
    order: int
    begin: int

    def precedes(self, other: GradRange) -> bool:
        return self.shard is other.shard and self.order + 1 == other.order


def shard_ranges_of(parameters: Iterable[torch.Tensor]) -> dict[int, ShardRange]:
    """Return the ranges of parameters, by the id of the parameter.

    Parameters that are currently in no shard, and parameters of flat units, are skipped.
    """
    parameters = list(parameters)
    wanted, found = set(map(id, parameters)), {}
    for group in param_groups_of(parameters):
        sharded, shard = group.sharded, group.sharded.shard
        if shard.device == META or isinstance(sharded, FlatShardedParams):
            continue
        states = sharded.offload.states
        states = states if states is not None and states.offloaded else None  # no upload if the host computes
        for order, (index, begin) in enumerate(shard.ranges()):
            parameter, local = sharded.params[index].sharded, shard.locals[index]
            if id(parameter) in wanted and local_of(parameter) is local:
                found[id(parameter)] = ShardRange(shard, order, begin, begin + local.nbytes, states)
    return found


def replaced_by_shards(parameters: Iterable[torch.Tensor]) -> dict[int, str]:
    """Return the names of those `parameters` that sharding has replaced on their modules, by id."""
    names = {}
    for each in parameters:
        group = param_group_of(each)
        for param in () if group is None else group.params:
            # Flat units may keep the original parameters.
            if param.origin() is each and param.sharded is not each:
                names[id(each)] = param.name
    return names


def built_too_early(replaced: Iterable[str]) -> str:
    """Return the error text for an optimizer with parameters that sharding has replaced. `replaced` are their names."""
    return f"was built before the model was sharded, which has replaced {listed(replaced, 8)}"


def roots_of(parameters: Iterable[torch.Tensor]) -> list[Root]:
    """Return the roots of the models with these parameters. A model that has never run has no root."""
    return roots_of_groups(param_groups_of(parameters))


def roots_of_groups(groups: Iterable[ParamGroup]) -> list[Root]:
    units = [unit for group in groups if (unit := group.unit()) is not None]
    return list(dict.fromkeys(root for unit in units if unit.root is not None and (root := unit.root()) is not None))


def orders_of(parameters: Iterable[torch.Tensor]) -> list[Order]:
    """Return the order checks of the process groups over which the parameters are sharded or replicated."""
    return orders_of_groups(param_groups_of(parameters))


def orders_of_groups(groups: Iterable[ParamGroup]) -> list[Order]:
    found = {each.order for group in groups for each in (group.shards, group.replicas) if each.order is not None}
    return sorted(found, key=attrgetter("name"))  # the same order on all ranks: a comparison may wait for them


def sharded_grads_of(parameters: Iterable[torch.Tensor]) -> list[ShardedGrad]:
    """Return the sharded gradients of the parameters' param groups, from the oldest to the newest."""
    found = [grad for group in param_groups_of(parameters) for grad in group.gradients.sharded_grads()]
    return sorted(found, key=attrgetter("number"))


def grad_ranges(parameters: Iterable[torch.Tensor]) -> dict[int, GradRange]:
    """Return the ranges of all gradients that the engine assigned to `.grad`, by the id of the `.grad` object."""
    found = {}
    for grad in sharded_grads_of(parameters):
        for order, (each, local, begin) in enumerate(zip(grad.grads, grad.locals, grad.begins, strict=True)):
            if local_of(each) is local:
                found[id(each)] = GradRange(grad, order, begin)
    return found


def name_in_flat_unit(parameters: Iterable[torch.Tensor], ranks: int = 1) -> str | None:
    """Return the name of the first parameter that belongs to a flat unit of at least `ranks` ranks, or None."""
    for each in parameters:
        group = param_group_of(each)
        if group is not None and isinstance(group.sharded, FlatShardedParams) and group.shards.world >= ranks:
            for param in group.params:
                if param.sharded is each:
                    return param.name
    return None


def cut_flat(parameters: Iterable[torch.Tensor]) -> str | None:
    """Return the name of the first parameter that a flat unit shards over several ranks, or None."""
    return name_in_flat_unit(parameters, ranks=2)


def rest_on_the_host(parameters: Iterable[torch.Tensor]) -> bool:
    """Return True if any parameter is offloaded to the host while a device computes. Flat units are ignored."""
    return any(
        group.sharded.offload.offloaded and not isinstance(group.sharded, FlatShardedParams)
        for group in param_groups_of(parameters)
    )


@dataclass(frozen=True)
class Scalable:
    """Gradients as a few flat tensors that can be multiplied as a whole.

    `others` are the parameters whose gradients are not in the flat tensors.
    """

    flat_gradients: list[FlatGradient]
    others: list[torch.Tensor]
    gaps: list[torch.Tensor]

    def clean(self) -> None:
        """Set the gaps to zero after a multiplication. Zero times NaN is NaN, which would make every later norm NaN."""
        by_device: dict[torch.device, list[torch.Tensor]] = {}
        for gap in self.gaps:
            by_device.setdefault(gap.device, []).append(gap)
        for gaps in by_device.values():
            foreach_zero(gaps)


def scalable_gradients(parameters: Sequence[torch.Tensor]) -> Scalable:
    """Return the gradients of `parameters`.

    A sharded gradient is returned as flat tensors if all its gradients belong to `parameters`. The parameters of all
    other gradients are returned one by one.
    """
    given, found = set(map(id, parameters)), Scalable([], [], [])
    for shard in sharded_grads_of(parameters):
        if isinstance(shard, FlatShardedGrad):
            continue  # plain tensors, taken one by one
        if shard.stepped and not given.isdisjoint(map(id, shard.parameters)):
            raise StateError(
                f"The gradients of {shard.names()} can no longer be clipped or scaled: a flat optimizer with "
                "step_in_backward=True has already used them during backward. Do not combine step_in_backward=True "
                "with clipping or gradient scaling."
            )
        if shard.belongs_to(given):
            given.difference_update(map(id, shard.parameters))
            found.flat_gradients.extend(shard.flat_gradients)
            found.gaps.extend(shard.gaps)
    found.others.extend(parameter for parameter in parameters if id(parameter) in given)
    return found
