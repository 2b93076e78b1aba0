"""The states a unit goes through, and which may follow which."""

from __future__ import annotations

from enum import Enum
from typing import Any, TypeVar

from ..errors import StateError


class State(Enum):
    """Compared by identity; the hash that enums come with is a Python function, and states are looked up often."""

    __hash__ = object.__hash__


class ParamState(State):
    SHARDED = "sharded"
    GATHERING = "gathering"
    UNSHARDED = "unsharded"
    SLICED = "sliced"


class GradState(State):
    EMPTY = "empty"
    LOCAL = "local"
    REDUCING = "reducing"
    PARTIAL = "partially reduced"
    REDUCED = "reduced"


class Phase(State):
    """What the unit's module is doing; tells a recomputation in backward from an ordinary forward."""

    IDLE = "idle"
    FORWARD = "forward"
    BACKWARD = "backward"


PARAM_MOVES = {
    ParamState.SHARDED: {ParamState.GATHERING},
    ParamState.GATHERING: {ParamState.UNSHARDED, ParamState.SHARDED},
    ParamState.UNSHARDED: {ParamState.SHARDED, ParamState.SLICED},
    ParamState.SLICED: {ParamState.GATHERING, ParamState.SHARDED},
}
GRAD_MOVES = {
    GradState.EMPTY: {GradState.LOCAL, GradState.REDUCING},
    GradState.LOCAL: {GradState.LOCAL, GradState.REDUCING, GradState.EMPTY},
    GradState.REDUCING: {GradState.REDUCED, GradState.PARTIAL, GradState.EMPTY},
    GradState.PARTIAL: {GradState.LOCAL, GradState.REDUCING, GradState.EMPTY},
    GradState.REDUCED: {GradState.LOCAL, GradState.REDUCING, GradState.EMPTY},
}

_State = TypeVar("_State", ParamState, GradState)


def checked_move(owner: object, now: _State, to: _State) -> _State:
    """`to`, if it may follow `now`. A wrong order of hooks fails here, not later as a wrong gradient."""
    moves: Any = PARAM_MOVES if isinstance(now, ParamState) else GRAD_MOVES
    if to not in moves[now]:
        raise StateError(
            f"{owner} is {now.value} and cannot become {to.value}. If you call unshard() or reshard() inside forward "
            "or backward, remove that; otherwise this is a defect of unshard, please report it."
        )
    return to
