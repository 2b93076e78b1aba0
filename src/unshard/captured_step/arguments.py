"""The arguments of one call: what a recording depends on, and static tensors that replays read instead of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum
from numbers import Number
from types import BuiltinFunctionType, FunctionType, NoneType
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor

from ..torch_private import spec_of, tree_flatten, tree_unflatten, version_of

_CONSTANTS = (
    *(bool, int, float, complex, str, bytes, type(None), Enum, type, FunctionType, BuiltinFunctionType),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size, range, Number),
)
"""Types of arguments that do not change, so that equal ones are the same in every call."""

_PLAIN = frozenset((torch.Tensor, bool, int, float, str, NoneType))
"""Types of most arguments that are no containers."""


class Plain(NamedTuple):
    """How a call passes arguments that are no containers; to take containers apart is slow."""

    positional: int
    names: tuple[str, ...]

    def arguments(self, leaves: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        args, values = leaves[: self.positional], leaves[self.positional :]
        return tuple(args), dict(zip(self.names, values, strict=True))


class Arguments:
    """Nested containers of tensors and other values, taken apart."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]):
        self._args, self._kwargs = args, kwargs
        self._structure: Any
        if _PLAIN.issuperset(map(type, args)) and _PLAIN.issuperset(map(type, kwargs.values())):
            self.leaves, self._structure = [*args, *kwargs.values()], Plain(len(args), tuple(kwargs))
        else:
            self.leaves, self._structure = tree_flatten((args, kwargs))
        self.tensors = [leaf for leaf in self.leaves if isinstance(leaf, torch.Tensor)]

    def signature(self) -> Any:
        """Equal for calls that can share a recording. Tensors count by what is known of them on the host."""
        return self._structure, tuple(map(_described, self.leaves))

    def obstacle(self, device: torch.device, is_part: Callable[[Any], bool]) -> str:
        """Why no recording on `device` can take these arguments; empty if it can.

        `is_part`: whether an object is one whose changes are noticed anyway: a model, an optimizer.
        """
        for leaf in self.leaves:
            if not isinstance(leaf, (torch.Tensor, *_CONSTANTS)) and not is_part(leaf):
                return (
                    f"an argument is a {type(leaf).__name__}, and a replay would not see what changes in it. Pass "
                    "tensors and numbers"
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
        """Grow when the tensors are written."""
        return list(map(version_of, self.tensors))

    def run(self, step: Callable[..., Any]) -> Any:
        return step(*self._args, **self._kwargs)

    def static(self) -> StaticArguments:
        return StaticArguments(self.leaves, self._structure)


class StaticArguments:
    """Copies of the tensors of a call, at addresses that stay."""

    def __init__(self, leaves: Sequence[Any], structure: Any):
        copies = [leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        # Not the copies themselves: the step may make them require gradients, and then they cannot be written.
        self._tensors = [copy.detach() for copy in copies if isinstance(copy, torch.Tensor)]
        self._args: tuple[Any, ...]
        self._kwargs: dict[str, Any]
        self._args, self._kwargs = (
            structure.arguments(copies) if isinstance(structure, Plain) else tree_unflatten(copies, structure)
        )

    def run(self, step: Callable[..., Any]) -> Any:
        return step(*self._args, **self._kwargs)

    def fill(self, tensors: Sequence[torch.Tensor]) -> None:
        for mine, theirs in zip(self._tensors, tensors, strict=True):
            mine.copy_(theirs, non_blocking=True)


def _described(leaf: Any) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return type(leaf), leaf
    spec = (id(spec_of(leaf).mesh), spec_of(leaf).placements) if isinstance(leaf, DTensor) else None
    return type(leaf), leaf.shape, leaf.stride(), leaf.dtype, leaf.device, leaf.requires_grad, spec
