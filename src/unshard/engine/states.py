"""The states of a unit, the options that users set on it, and the dtypes of its parameters."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import cache
from typing import Any, TypeVar

import torch

from ..errors import StateError
from ..policies import MixedPrecisionPolicy


class State(Enum):
    """Hashes by identity, because states are looked up often and `Enum.__hash__` is a Python function."""

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
    """The activity of the unit's module. Distinguishes a recomputation in backward from an ordinary forward."""

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
    """Return `to`; raise if it may not follow `now`. So a wrong order of hooks fails here, not as a wrong gradient."""
    moves: Any = PARAM_MOVES if isinstance(now, ParamState) else GRAD_MOVES
    if to not in moves[now]:
        raise StateError(
            f"{owner} is {now.value} and cannot become {to.value}. If you call unshard() or reshard() inside forward "
            "or backward, remove that; otherwise this is a defect of unshard, please report it."
        )
    return to


@dataclass
class Options:
    """Settings that users may change while the model trains. All but `reduce_buffers` take effect at once."""

    reshard_after_forward: bool | None = None
    """`None` keeps the root's own unit unsharded for its backward and reshards the others."""
    slice_after_forward: bool = False
    """Keep a slice between forward and backward, as an integer `reshard_after_forward` asks."""
    reshard_after_backward: bool = True
    show_sharded_after_forward: bool = False
    """Put the sharded parameters on the modules even if the unit stays unsharded for its backward."""
    show_sharded_after_backward: bool = False
    """The same for a unit that stays unsharded after backward."""
    unshard_in_backward: bool = True
    """False if no gradient depends on the parameters' values, as in an embedding."""
    synchronize: bool = True
    """False: backward does not reduce gradients, and keeps them unsharded on this rank."""
    all_reduce: bool = True
    """False: gradients are not reduced over replicas, and kept as partial sums."""
    reduce_unused: bool = False
    """Reduce zeros for trainable parameters without a gradient, so that ranks may use different parameters."""
    reduce_buffers: int = 1
    """Reduce-scatter inputs that may be alive at once. A new root reads the largest value of its units."""
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
    """Units to all-gather with this unit, instead of the next unit in the recorded order."""
    backward_prefetch: list[weakref.ref[Any]] | None = None


# As in PyTorch, collectives average only these dtypes. Others (float16 could overflow) are divided before and after.
AVERAGED = frozenset((torch.float32, torch.bfloat16))


@dataclass(frozen=True)
class Division:
    """How the sum over the ranks becomes a mean: in the collectives, or by dividing before or after them."""

    scatter_average: bool
    all_reduce_average: bool
    before: float
    after: float


@cache
def division(
    shards: int,
    replicas: int,
    reduce_dtypes: frozenset[torch.dtype],
    factor: float | None,
    force_sum: bool,
    in_halves: bool = False,
) -> Division:
    """Return the division for gradients that are reduced over `shards` x `replicas` ranks.

    `factor` replaces the number of ranks. Dtypes that collectives do not average (with `in_halves`, all dtypes) are
    divided before and after the sum, by two factors near the square root of the divisor, so that neither the summands
    vanish nor the sum overflows: 2 -> 2, 1; 3 -> 2, 1.5; 6 -> 4, 1.5; 8 -> 4, 2.
    """
    total = factor or shards * replicas
    if reduce_dtypes <= AVERAGED and not in_halves:
        if force_sum:
            return Division(False, False, 1.0, total)
        if factor is None:
            return Division(True, True, 1.0, 1.0)
        # An average over the shards divides by their number. Any other factor divides the result.
        return Division(True, False, 1.0, 1.0) if factor == shards else Division(False, False, 1.0, factor)
    before = 1
    while total % before == 0 and total / before > before:
        before *= 2
    return Division(False, False, float(before), total / before)


# -- dtypes -----------------------------------------------------------------------------------------------


class Precision(Enum):
    """The dtypes that a unit computes in."""

    POLICY = "the dtypes of the policy"
    STORED = "the dtypes that the parameters are stored in"


@dataclass(frozen=True)
class Dtypes:
    """The dtypes of one parameter and its gradient. Parameters that share all of them form a segment."""

    original: torch.dtype
    compute: torch.dtype
    reduce: torch.dtype
    wire: torch.dtype
    """Gradients are sent in this dtype, nearly always `reduce`."""
    gradient: torch.dtype
    """The dtype of `.grad` at rest, nearly always `original`."""
    kept: torch.dtype
    """The dtype in which gradients are accumulated without synchronization."""
    reduce_stored: torch.dtype
    """The dtype in which gradients are reduced if the unit computes in the original dtype, not the policy's."""

    @property
    def stored(self) -> Dtypes:
        """The dtypes if the unit computes in the original dtype (`Precision.STORED`)."""
        wire = self.wire if self.reduce == self.reduce_stored else self.reduce_stored
        return replace(self, compute=self.original, reduce=self.reduce_stored, wire=wire)


def sent_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which `dtype` is sent. Complex numbers, which backends lack, become pairs of reals."""
    return dtype.to_real()


def dtypes_for(original: torch.dtype, policy: MixedPrecisionPolicy) -> Dtypes:
    if not original.is_floating_point:  # no policy names a complex dtype
        return Dtypes(*[original] * 7)
    compute = policy.param_dtype or original
    # A reduce_dtype equal to param_dtype means the gradient's own dtype, even if the model was converted.
    explicit = policy.reduce_dtype if policy.reduce_dtype != policy.param_dtype else None
    reduce = explicit or compute
    wire = policy.wire_dtype or reduce
    wire = wire if wire.itemsize <= reduce.itemsize else reduce
    gradient = policy.dtype_of_gradients(original, compute, reduce)
    kept, stored = policy.dtype_of_sums(compute, reduce), policy.dtype_of_stored_reduction(original, reduce)
    return Dtypes(original, compute, reduce, wire, gradient, kept, stored)


class Segments:
    """The segments of a param group: the dtypes of each segment (`kinds`), and each parameter's segment (`of`)."""

    def __init__(self, originals: list[torch.dtype], policies: Sequence[MixedPrecisionPolicy]):
        each = [dtypes_for(original, policy) for original, policy in zip(originals, policies, strict=True)]
        self.kinds: list[Dtypes] = list(dict.fromkeys(each))
        self.of: list[int] = [self.kinds.index(dtypes) for dtypes in each]
        self.originals = originals

    def dtypes(self, index: int) -> Dtypes:
        return self.kinds[self.of[index]]

    def itemsizes(self, role: str) -> list[int]:
        """Return each segment's bytes per element in the dtype of `role`, a field of `Dtypes` such as "compute"."""
        return [getattr(kind, role).itemsize for kind in self.kinds]

    def stored(self) -> Segments:
        """Return the same segments with the dtypes for a unit that computes in the stored dtypes."""
        same = copy.copy(self)
        same.kinds = [kind.stored for kind in self.kinds]
        return same
