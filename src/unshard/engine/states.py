"""The states of a unit and the options that users set on it."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeVar

import torch

from ..errors import StateError


class State(Enum):
    """Hashes by identity. `Enum.__hash__` is a Python function, and states are looked up often."""

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
    """What the unit's module is doing. Distinguishes a recomputation in backward from an ordinary forward."""

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
    """Return `to` if it may follow `now`. A wrong order of hooks fails here, not later as a wrong gradient."""
    moves: Any = PARAM_MOVES if isinstance(now, ParamState) else GRAD_MOVES
    if to not in moves[now]:
        raise StateError(
            f"{owner} is {now.value} and cannot become {to.value}. If you call unshard() or reshard() inside forward "
            "or backward, remove that; otherwise this is a defect of unshard, please report it."
        )
    return to


@dataclass
class Options:
    """What users may change on a unit while the model trains. Nothing caches these: a change takes effect at once."""

    reshard_after_forward: bool | None = None
    """`None` keeps the root's own unit unsharded for its backward and reshards the others."""
    slice_after_forward: bool = False
    """Keep a slice between forward and backward: an integer `reshard_after_forward`."""
    reshard_after_backward: bool = True
    show_sharded_after_forward: bool = False
    """Put the sharded parameters on the modules even if the unit stays unsharded for its backward."""
    show_sharded_after_backward: bool = False
    """The same for a unit that stays unsharded after backward."""
    unshard_in_backward: bool = True
    """False if no gradient depends on the parameters' values, as in an embedding."""
    synchronise: bool = True
    """False: backward does not reduce gradients, and keeps them unsharded on this rank."""
    all_reduce: bool = True
    """False: gradients are not reduced over replicas, and kept as partial sums."""
    reduce_unused: bool = False
    """Reduce zeros for trainable parameters without a gradient, so that ranks may use different ones."""
    reduce_buffers: int = 1
    """How many reduce-scatter inputs of the model may be alive at once."""
    divide_factor: float | None = None
    """Divide the sum of gradients by this number instead of the number of ranks."""
    force_sum: bool = False
    """Sum in the collectives and divide afterwards, instead of averaging in them."""
    divide_in_halves: bool = False
    """Divide before and after the collectives for every dtype, even if averaging in them is safe."""
    all_reduce_hook: Callable[[torch.Tensor], None] | None = None
    """Called with the reduced gradients of the unit before they are divided and cast."""
    last_backward: bool = True
    """Root only: the end of the next backward ends the iteration."""
    post_optim_event: Any = None
    """Root only: an event that the next forward waits for, because the optimizer stepped on another stream."""
    forward_prefetch: list[weakref.ref[Any]] | None = None
    """Units to all-gather with this one, instead of the next one in the recorded order."""
    backward_prefetch: list[weakref.ref[Any]] | None = None
