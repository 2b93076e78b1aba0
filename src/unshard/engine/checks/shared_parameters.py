"""Parameters that units share and cannot, and those that a unit and a module outside all units share."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.distributed.tensor import DTensor

from ...errors import ArgumentError, listed
from ...policies import MixedPrecisionPolicy
from ...torch_private import own_parameters, stack_level_of_program
from ..params.param import ManagedParam

if TYPE_CHECKING:
    from ..param_group import ParamGroup
    from ..unit import Unit


def refuse_different_units(
    group: ParamGroup,
    param: ManagedParam,
    reader: Unit,
    name: str,
    policy: MixedPrecisionPolicy,
    kind: str,
    mesh: Any = None,
) -> None:
    """Raise if `reader` cannot use `param` of another unit in place of its parameter `name`.

    `kind`: how it would shard it itself, and `mesh`: over which mesh, if it has one.
    """
    owner = None if group.unit is None else group.unit()
    differences = []
    if kind != group.sharded.kind:
        differences.append(f"the first is sharded by {group.sharded.kind}, the second by {kind}")
    differences += [
        f"{field} is {getattr(param.policy, field)} in the first and {getattr(policy, field)} in the second"
        for field in _SAME
        if getattr(param.policy, field) != getattr(policy, field)
    ]
    if isinstance(param.sharded, DTensor) and mesh is not None and mesh != param.sharded.device_mesh:
        differences.append(f"the first is sharded over {param.sharded.device_mesh}, the second over {mesh}")
    if owner is not None and owner.device != reader.device:
        differences.append(f"the first computes on {owner.device}, the second on {reader.device}")
    if owner is None or differences:
        raise ArgumentError(
            f"Parameters {param.name!r} (unit {group.unit_name!r}) and {name!r} (unit {reader.name!r}) are one and the "
            f"same, but the units differ: {'; '.join(differences) or 'the first was deleted'}. Shard both with the "
            "same arguments, or as one unit."
        )


_SAME = ("param_dtype", "reduce_dtype", "wire_dtype", "full_precision_in_eval")


def refuse_shared_with_others(units: list[Unit]) -> None:
    """A unit of another root runs at times that this root does not know."""
    for unit in units:
        for other in unit.sharers:
            if other not in units:
                names = {id(param): param.name for param in (*unit.used_params, *other.used_params)}
                both = {id(param) for param in unit.used_params} & {id(param) for param in other.used_params}
                raise ArgumentError(
                    f"Units {unit.name!r} and {other.name!r} share parameters ({listed(names[each] for each in both)}) "
                    "and are not below one root. Apply fully_shard, or FullyShardedDataParallel, to a module that "
                    "contains both, and run that one; or give each its own parameters."
                )


def warn_of_untied(units: list[Unit]) -> None:
    """A module outside all units that shared a parameter with one inside has kept the parameter as it was.

    Nearly always nobody holds an original parameter any more, and there is nothing to look for.
    """
    kept: dict[int, tuple[str, Unit]] = {}
    for unit in units:
        for param in unit.params:
            origin = param.origin()
            if origin is not None and origin is not param.sharded and param.sharded.requires_grad:
                kept[id(origin)] = param.name, unit
    if kept:
        for module in all_modules():
            for name, parameter in own_parameters(module).items():
                if id(parameter) in kept:
                    _warn_of_untied(*kept[id(parameter)], f"{name!r} of a {type(module).__name__}")


def all_modules() -> Iterator[nn.Module]:
    for each in gc.get_objects():
        # Not `isinstance`, which asks the object: some answer with an import or a warning.
        if issubclass(type(each), nn.Module) and "_parameters" in each.__dict__:
            yield each


def _warn_of_untied(name: str, unit: Unit, other: str) -> None:
    warnings.warn(
        f"Parameter {name!r} of {unit} was shared with {other} that no unit holds. Since it was sharded they are two "
        "parameters with values of their own. Shard a module that contains both as one unit, or both with "
        "fully_shard([first, second]).",
        stacklevel=stack_level_of_program(),
    )
