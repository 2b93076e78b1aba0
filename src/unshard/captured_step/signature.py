"""Compares the arguments and settings of calls, to decide whether the calls can share a recording."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from enum import Enum
from functools import cached_property
from itertools import chain
from numbers import Number, Real
from operator import is_
from types import BuiltinFunctionType, FunctionType, NoneType
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from ..optim.flat_optimizer import Flat
from ..torch_private import spec_of, tree_flatten, tree_map, version_of

_CONSTANTS = (
    *(bool, int, float, complex, str, bytes, type(None), Enum, type, FunctionType, BuiltinFunctionType),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size, range, Number),
)
"""Types of immutable arguments. Such arguments are compared by value."""

_PLAIN = frozenset((torch.Tensor, bool, int, float, str, NoneType))
"""The most common types of arguments that are not containers."""

_O = torch.optim
_CAPTURABLE = (_O.Adam, _O.AdamW, _O.Adamax, _O.NAdam, _O.RAdam, _O.RMSprop, _O.Rprop, _O.Adadelta, _O.ASGD)
_NO_SETTINGS = ("params", "param_names")


class SameObjects:
    """A list that equals any list of the same objects in the same order.

    Objects are compared with `is`, because `==` would compare the values of tensors. The list keeps the objects alive,
    so their ids are not reused. The loops over the objects run in C, because every call of a step compares several of
    these lists.
    """

    def __init__(self, objects: list[Any]):
        self.objects = objects

    def followed_by(self, objects: list[Any]) -> SameObjects:
        """Return self if it contains exactly these objects in this order. Otherwise, return a new list of them."""
        mine = self.objects
        return self if len(mine) == len(objects) and all(map(is_, mine, objects)) else SameObjects(objects)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SameObjects) and self.followed_by(other.objects) is self

    def __hash__(self) -> int:
        return hash(tuple(map(id, self.objects)))

    def tensors(self) -> list[torch.Tensor]:
        return [each for each in self.objects if isinstance(each, torch.Tensor)]

    def are_in(self, other: SameObjects) -> bool:
        return set(map(id, self.objects)) <= set(map(id, other.objects))


def values_of(dicts: Iterable[dict[Any, Any]]) -> list[Any]:
    return list(chain.from_iterable(map(dict.values, dicts)))


class Arguments:
    """The flattened arguments of one call."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]):
        self._args, self._kwargs = args, kwargs
        self._structure: Any
        """The keys of `kwargs` if all argument types are in `_PLAIN`, which saves time. Otherwise, a `TreeSpec`."""
        if _PLAIN.issuperset(map(type, args)) and _PLAIN.issuperset(map(type, kwargs.values())):
            self.leaves, self._structure = [*args, *kwargs.values()], tuple(kwargs)
        else:
            self.leaves, self._structure = tree_flatten((args, kwargs))
        self.tensors = [leaf for leaf in self.leaves if isinstance(leaf, torch.Tensor)]

    def signature(self) -> Any:
        """Return a value that is equal for arguments that can share a recording. For tensors, only metadata counts."""
        return self._structure, tuple(map(_described, self.leaves))

    def obstacle(self, device: torch.device, is_part: Callable[[Any], bool]) -> str:
        """Return the reason why a recording on `device` cannot take these arguments, or an empty string.

        `is_part` returns True for models and optimizers of the step. These can be arguments, because their changes are
        detected separately.
        """
        for leaf in self.leaves:
            if not isinstance(leaf, (torch.Tensor, *_CONSTANTS)) and not is_part(leaf):
                return (
                    f"an argument is a {type(leaf).__name__}, and a replay would not see changes in it. Pass tensors "
                    "and numbers"
                )
        for tensor in self.tensors:
            if tensor.is_nested or tensor.layout is not torch.strided or tensor.is_inference():
                return "an argument is a nested, sparse or inference tensor"
            if tensor.device.type != device.type:
                return (
                    f"an argument of shape {tuple(tensor.shape)} is a tensor on {str(tensor.device)!r}. Move it to "
                    f"{str(device)!r} before the call"
                )
            if tensor.requires_grad:
                return (
                    f"an argument of shape {tuple(tensor.shape)} requires a gradient, which a replay would give to "
                    "its own copy"
                )
        return ""

    def versions(self) -> list[int]:
        return list(map(version_of, self.tensors))

    def run(self, step: Callable[..., Any]) -> Any:
        return step(*self._args, **self._kwargs)

    def static(self) -> Arguments:
        """Return a copy of the arguments for a recording. Replays read the tensors of this copy, which `fill` sets."""
        static = Arguments(*tree_map(_copied, (self._args, self._kwargs)))
        # The step may make the copies require gradients. Without `detach`, `fill` could then not write to them.
        static.tensors = [each.detach() for each in static.tensors]
        return static

    def fill(self, tensors: Sequence[torch.Tensor]) -> None:
        for mine, theirs in zip(self.tensors, tensors, strict=True):
            mine.copy_(theirs, non_blocking=True)


