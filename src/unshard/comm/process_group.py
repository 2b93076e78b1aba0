"""Collectives of a `torch.distributed` process group.

The group's own methods are called instead of the functions of `torch.distributed`: they take many tensors at
once, and skip a layer of Python.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import attrgetter
from typing import Any

import torch
import torch.distributed as dist

from ..torch_private import (
    AllgatherOptions,
    AllreduceOptions,
    ReduceScatterOptions,
    backend_name,
    gather_one,
    reduce_scatter_one,
    replaced_reduce_scatter,
)
from .arrival import Addition, Arrival
from .farewell import expect_end
from .interface import Transport, Work, Works
from .order import Event, order_of
from .patient import PatientWork
from .solo import SoloTransport

FEW = 8
_dtype_of = attrgetter("dtype")

# What Gloo's all-gather accepts; anything else travels as bytes.
_GLOO_DTYPES = frozenset(
    (torch.float32, torch.float64, torch.float16, torch.bfloat16)
    + (torch.int8, torch.uint8, torch.int32, torch.int64, torch.bool)
)

# Their works end on the host, also for tensors on a device; those of the others end in a stream.
_WAITING_ON_HOST = ("gloo", "mpi", "ucc")


def transport_for(group: Any, device: torch.device) -> Transport:
    """The transport for a shard group; a group of one rank sends nothing."""
    return SoloTransport() if group.size() == 1 else ProcessGroupTransport(group, device)


class ProcessGroupTransport(Transport):
    stays_in_lane = True

    def __init__(self, group: Any, device: torch.device):
        self.rank, self.world = group.rank(), group.size()
        self._group = group
        self._backend = backend_name(group, device)
        expect_end()
        self._exchanges = _adds_on_arrival(self._backend, device)
        self.gathers_groups, groups = _grouping(group, self._backend)
        self.reduces_groups = groups and not self._exchanges  # an exchange takes one tensor
        # On a device, packing costs about as much host time as eight more tensors in the groups of a step. On a CPU it
        # costs next to nothing, and every tensor a round trip.
        self.few = 0 if device.type == "cpu" or self._backend == "gloo" else FEW
        # NCCL is known to be slower on pieces that are not multiples of 16 bytes; the others do not care.
        self.piece_alignment = 16 if self._backend == "nccl" else 1
        self.waits_in_stream = device.type != "cpu" and self._backend not in _WAITING_ON_HOST
        self._order = order_of(group, self._backend, device)
        self._gather_options = AllgatherOptions()
        self._sum, self._mean = ReduceScatterOptions(), ReduceScatterOptions()
        self._sum_all, self._mean_all = AllreduceOptions(), AllreduceOptions()
        self._sum.reduceOp = self._sum_all.reduceOp = dist.ReduceOp(dist.ReduceOp.SUM)
        self._mean.reduceOp = self._mean_all.reduceOp = dist.ReduceOp(dist.ReduceOp.AVG)

    def serial(self) -> int:
        return 0 if self._order is None else self._order.serial()

    def announce(self, event: Event, describe: Callable[[], str]) -> None:
        if self._order is not None:
            self._order.announce(event, describe)

    def carrier(self, dtype: torch.dtype) -> torch.dtype:
        return torch.uint8 if self._backend == "gloo" and dtype not in _GLOO_DTYPES else dtype

    def gather(self, outputs: list[torch.Tensor], inputs: list[torch.Tensor]) -> Work:
        if len(outputs) > 1 and self.gathers_groups:
            return self._joined([self._group.allgather_into_tensor_coalesced(outputs, inputs, self._gather_options)])
        pairs = zip(outputs, inputs, strict=True)
        return self._joined([gather_one(self._group, o, i, self._gather_options) for o, i in pairs])

    def reduce_scatter(self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], *, average: bool) -> Work:
        replacement = replaced_reduce_scatter()
        if replacement is not None:
            return self._reduce_by(replacement, outputs, inputs, average)
        if not self._exchanges and list(map(_dtype_of, outputs)) == list(map(_dtype_of, inputs)):
            return self._reduce_by_backend(outputs, inputs, average)
        works, same = [], []
        for output, whole in zip(outputs, inputs, strict=True):
            if self._exchanges or output.dtype != whole.dtype:
                works.append(self._exchange(output, whole, average))
            else:
                same.append((output, whole))
        if same:
            works.append(self._reduce_by_backend([o for o, _ in same], [i for _, i in same], average))
        return works[0] if len(works) == 1 else Works(works)

    def _reduce_by(
        self,
        replacement: Callable[..., object],
        outputs: list[torch.Tensor],
        inputs: list[torch.Tensor],
        average: bool,
    ) -> Work:
        """A program that replaces the function of `torch.distributed` wants to see what is reduced, or to do it."""
        works: list[Work] = []
        for output, whole in zip(outputs, inputs, strict=True):
            if output.dtype != whole.dtype:
                works.append(self._exchange(output, whole, average))
            else:
                replacement(output, whole, group=self._group)
                if average:
                    output.div_(self.world)
        return Works(works)

    def _reduce_by_backend(self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], average: bool) -> Work:
        """The backend's own reduce-scatter."""
        options = self._mean if average else self._sum
        if len(outputs) > 1 and self.reduces_groups:
            return self._joined([self._group.reduce_scatter_tensor_coalesced(outputs, inputs, options)], timed=False)
        pairs = zip(outputs, inputs, strict=True)
        return self._joined([reduce_scatter_one(self._group, o, i, options) for o, i in pairs], timed=False)

    def _exchange(self, output: torch.Tensor, whole: torch.Tensor, average: bool) -> Work:
        """Send each rank its piece as it is, to be added up where it arrives."""
        if self.world == 2 and self._exchanges:
            return self._exchange_with_other(output, whole, average)
        arrived = torch.empty_like(whole)
        work = self._joined([self._group.alltoall_base(arrived, whole, [], [])])
        return Arrival(work, arrived.view(self.world, -1), output, average)

    def _exchange_with_other(self, output: torch.Tensor, whole: torch.Tensor, average: bool) -> Work:
        """One piece to send and one to receive, which can arrive where the sum is wanted if the dtypes are the same."""
        other, piece = 1 - self.rank, whole.numel() // 2
        sent, own = whole.narrow(0, other * piece, piece), whole.narrow(0, self.rank * piece, piece)
        arrived = output if output.dtype == whole.dtype else torch.empty_like(own)
        splits = [piece, 0] if other == 0 else [0, piece]
        work = self._joined([self._group.alltoall_base(arrived, sent, splits, splits)])
        return Addition(work, own, arrived, output, average)

    def all_reduce(self, tensors: list[torch.Tensor], *, average: bool) -> Work:
        options = self._mean_all if average else self._sum_all
        return self._joined([self._group.allreduce([tensor], options) for tensor in tensors])

    def _joined(self, works: list[Any], timed: bool = True) -> Work:
        """One work for all. `timed`: their waits can be given up."""
        order = self._order
        if order is not None and order.waits_on_host:
            works = [PatientWork(work if timed else order.waiter.watch(work), order, self._group) for work in works]
        return works[0] if len(works) == 1 else Works(works)


def _adds_on_arrival(backend: str, device: torch.device) -> bool:
    """Whether an exchange and sums of our own are faster than the backend's reduce-scatter.

    Gloo's is an all-reduce of a copy: twice the bytes, about twice the time. Measured with tensors on the host.
    """
    return backend == "gloo" and device.type == "cpu"


def _grouping(group: Any, backend: str) -> tuple[bool, bool]:
    """Whether several tensors may be gathered, and reduced, in one collective."""
    if backend == "nccl":
        return True, True
    if backend == "gloo":
        # Its coalesced all-gather corrupts the heap when two are under way, and numbers when dtypes differ (torch 2.13,
        # seen without this library); with CUDA tensors it crashes. Its coalesced reduce-scatter works.
        return False, True
    written_in_python = type(group).__mro__[: type(group).__mro__.index(dist.ProcessGroup)]
    own = {name for cls in written_in_python for name in vars(cls)}
    return "allgather_into_tensor_coalesced" in own, "reduce_scatter_tensor_coalesced" in own
