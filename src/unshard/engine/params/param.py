"""A managed parameter, where modules register it, and counts of writes to it."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from operator import attrgetter, is_not
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

from ...layout.flat import FlatSharding
from ...layout.rows import RowSharding
from ...policies import MixedPrecisionPolicy
from ...torch_private import DTensorSpec, own_parameters, set_rnn_weight, version_of


@dataclass(frozen=True)
class ParamLocation:
    """One name under which a module registers a parameter. Holds no strong reference to the module."""

    module: weakref.ref[nn.Module]
    parameters: dict[str, Any]
    """`_parameters` of the module, or its `__dict__` if the parameter is not registered."""
    name: str
    registered: bool = True
    """False if the module finds the parameter under the name without registering it: a piece of a flat one."""

    @property
    def plain(self) -> bool:
        """Whether writing into the dict of parameters is enough.

        Recurrent layers keep their weights in a list as well and update it in `__setattr__`.
        """
        module = self.module()
        return module is None or type(module).__setattr__ is nn.Module.__setattr__

    def put(self, parameter: nn.Parameter) -> None:
        module = self.module()
        if module is not None and not self.plain and self.registered:
            setattr(module, self.name, parameter)
            return
        self.parameters[self.name] = parameter
        if module is not None and not self.plain:
            set_rnn_weight(module, self.name, parameter)


def location_of(module: nn.Module, name: str) -> ParamLocation:
    return ParamLocation(weakref.ref(module), own_parameters(module), name)


def unregistered_location_of(module: nn.Module, name: str) -> ParamLocation:
    return ParamLocation(weakref.ref(module), module.__dict__, name, registered=False)


@dataclass(eq=False)
class ManagedParam:
    """One parameter of a unit: its names, how it is cut, and what the modules hold of it."""

    name: str
    locations: list[ParamLocation]
    sharding: RowSharding | FlatSharding
    origin: weakref.ref[nn.Parameter]
    """What it was before it was sharded; tells whether two units were given the same parameter."""
    sharded: nn.Parameter
    """What the modules hold at rest."""
    local: torch.Tensor
    """The piece of the shard that `sharded` was last given. If it holds another tensor, a program has replaced it."""
    policy: MixedPrecisionPolicy
    tp_spec: DTensorSpec | None = None
    """How the unsharded parameter is distributed over other ranks (tensor parallelism), if it is."""
    partial_dims: frozenset[int] = frozenset()
    """Dimensions of that distribution over which the reduction itself sums: the gradient may come unsummed there."""
    unsharded: nn.Parameter | None = None
    """What the modules hold while they compute."""
    sliced: nn.Parameter | None = None
    """What they hold between forward and backward under an integer `reshard_after_forward`."""
    unsharded_view: torch.Tensor | None = None
    """The place of `unsharded` in the unsharded buffer."""
    attributes: dict[str, Any] = field(default_factory=dict)
    """What a subclass of nn.Parameter added to `origin`, for `sharded` and `unsharded`."""

    @property
    def packed(self) -> bool:
        """Whether the elements are not numbers, whatever the dtype says; see `is_packed`."""
        return self.attributes.get("quant_state") is not None

    @property
    def lies_elsewhere(self) -> bool:
        """Whether `unsharded` was given other memory than its place."""
        unsharded, place = self.unsharded, self.unsharded_view
        return unsharded is not None and place is not None and unsharded.data_ptr() != place.data_ptr()

    @property
    def is_replaced(self) -> bool:
        """Whether a program has registered another parameter in its place."""
        known = (self.sharded, self.unsharded, self.sliced)
        return any(all(at.parameters.get(at.name) is not each for each in known) for at in self.locations)


# What is known of parameters is kept beside them: an attribute would be copied and pickled with the parameter. Only
# for parameters that no module has at rest, because torch does not convert DTensors that have weak references.
_former: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
_unsharded: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
_dropped: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


class Replacements:
    """How many sharded parameters programs have replaced by others, so that optimizers are looked at again."""

    seen = 0


def mark_replaced(parameter: nn.Parameter, name: str, by: nn.Parameter) -> None:
    """Let a sharded parameter that a program has replaced by another be known as one: optimizers may still have it."""
    _former[parameter] = name
    _former.pop(by, None)  # put back
    Replacements.seen += 1


def former_name(parameter: Any) -> str | None:
    """The name, in its unit, of a sharded parameter that was replaced; None if it was not."""
    return _former.get(parameter)


def mark_unsharded(parameter: nn.Parameter, name: str) -> None:
    """Let an unsharded parameter be known as one: an optimizer must not be built of it."""
    _unsharded[parameter] = name


def unsharded_name(parameter: Any) -> str | None:
    """The name of an unsharded parameter; None if it is not one."""
    return _unsharded.get(parameter)


def mark_dropped(parameter: nn.Parameter, name: str, owner: str) -> None:
    """Let a sharded parameter be known as one that no module has any more: it was tied to another unit's."""
    _dropped[parameter] = name, owner
    Replacements.seen += 1


def dropped_name(parameter: Any) -> tuple[str, str] | None:
    """The name of a dropped parameter, and of the one in its place; None if it is not one."""
    return _dropped.get(parameter)


# No Python functions: called for every parameter of a unit.
_requires_grad: Callable[[torch.Tensor], bool] = attrgetter("requires_grad")
_gradient: Callable[[torch.Tensor], torch.Tensor | None] = attrgetter("grad")


class Steps:
    """Counts the steps of optimizers on one rank, for all units that were made there.

    Autograd counts writes through a DTensor and through its local tensor, but not the `_foreach` and fused operations
    of optimizers on DTensors. A hook on every optimizer's step counts those.
    """

    def __init__(self) -> None:
        self.taken = 0

    def count_writes(self, tensors: Sequence[torch.Tensor]) -> tuple[int, int]:
        """Changes when any of `tensors` may have been written.

        Optimizers skip frozen parameters without gradients, so a frozen unit stays valid after their steps.
        """
        stepped = any(map(_requires_grad, tensors)) or any(map(is_not, map(_gradient, tensors), repeat(None)))
        return self.taken if stepped else -1, sum(map(version_of, tensors))


# By default process group: ranks may be threads of this process, and each must gather again after its own steps only.
_steps: weakref.WeakKeyDictionary[Any, Steps] = weakref.WeakKeyDictionary()
_steps_without_group = Steps()


def steps_of_this_rank() -> Steps:
    group = dist.group.WORLD
    return _steps_without_group if group is None else _steps.setdefault(group, Steps())
