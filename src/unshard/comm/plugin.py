"""Collectives that a user brings: the interface, and the transport that calls them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from .interface import Done, Transport, Work
from .order import Event


class Comm(ABC):
    """Where the tensors of a collective come from, and what moves them."""

    @abstractmethod
    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """An uninitialised tensor for the collective to work on."""


class AllGather(Comm):
    """A user's all-gather.

    A subclass may also define `gather_many(outputs, inputs, group) -> Work | None`, which gathers several tensors of
    several dtypes at once, straight into the parameters' memory; then nothing is allocated and nothing copied.
    """

    @abstractmethod
    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> Work | None:
        """Fill `output_tensor` with the `input_tensor` of every rank. The input is this rank's slice of the output."""


class ReduceScatter(Comm):
    """A user's reduce-scatter.

    A subclass may also define `reduce_scatter_many(outputs, inputs, group, op) -> Work | None`, as `AllGather`.
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
    """Another transport with a user's all-gather, reduce-scatter, or both, in place of its own."""

    def __init__(self, base: Transport, group: Any, gather: AllGather | None, reduce_scatter: ReduceScatter | None):
        self.rank, self.world = base.rank, base.world
        self._base, self._group = base, group
        self._gather, self._reduce_scatter = gather, reduce_scatter
        self.in_place_only = base.in_place_only and gather is None
        self.gathers_groups = base.gathers_groups if gather is None else hasattr(gather, "gather_many")
        self.reduces_groups = (
            base.reduces_groups if reduce_scatter is None else hasattr(reduce_scatter, "reduce_scatter_many")
        )
        self.piece_alignment, self.few = base.piece_alignment, base.few

    def announce(self, event: Event, describe: Callable[[], str]) -> None:
        self._base.announce(event, describe)

    def carrier(self, dtype: torch.dtype) -> torch.dtype:
        return self._base.carrier(dtype)

    def gather(self, outputs: list[torch.Tensor], inputs: list[torch.Tensor]) -> Work:
        comm = self._gather
        if comm is None:
            return self._base.gather(outputs, inputs)
        if self.gathers_groups:
            return comm.gather_many(outputs, inputs, self._group) or Done()  # type: ignore[attr-defined]
        works = []
        for output, piece in zip(outputs, inputs, strict=True):
            theirs = comm.allocate(output.shape, dtype=output.dtype, device=output.device)
            mine = theirs.view(self.world, -1)[self.rank]
            mine.copy_(piece)
            works.append(CopyingWork(comm(theirs, mine, self._group, async_op=True), [(output, theirs)]))
        return works[0] if len(works) == 1 else CopyingWork(None, [], works)

    def reduce_scatter(self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], *, average: bool) -> Work:
        comm = self._reduce_scatter
        if comm is None:
            return self._base.reduce_scatter(outputs, inputs, average=average)
        op = dist.ReduceOp.AVG if average else dist.ReduceOp.SUM
        if self.reduces_groups:
            work = comm.reduce_scatter_many(outputs, inputs, self._group, op)  # type: ignore[attr-defined]
            return work or Done()
        works = []
        for output, whole in zip(outputs, inputs, strict=True):
            theirs = comm.allocate(whole.shape, dtype=whole.dtype, device=whole.device)
            piece = comm.allocate(output.shape, dtype=output.dtype, device=output.device)
            theirs.copy_(whole)
            # The input is kept until the wait: it is the caller's to free only then.
            works.append(
                CopyingWork(comm(piece, theirs, self._group, op, async_op=True), [(output, piece)], [], theirs)
            )
        return works[0] if len(works) == 1 else CopyingWork(None, [], works)

    def all_reduce(self, tensors: list[torch.Tensor], *, average: bool) -> Work:
        return self._base.all_reduce(tensors, average=average)


class CopyingWork:
    """A user's collective whose result is copied to where it belongs when it is waited for."""

    def __init__(
        self,
        work: Work | None,
        copies: list[tuple[torch.Tensor, torch.Tensor]],
        others: Sequence[Work] = (),
        keep: torch.Tensor | None = None,
    ):
        self._work, self._copies, self._others, self._keep = work, copies, others, keep

    def wait(self) -> None:
        if self._work is not None:
            self._work.wait()
        for target, source in self._copies:
            target.copy_(source)
        for other in self._others:
            other.wait()
        self._work, self._copies, self._others, self._keep = None, [], (), None
