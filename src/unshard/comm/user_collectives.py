"""Collectives that users write: their interfaces, and the transport that calls them."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from .interface import Label, Tensors, Transport, Work, Works


class Comm(ABC):
    """A user's collective, which also allocates the tensors that it works on."""

    @abstractmethod
    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return an uninitialised tensor for the collective to work on."""


class AllGather(Comm):
    """A user's all-gather.

    A subclass may also define `gather_many(outputs, inputs, group) -> Work | None`, which gathers several tensors of
    several dtypes at once, directly into the parameters' memory. Then nothing is allocated or copied.
    """

    @abstractmethod
    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> Work | None:
        """Fill `output_tensor` with the `input_tensor` of every rank. The input is this rank's piece of the output."""


class ReduceScatter(Comm):
    """A user's reduce-scatter.

    A subclass may also define `reduce_scatter_many(outputs, inputs, group, op) -> Work | None`, which reduces several
    tensors at once, as `AllGather.gather_many` does.
    """

    @abstractmethod
    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> Work | None:
        """Fill `output_tensor` with this rank's piece of the reduced `input_tensor`s."""


class PluginTransport(Transport):
    """Replaces the all-gather, the reduce-scatter, or both, of another transport by a user's."""

    def __init__(self, base: Transport, group: Any, all_gather: AllGather | None, reduce_scatter: ReduceScatter | None):
        self.rank, self.world, self.traits = base.rank, base.world, base.traits
        self._base, self._group = base, group
        self._all_gather, self._reduce_scatter = all_gather, reduce_scatter
        if all_gather is not None:
            self.traits = dataclasses.replace(
                self.traits,
                gathers_groups=hasattr(all_gather, "gather_many"),
                in_place_only=False,
                gathers_on_any_stream=False,
            )
        if reduce_scatter is not None:
            self.traits = dataclasses.replace(
                self.traits,
                reduces_groups=hasattr(reduce_scatter, "reduce_scatter_many"),
                reduces_in_place=False,
                waits_in_stream=False,
            )

    def carrier(self, dtype: torch.dtype) -> torch.dtype:
        return self._base.carrier(dtype)

    def all_gather(self, outputs: Tensors, inputs: Tensors, *, label: Label | None = None) -> Work:
        comm = self._all_gather
        if comm is None:
            return self._base.all_gather(outputs, inputs, label=label)
        if self.traits.gathers_groups:
            return UserWork(comm.gather_many(outputs, inputs, self._group))  # type: ignore[attr-defined]
        works = []
        for output, piece in zip(outputs, inputs, strict=True):
            whole = comm.allocate(output.shape, dtype=output.dtype, device=output.device)
            mine = whole.view(self.world, -1)[self.rank]
            mine.copy_(piece)
            works.append(UserWork(comm(whole, mine, self._group, async_op=True), (output, whole)))
        return works[0] if len(works) == 1 else Works(works)

    def reduce_scatter(self, outputs: Tensors, inputs: Tensors, *, label: Label | None = None, average: bool) -> Work:
        comm = self._reduce_scatter
        if comm is None:
            return self._base.reduce_scatter(outputs, inputs, label=label, average=average)
        op = dist.ReduceOp.AVG if average else dist.ReduceOp.SUM
        if self.traits.reduces_groups:
            return UserWork(comm.reduce_scatter_many(outputs, inputs, self._group, op))  # type: ignore[attr-defined]
        works = []
        for output, unreduced in zip(outputs, inputs, strict=True):
            copy = comm.allocate(unreduced.shape, dtype=unreduced.dtype, device=unreduced.device)
            piece = comm.allocate(output.shape, dtype=output.dtype, device=output.device)
            copy.copy_(unreduced)
            # The work also keeps the input: the collective may read it until the wait.
            works.append(UserWork(comm(piece, copy, self._group, op, async_op=True), (output, piece, copy)))
        return works[0] if len(works) == 1 else Works(works)

    def all_reduce(self, tensors: Tensors, *, label: Label | None = None, average: bool) -> Work:
        return self._base.all_reduce(tensors, label=label, average=average)


class UserWork:
    """A user's collective in flight. `wait` copies the result to its destination.

    Only a work of `torch.distributed` gets the timeout: a user's own class need not take one.
    """

    def __init__(self, work: Work | None, tensors: tuple[torch.Tensor, ...] = ()):
        """`tensors`: destination, result, and other tensors to keep until the wait."""
        self._work, self._tensors = work, tensors

    def wait(self, timeout: timedelta | None = None) -> None:
        if timeout is not None and isinstance(self._work, dist.Work):
            self._work.wait(timeout)
        elif self._work is not None:
            self._work.wait()
        if self._tensors:
            self._tensors[0].copy_(self._tensors[1])
        self._work, self._tensors = None, ()

    def is_completed(self) -> bool:
        return not isinstance(self._work, dist.Work) or self._work.is_completed()
