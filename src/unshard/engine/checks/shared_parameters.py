"""Parameters that two units, or a unit and a module outside all units, share: refused, or named in a warning.

To support them, one unit would own the parameter (the front-ends merge only within one call) and the root would gather
the owner for both and reduce once both are done.
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Iterator

from torch import nn

from ...errors import ArgumentError
from ...layout.flat import FlatSharding
from ...torch_private import own_parameters
from ..unit import Unit
from .caller import stack_level_of_program


def refuse_shared_parameters(units: list[Unit]) -> None:
    """A parameter that two units were given would silently become two; so would one that was tied after that."""
    seen: dict[int, tuple[str, Unit]] = {}
    for unit in units:
        for param in unit.params:
            now = [location.parameters.get(location.name) for location in param.locations]
            owners = [seen.setdefault(id(each), (param.name, unit)) for each in (param.origin, *now)]
            name, other = next((owner for owner in owners if owner[1] is not unit), owners[0])
            if other is not unit:
                remedy = (
                    "sharded by two calls of fully_shard. Shard both modules as one unit: fully_shard([first, second])"
                )
                if isinstance(param.sharding, FlatSharding):
                    remedy = "wrapped in two units. Wrap a module that contains both as one unit, and none of the two"
                raise ArgumentError(
                    f"Parameters {name!r} (unit {other.name!r}) and {param.name!r} (unit {unit.name!r}) are one "
                    f"and the same, but were {remedy}."
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