def _copied(leaf: Any) -> Any:
    return leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf


def _described(leaf: Any) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return type(leaf), leaf
    spec = (id(spec_of(leaf).mesh), spec_of(leaf).placements) if isinstance(leaf, DTensor) else None
    return type(leaf), leaf.shape, leaf.stride(), leaf.dtype, leaf.device, leaf.requires_grad, spec


# -- optimizers ---------------------------------------------------------------------------------------------


class LearningRates:
    """Keeps the learning rates of an optimizer in tensors, so that replays read the current values.

    The optimizer groups contain these tensors while a step runs. At all other times, they contain the numbers that the
    program or a scheduler has set. A group is left unchanged if the optimizer reads the learning rate on the host, or
    if the program has set a tensor as the learning rate.
    """

    def __init__(self, optimizer: Optimizer, device: torch.device):
        self._optimizer, self._device = optimizer, device
        self._tensors: list[torch.Tensor] = []
        self._numbers: list[Any] = []

    def refresh(self) -> None:
        """Make optimizer groups capturable if possible, and copy new learning rates to the tensors."""
        groups: list[dict[str, Any]] = self._optimizer.param_groups
        for group in groups:
            if not group.get("capturable") and _can_be_capturable(self._optimizer, group):
                group["capturable"] = True
                self._move_counters(group["params"])
        while len(self._tensors) < len(groups):
            self._tensors.append(torch.zeros((), device=self._device))
            self._numbers.append(None)
        for number, group in enumerate(groups):
            if _reads_on_device(self._optimizer, group) and group["lr"] != self._numbers[number]:
                self._numbers[number] = group["lr"]
                self._tensors[number].fill_(float(group["lr"]))

    def _move_counters(self, parameters: list[Any]) -> None:
        """Move step counters to the device, where `capturable` optimizers expect them.

        Parameters of a flat optimizer may share a counter, which is moved once. NAdam has a second number besides its
        counter, which is moved as well.
        """
        moved: dict[int, torch.Tensor] = {}
        for parameter in parameters:
            entry = self._optimizer.state.get(parameter, {})
            for name, value in entry.items():
                if isinstance(value, torch.Tensor) and value.dim() == 0 and value.device != self._device:
                    entry[name] = moved.setdefault(id(value), value.to(self._device, torch.float32))

    @contextmanager
    def shown(self, recorded: bool = False) -> Iterator[None]:
        """A context in which optimizer groups contain the tensors, so that a scheduler's step writes to the tensors.

        Set `recorded` if the step is recorded and does not run. The learning rates then do not change.
        """
        optimizer = self._optimizer
        shown = [
            (group, tensor, group["lr"], version_of(tensor))
            for group, tensor in zip(optimizer.param_groups, self._tensors, strict=False)
            if _reads_on_device(optimizer, group)
        ]
        for group, tensor, _, _ in shown:
            group["lr"] = tensor
        try:
            yield
        finally:
            for group, tensor, number, version in shown:
                if group["lr"] is tensor:
                    group["lr"] = number if recorded or version_of(tensor) == version else tensor.item()


def _reads_on_device(optimizer: Optimizer, group: dict[str, Any]) -> bool:
    """Return True if `group["lr"]` is a number, and the optimizer can read the learning rate from a device tensor."""
    if not isinstance(group.get("lr"), Real):
        return False
    if not group.get("fused"):
        return bool(group.get("capturable"))
    # For DTensors, torch supports a tensor as learning rate only in Adam's fused kernels (2.11 to 2.13).
    if isinstance(optimizer, Flat | torch.optim.Adam | torch.optim.AdamW):
        return True
    return not any(isinstance(each, DTensor) for each in group["params"])


def _can_be_capturable(optimizer: Optimizer, group: dict[str, Any]) -> bool:
    """Return True for torch's optimizers that run entirely on the device if `capturable` is set."""
    kind = type(optimizer).base if isinstance(optimizer, Flat) else type(optimizer)
    if kind is torch.optim.Rprop and group.get("foreach") and not isinstance(optimizer, Flat):
        return False  # torch cannot copy lists of DTensors in this case
    return kind in _CAPTURABLE and "capturable" in group


class OptimizerSettings:
    """Caches the settings of all optimizer groups, until one of them is assigned or may have changed in place."""

    def __init__(self, optimizers: Sequence[Optimizer]):
        self._optimizers = optimizers
        self._all = SameObjects([])
        self._can_change_in_place = True
        self.tensors = SameObjects([])
        """The settings that are tensors."""
        self.compared: tuple[tuple[tuple[str, Any], ...], ...] = ()
        """Names and values of settings, by optimizer group. They must be equal for two calls to share a recording."""

    def look(self) -> None:
        """Update `tensors` and `compared` if the program has assigned a setting, or may have changed one in place."""
        groups = [(each, group) for each in self._optimizers for group in each.param_groups]
        before, self._all = self._all, self._all.followed_by(values_of([group for _, group in groups]))
        if before is self._all and not self._can_change_in_place:
            return
        settings = [value for _, group in groups for name, value in group.items() if name not in _NO_SETTINGS]
        self._can_change_in_place = any(map(_can_change_in_place, settings))
        self.tensors = self.tensors.followed_by([each for value in settings for each in _tensors_in(value)])
        self.compared = tuple([_settings(optimizer, group) for optimizer, group in groups])


