"""Modules inside a unit whose parameters have another precision than the rest: casts at their doors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from torch import nn

from ..policies import MixedPrecisionPolicy
from ..torch_private import own_parameters
from .faces import Slot
from .precision import Precision, cast_floats
from .unit import Unit


class HasUnit(Protocol):
    unit: Unit


class Border:
    """What enters such a module is cast to its precision, what leaves it to that of its surroundings."""

    def __init__(self, holder: HasUnit, policy: MixedPrecisionPolicy):
        self._holder, self._policy = holder, policy  # not the unit itself: a copied model has another one

    def enter(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        if self._policy.cast_forward_inputs and self._holder.unit.precision is Precision.POLICY:
            return cast_floats((args, kwargs), self._policy.param_dtype)
        return None

    def leave(self, module: nn.Module, args: Any, output: Any) -> Any:
        return (
            cast_floats(output, self._policy.output_dtype) if self._holder.unit.precision is Precision.POLICY else None
        )


def bordered(
    tops: Sequence[nn.Module], slots: Sequence[Slot], policy: MixedPrecisionPolicy
) -> list[tuple[nn.Module, MixedPrecisionPolicy]]:
    """The outermost modules below `tops` all of whose parameters have one override of `policy`, and that override."""
    if not policy.overrides:
        return []
    own = {(id(home.parameters), home.name): slot.policy for slot in slots for home in slot.homes}
    found: dict[nn.Module, MixedPrecisionPolicy] = {}
    for top in tops:
        for child in top.children():
            _search(child, own, policy, found)
    return list(found.items())


def _search(
    module: nn.Module,
    own: dict[tuple[int, str], MixedPrecisionPolicy],
    usual: MixedPrecisionPolicy,
    found: dict[nn.Module, MixedPrecisionPolicy],
) -> None:
    policies = {
        own.get((id(own_parameters(child)), name), usual)
        for child in module.modules()
        for name, parameter in own_parameters(child).items()
        if parameter is not None
    }
    if len(policies) == 1 and usual not in policies:
        found[module] = policies.pop()
    elif policies - {usual}:
        for child in module.children():
            _search(child, own, usual, found)
