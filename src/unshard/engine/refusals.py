"""What a root refuses: gradients that nobody expected, parameters of two units, a root above a root."""

from __future__ import annotations

from ..errors import ArgumentError, StateError
from ..layout.flat import FlatCut
from .states import ParamState
from .unit import Unit

_REMEDY = (
    "Return the tensor that the loss is computed from, or assign it to an attribute of the module that computes it"
)


def refuse_gradients_of_nothing(unit: Unit) -> None:
    """Gradients that were computed with whatever was in the memory of a unit that nobody had gathered."""
    if unit.gradients_arrived and unit.params is not ParamState.FULL and not unit.stays_whole:
        raise StateError(
            f"Backward came into {unit} past everything its forward returned or left on its modules, so that it was "
            f"not gathered, and its gradients cannot be trusted. {_REMEDY}; or keep the unit whole until backward "
            "(reshard_after_forward=False, ShardingStrategy.SHARD_GRAD_OP)."
        )


def refuse_gradients_past_outputs(unit: Unit) -> None:
    raise StateError(
        f"{unit} has gradients of a backward that came past everything its forward returned or left on its modules, so "
        f"that they were not reduced over the ranks. {_REMEDY}. A loss of parameters alone is computed inside forward, "
        "or before it, or with the sharded parameters after model.reshard()."
    )


def refuse_shared_parameters(units: list[Unit]) -> None:
    """A parameter that two units were given would silently become two; so would one that was tied after that."""
    seen: dict[int, tuple[str, Unit]] = {}
    for unit in units:
        for slot in unit.slots:
            now = [home.parameters.get(home.name) for home in slot.homes]
            owners = [seen.setdefault(id(each), (slot.name, unit)) for each in (slot.origin, *now)]
            name, other = next((owner for owner in owners if owner[1] is not unit), owners[0])
            if other is not unit:
                remedy = (
                    "sharded by two calls of fully_shard. Shard both modules as one unit: fully_shard([first, second])"
                )
                if isinstance(slot.cut, FlatCut):
                    remedy = "wrapped in two units. Wrap a module that contains both as one unit, and none of the two"
                raise ArgumentError(
                    f"Parameters {name!r} (unit {other.name!r}) and {slot.name!r} (unit {unit.name!r}) are one and the "
                    f"same, but were {remedy}."
                )


def refuse_second_root(name: str) -> None:
    raise StateError(
        f"Unit {name!r} ran its own forward before its parent's and became a root. Run the outermost module first, or "
        "do not apply fully_shard above it."
    )
