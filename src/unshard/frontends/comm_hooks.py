"""Hooks that reduce the gradients of a wrapped model instead of the library (`register_comm_hook`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from ..comm.interface import Done, Transport, Work
from ..torch_private import reduce_scatter_into


class HookedTransport(Transport):
    """Gathers as the transport inside; gradients are given to a user's hook.

    A hook of a sharded unit gets (state, whole flat gradient, this rank's piece to fill); one of a unit that is not
    sharded gets (state, gradient) and changes it.
    """

    def __init__(self, inner: Transport, state: Any, hook: Callable[..., Any]):
        self._inner, self._state, self._hook = inner, state, hook
        self.rank, self.world = inner.rank, inner.world
        self.gathers_groups, self.reduces_groups = inner.gathers_groups, inner.reduces_groups
        self.few, self.in_place_only = inner.few, inner.in_place_only
        self.piece_alignment, self.pool = inner.piece_alignment, inner.pool

    def gather(self, outputs: list[torch.Tensor], inputs: list[torch.Tensor]) -> Work:
        return self._inner.gather(outputs, inputs)

    def reduce_scatter(self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], *, average: bool) -> Work:
        for output, whole in zip(outputs, inputs, strict=True):
            self._hook(self._state, whole, output)
        return Done()

    def all_reduce(self, tensors: list[torch.Tensor], *, average: bool) -> Work:
        for tensor in tensors:
            self._hook(self._state, tensor)
        return Done()

    def serial(self) -> int:
        return self._inner.serial()

    def carrier(self, dtype: torch.dtype) -> torch.dtype:
        return self._inner.carrier(dtype)

    def announce(self, event: Any, describe: Callable[[], str]) -> None:
        self._inner.announce(event, describe)


class DefaultState:
    """What the hooks below need: the group, and the two divisors whose product is its size."""

    def __init__(self, process_group: Any):
        if process_group is None:
            raise ValueError("DefaultState needs a process group.")
        self.process_group = process_group
        self.world_size = dist.get_world_size(process_group)
        self.gradient_predivide_factor = _first_divisor(self.world_size)
        self.gradient_postdivide_factor = self.world_size / self.gradient_predivide_factor


class LowPrecisionState(DefaultState):
    """Also the dtype that gradients return to."""

    def __init__(self, process_group: Any, parameter_type: torch.dtype = torch.float32):
        super().__init__(process_group)
        self.parameter_type = parameter_type


def allreduce_hook(state: DefaultState, gradient: torch.Tensor) -> None:
    """The mean over the ranks."""
    _divide(gradient, state.gradient_predivide_factor)
    dist.all_reduce(gradient, group=state.process_group)
    _divide(gradient, state.gradient_postdivide_factor)


def reduce_scatter_hook(state: DefaultState, gradient: torch.Tensor, output: torch.Tensor) -> None:
    """This rank's piece of it."""
    _divide(gradient, state.gradient_predivide_factor)
    reduce_scatter_into(output, gradient, state.process_group)
    _divide(output, state.gradient_postdivide_factor)


def fp16_compress_hook(state: LowPrecisionState, gradient: torch.Tensor, output: torch.Tensor | None = None) -> None:
    """The same in float16, and back to the state's dtype."""
    _compressed(torch.float16, state, gradient, output)


def bf16_compress_hook(state: LowPrecisionState, gradient: torch.Tensor, output: torch.Tensor | None = None) -> None:
    _compressed(torch.bfloat16, state, gradient, output)


def _compressed(dtype: torch.dtype, state: DefaultState, gradient: torch.Tensor, output: torch.Tensor | None) -> None:
    low = gradient.to(dtype)
    if output is None:
        allreduce_hook(state, low)
        gradient.copy_(low)
    else:
        piece = torch.empty_like(output, dtype=dtype)
        reduce_scatter_hook(state, low, piece)
        output.copy_(piece)


def _first_divisor(world: int) -> float:
    first = 1
    while world % first == 0 and world / first > first:
        first *= 2
    return float(first)


def _divide(tensor: torch.Tensor, factor: float) -> None:
    if factor > 1:
        tensor.div_(factor)