def _settings(optimizer: Optimizer, group: dict[str, Any]) -> tuple[tuple[str, Any], ...]:
    left_out = (*_NO_SETTINGS, "lr") if _reads_on_device(optimizer, group) else _NO_SETTINGS
    return tuple([(name, _comparable(value)) for name, value in group.items() if name not in left_out])


def _comparable(value: Any) -> Any:
    """Return an object that compares the numbers in `value` by value, and device tensors by identity."""
    if isinstance(value, int | float | str | NoneType | Number):
        return value
    if isinstance(value, tuple | list):
        return tuple(map(_comparable, value))
    return value.item() if _is_read_on_host(value) else SameObjects([value])


def _can_change_in_place(value: Any) -> bool:
    """Return True if the result of `_comparable(value)` can change while `value` stays the same object."""
    if isinstance(value, tuple):
        return any(map(_can_change_in_place, value))
    return isinstance(value, list) or _is_read_on_host(value)


def _is_read_on_host(value: Any) -> bool:
    """Return True for a tensor whose value a recording stores as a number."""
    return isinstance(value, torch.Tensor) and value.is_cpu and value.numel() == 1


def _tensors_in(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for each in value:
            yield from _tensors_in(each)


# -- signatures ---------------------------------------------------------------------------------------------


@dataclass
class Signature:
    """Properties of a call. Calls with equal signatures can share a recording. Warnings contain the field names."""

    arguments: Any
    train_or_eval_mode_of_modules: tuple[bool, ...]
    requires_grad_of_parameters: tuple[bool, ...]
    options_of_units: tuple[Any, ...]
    gradients_before_the_call: tuple[Any, ...]
    settings_of_optimizer_groups: tuple[tuple[tuple[str, Any], ...], ...]
    settings_of_the_scaler: tuple[Any, ...]
    state_of_the_scaler_since_its_last_update: tuple[Any, ...]
    grad_mode: bool
    autocast: bool
    autocast_dtype: Any
    deterministic_algorithms: bool
    default_dtype: Any

    @cached_property
    def _hash(self) -> int:
        return hash(tuple(vars(self).values()))

    def __hash__(self) -> int:
        return self._hash  # computed once, because there are hundreds of values


def changed_rates(one: Signature, other: Signature) -> list[int]:
    """Return the indices of optimizer groups with different learning rates, or [] if anything else differs as well."""
    mine, theirs = one.settings_of_optimizer_groups, other.settings_of_optimizer_groups
    if replace(one, settings_of_optimizer_groups=theirs) != other or len(mine) != len(theirs):
        return []
    changed = [number for number, (a, b) in enumerate(zip(mine, theirs, strict=True)) if a != b]
    return changed if all(_without_rate(mine[each]) == _without_rate(theirs[each]) for each in changed) else []


def _without_rate(settings: tuple[tuple[str, Any], ...]) -> list[tuple[str, Any]]:
    return [(name, value) for name, value in settings if name != "lr"]


def difference(one: Signature, other: Signature) -> str:
    """Describe the first difference between two signatures that are not equal."""
    if one.arguments != other.arguments:
        (_, mine), (_, theirs) = one.arguments, other.arguments
        pairs = [(a, b) for a, b in zip(mine, theirs, strict=False) if a != b]
        if pairs:
            return f"an argument: {_shown(pairs[0][0])} and {_shown(pairs[0][1])}"
        return "the number of arguments" if len(mine) != len(theirs) else "the names or the nesting of arguments"
    name = next(each.name for each in fields(one) if getattr(one, each.name) != getattr(other, each.name))
    if name != "settings_of_optimizer_groups":
        return name.replace("_", " ")
    groups = zip(one.settings_of_optimizer_groups, other.settings_of_optimizer_groups, strict=False)
    keys = [a[0] for mine, theirs in groups for a, b in zip(mine, theirs, strict=False) if a != b]
    if "lr" in keys:
        return (
            "'lr' of an optimizer group, which this optimizer reads on the host. It reads it on the device with "
            "fused=True; sharded parameters also need unshard.optim.flat"
        )
    return f"{', '.join(map(repr, keys))} of an optimizer group" if keys else "the number of optimizer groups"


def _shown(described: tuple[Any, ...]) -> str:
    if len(described) == 2:
        return f"{described[1]!r:.80}"
    return f"a tensor of shape {tuple(described[1])} and {described[3]}"
