"""What chooses among the recordings of a step, and how two of these differ, in words."""

from __future__ import annotations

from typing import Any, NamedTuple


class TrainedSignature(NamedTuple):
    """Of models, optimizers and scaler. The names are for users."""

    train_or_eval_mode_of_modules: tuple[bool, ...]
    requires_grad_of_parameters: tuple[bool, ...]
    options_of_units: tuple[Any, ...]
    gradients_that_are_there_before_the_call: tuple[Any, ...]
    settings_of_param_groups: tuple[tuple[tuple[str, Any], ...], ...]
    settings_of_the_scaler: tuple[Any, ...]
    what_the_scaler_has_done_since_its_last_update: tuple[Any, ...]
    grad_mode: bool
    autocast: bool
    autocast_dtype: Any
    deterministic_algorithms: bool
    default_dtype: Any


class Signature:
    """Calls of equal signatures can share a recording. Its hash is computed once: it is one of hundreds of values."""

    def __init__(self, arguments: Any, trained: TrainedSignature):
        self.arguments, self.trained = arguments, trained
        self._hash: int | None = None

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Signature):
            return NotImplemented
        return self is other or (self.arguments == other.arguments and self.trained == other.trained)

    def __hash__(self) -> int:
        if self._hash is None:
            self._hash = hash((self.arguments, self.trained))
        return self._hash


def changed_rates(one: Signature, other: Signature) -> list[int]:
    """Numbers of the param groups whose learning rates differ; empty if anything else differs, too."""
    mine, theirs = (each.trained.settings_of_param_groups for each in (one, other))
    rest = (each.trained._replace(settings_of_param_groups=()) for each in (one, other))
    if one.arguments != other.arguments or next(rest) != next(rest) or len(mine) != len(theirs):
        return []
    changed = [number for number, (a, b) in enumerate(zip(mine, theirs, strict=True)) if a != b]
    return changed if all(_without_rate(mine[each]) == _without_rate(theirs[each]) for each in changed) else []


def _without_rate(settings: tuple[tuple[str, Any], ...]) -> list[tuple[str, Any]]:
    return [(name, value) for name, value in settings if name != "lr"]


def difference(one: Signature, other: Signature) -> str:
    """The first thing in which they differ."""
    if one.arguments != other.arguments:
        (_, mine), (_, theirs) = one.arguments, other.arguments
        pairs = [(a, b) for a, b in zip(mine, theirs, strict=False) if a != b]
        if pairs:
            return f"an argument: {_shown(pairs[0][0])} and {_shown(pairs[0][1])}"
        return "the number of arguments" if len(mine) != len(theirs) else "the names or the nesting of arguments"
    for name, mine, theirs in zip(TrainedSignature._fields, one.trained, other.trained, strict=True):
        if mine == theirs:
            continue
        if name != "settings_of_param_groups":
            return name.replace("_", " ")
        groups = zip(mine, theirs, strict=False)
        keys = [a[0] for group, its in groups for a, b in zip(group, its, strict=False) if a != b]
        if "lr" in keys:
            return (
                "'lr' of a param group, which this optimizer reads on the host. With fused=True, and of sharded "
                "parameters with unshard.optim.flat as well, it is read on the device"
            )
        return f"{', '.join(map(repr, keys))} of a param group" if keys else "the number of param groups"
    return "nothing"


def _shown(described: tuple[Any, ...]) -> str:
    """An argument as `Arguments` describes it: a type and a value, or the facts of a tensor."""
    if len(described) == 2:
        return f"{described[1]!r:.80}"
    return f"a tensor of shape {tuple(described[1])} and {described[3]}"
