"""The states of a unit, the options that users set on it, and the dtypes of its parameters."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import cache
from typing import Any, TypeVar

import torch

from ..errors import StateError
from ..policies import MixedPrecisionPolicy


class State(Enum):
    """Base class of states. It hashes by identity, because states are looked up often and `Enum.__hash__` is slow."""

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
    """The activity of a unit's module. This distinguishes a recomputation in backward from an ordinary forward."""

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
    """Return `to`, or raise if it may not follow `now`.

    The moves are checked so that hooks called in the wrong order fail here instead of producing wrong gradients.
    """
    moves: Any = PARAM_MOVES if isinstance(now, ParamState) else GRAD_MOVES
    if to not in moves[now]:
        raise StateError(
            f"{owner} is {now.value} and cannot become {to.value}. If you call unshard() or reshard() inside forward "
            "or backward, remove that; otherwise this is a defect of unshard, please report it."
        )
    return to


@dataclass
class Options:
    """Settings of a unit that users may change during training. All except `reduce_buffers` take effect at once."""

    reshard_after_forward: bool | None = None
    """Free the unsharded parameters after forward. None means True, except for the root's own unit."""
    slice_after_forward: bool = False
    """Keep a slice between forward and backward. An integer `reshard_after_forward` sets this."""
    reshard_after_backward: bool = True
    """Free the unsharded parameters after backward."""
    show_sharded_after_forward: bool = False
    """Put the sharded parameters on the modules after forward, even if the unit stays unsharded for backward."""
    show_sharded_after_backward: bool = False
    """Put the sharded parameters on the modules after backward, even if the unit stays unsharded."""
    unshard_in_backward: bool = True
    """Unshard the unit for backward. Set this to False if no gradient depends on parameter values, as in embeddings."""
    synchronize: bool = True
    """Reduce gradients in backward. If False, backward accumulates unsharded gradients on this rank."""
    all_reduce: bool = True
    """Reduce gradients over the replicas. If False, they are stored as partial sums over the shards."""
    reduce_unused: bool = False
    """Reduce zeros for trainable parameters without a gradient, so that ranks may use different parameters."""
    hold: bool = False
    """Keep reduced gradients as partial sums. Sum unreduced gradients in the reduce dtype. `unshard.step` sets this."""
    absent: Collection[Any] = ()
    """Parameters for which no rank has a gradient. Zeros are reduced for them, and they get no `.grad`."""
    reduce_buffers: int = 1
    """How many reduce-scatter inputs may be alive at once. A new root uses the largest value of its units."""
    divide_factor: float | None = None
    """Divide the sum of gradients by this number instead of the number of ranks."""
    force_sum: bool = False
    """Sum in the collectives and divide afterwards, instead of averaging in the collectives."""
    divide_in_halves: bool = False
    """Divide both before and after the collectives, even for dtypes that collectives can average safely."""
    all_reduce_hook: Callable[[torch.Tensor], None] | None = None
    """Called with each flat tensor of the unit's reduced gradients, before the gradients are divided and cast."""
    last_backward: bool = True
    """Root only. Set this to False if the iteration continues with other backwards after the next one."""
    post_optim_event: Any = None
    """Root only. The next forward waits for this event, because the optimizer stepped on another stream."""
    forward_prefetch: list[weakref.ref[Any]] | None = None
    """Units to all-gather during this unit's forward, instead of the next unit in the recorded order."""
    backward_prefetch: list[weakref.ref[Any]] | None = None


# As in PyTorch, collectives average only these dtypes. Others (float16 could overflow) are divided before and after.
AVERAGED = frozenset((torch.float32, torch.bfloat16))


@dataclass(frozen=True)
class Division:
    """Where the sum over the ranks is divided to get a mean: in the collectives, before them, or after them."""

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
    """Return how to divide gradients that are reduced over `shards` x `replicas` ranks.

    `factor` replaces the number of ranks as the divisor. Dtypes that collectives do not average are divided both before
    and after the sum. With `in_halves`, this applies to all dtypes. The two factors are near the square root of the
    divisor, so that neither the summands vanish nor the sum overflows: 2 -> 2, 1; 3 -> 2, 1.5; 6 -> 4, 1.5; 8 -> 4, 2.
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
    POLICY = "the dtypes of the policy"
    STORED = "the dtypes that the parameters are stored in"


@dataclass(frozen=True)
class Dtypes:
    """The dtypes of one parameter and its gradient. Parameters that share all of them form a segment."""

    original: torch.dtype
    compute: torch.dtype
    reduce: torch.dtype
    wire: torch.dtype
    """The dtype in which gradients are sent, nearly always equal to `reduce`."""
    gradient: torch.dtype
    """The dtype of `.grad` of the sharded parameter, nearly always equal to `original`."""
    kept: torch.dtype
    """The dtype in which gradients are summed while synchronization is off."""
    reduce_stored: torch.dtype
    """The dtype in which gradients are reduced if the unit computes in the original dtype instead of the policy's."""

    @property
    def stored(self) -> Dtypes:
        """The dtypes for a unit that computes in the original dtype (`Precision.STORED`)."""
        wire = self.wire if self.reduce == self.reduce_stored else self.reduce_stored
        return replace(self, compute=self.original, reduce=self.reduce_stored, wire=wire)


def sent_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which `dtype` is sent. Complex numbers, which backends lack, are sent as pairs of reals."""
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
    """The segments of a param group. `kinds` has the dtypes of each segment, and `of` the segment of each parameter."""

    def __init__(self, originals: list[torch.dtype], policies: Sequence[MixedPrecisionPolicy]):
        each = [dtypes_for(original, policy) for original, policy in zip(originals, policies, strict=True)]
        self.kinds: list[Dtypes] = list(dict.fromkeys(each))
        self.of: list[int] = [self.kinds.index(dtypes) for dtypes in each]
        self.originals = originals

    def dtypes(self, index: int) -> Dtypes:
        return self.kinds[self.of[index]]

    def itemsizes(self, role: str) -> list[int]:
        """Return each segment's bytes per element in the dtype `role`, a field of `Dtypes` such as "compute"."""
        return [getattr(kind, role).itemsize for kind in self.kinds]

    def stored(self) -> Segments:
        same = copy.copy(self)
        same.kinds = [kind.stored for kind in self.kinds]
        return same
