"""Modules inside a unit whose parameters have another precision than the rest: casts of their inputs and outputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import nn

from ...policies import DtypeOverride, MixedPrecisionPolicy
from ...torch_private import own_parameters
from ..dtype_rules import Precision, cast_floats
from ..unit import Unit
from .param import ManagedParam


class HasUnit(Protocol):
    unit: Unit


class CastBoundary:
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


def cast_boundaries(
    tops: Sequence[nn.Module], params: Sequence[ManagedParam], policy: MixedPrecisionPolicy
) -> list[tuple[nn.Module, MixedPrecisionPolicy]]:
    """The outermost modules below `tops` all of whose parameters have one override of `policy`, and that override."""
    if not policy.overrides or len({param.policy for param in params}) == 1:
        return []  # nothing is overridden, or everything: see `own_door`
    surroundings = _surroundings(params, policy)
    own = {(id(location.parameters), location.name): param.policy for param in params for location in param.locations}
    found: dict[nn.Module, MixedPrecisionPolicy] = {}
    for top in tops:
        for child in top.children():
            _search(child, own, policy, found)
    return [(module, _returning_to(surroundings, each)) for module, each in found.items()]


def boundary_policy(params: Sequence[ManagedParam], policy: MixedPrecisionPolicy) -> MixedPrecisionPolicy:
    """What casts inputs and outputs of the unit's own modules: the override, if all parameters of the unit have one."""
    policies = {param.policy for param in params}
    if len(policies) != 1 or policy in policies:
        return policy
    override = policies.pop()
    return replace(
        policy,
        param_dtype=override.param_dtype,
        output_dtype=policy.output_dtype or override.output_dtype,
        cast_forward_inputs=override.cast_forward_inputs,
    )


def _surroundings(params: Sequence[ManagedParam], policy: MixedPrecisionPolicy) -> torch.dtype | None:
    """What the rest of the unit computes in, if that is one dtype."""
    if policy.param_dtype is not None:
        return policy.param_dtype
    stored = {param.sharded.dtype for param in params if param.policy is policy and param.sharded.is_floating_point()}
    return stored.pop() if len(stored) == 1 else None


def _returning_to(surroundings: torch.dtype | None, override: MixedPrecisionPolicy) -> MixedPrecisionPolicy:
    return replace(override, output_dtype=surroundings) if isinstance(override, DtypeOverride) else override


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
