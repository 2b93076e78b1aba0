"""Collectives of a `torch.distributed` process group.

The group's own methods are called instead of the functions of `torch.distributed`: they take many tensors at
once, and skip a layer of Python.
"""

from __future__ import annotations

import atexit
import sys
import time
from functools import cache
from operator import attrgetter
from typing import Any

import torch
import torch.distributed as dist

from ..layout.collective_tensors import PACK_SMALL, PackingRule
from ..torch_private import (
    AllgatherOptions,
    AllreduceOptions,
    ReduceScatterOptions,
    backend_name,
    backend_of,
)
from .exchange import AllToAllReduce, PairwiseReduce, ReduceOfCopy
from .group_methods import methods_of
from .interface import Done, Label, Traits, Transport, Work, Works

# One more tensor in a group of NCCL's costs time on the wire: 0.07 ms with 4 ranks on a slow network. The copy that
# packing takes runs at the speed of the device's memory, 3 us for 4 MiB, but each takes a call on the host.
ON_DEVICE = PackingRule(below=4 * 1024 * 1024, least=3)
ON_HOST = PACK_SMALL

_dtype_of = attrgetter("dtype")
_DONE = Done()  # a group that is written in Python may return None instead of a work
_TENSOR: Any = dist.reduce_scatter_tensor
_SINGLE: Any = getattr(dist, "reduce_scatter_single", None)  # its name since torch 2.13, which has both

# What Gloo's all-gather accepts; anything else is sent as bytes.
_GLOO_DTYPES = frozenset(
    (torch.float32, torch.float64, torch.float16, torch.bfloat16)
    + (torch.int8, torch.uint8, torch.int32, torch.int64, torch.bool)
)

# Their works end on the host, also for tensors on a device; those of the others end in a stream.
_WAITING_ON_HOST = ("gloo", "mpi", "ucc")


class ProcessGroupTransport(Transport):
    def __init__(self, group: Any, device: torch.device):
        self.rank, self.world = group.rank(), group.size()
        self._group = group
        self.backend = backend_name(group, device)
        if self.backend == "gloo":
            delay_exit()
        in_python = type(group) is not dist.ProcessGroup
        methods = methods_of(group, backend_of(group, device), *_grouping(self.backend, in_python))
        self._gather_one, self._gather_many = methods.all_gather, methods.all_gather_many
        self._reduce_one, self._reduce_many = methods.reduce_scatter, methods.reduce_scatter_many
        self._all_to_all, self._all_reduce = methods.all_to_all, methods.all_reduce
        self._exchanges = _exchange_is_faster(self.backend, device) and not methods.own_reduce_scatter
        # NCCL carries out the collectives of a group one after the other. In backward the gather of the next unit then
        # waits for the reduction of the last one, and both for each other's latencies.
        self.separate_is_faster = self.backend == "nccl" and not in_python
        self.traits = Traits(
            self._gather_many is not None,
            self._reduce_many is not None and not self._exchanges,  # an exchange takes one tensor
            packing=ON_HOST if device.type == "cpu" or self.backend == "gloo" else ON_DEVICE,
            gathers_on_any_stream=True,
            waits_in_stream=device.type != "cpu" and self.backend not in _WAITING_ON_HOST,
            # NCCL is known to be slower on pieces that are not multiples of 16 bytes; the others do not care.
            piece_alignment=16 if self.backend == "nccl" else 1,
            reduce_scatter_ignores_timeout=self.backend == "gloo" and not self._exchanges,
            gathers=methods.gathers,
        )
        self._gather_options = AllgatherOptions()
        self._sum, self._mean = ReduceScatterOptions(), ReduceScatterOptions()
        self._sum_all, self._mean_all = AllreduceOptions(), AllreduceOptions()
        self._sum.reduceOp = self._sum_all.reduceOp = dist.ReduceOp(dist.ReduceOp.SUM)
        self._mean.reduceOp = self._mean_all.reduceOp = dist.ReduceOp(dist.ReduceOp.AVG)

    def carrier(self, dtype: torch.dtype) -> torch.dtype:
        return torch.uint8 if self.backend == "gloo" and dtype not in _GLOO_DTYPES else dtype

    def all_gather(self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], label: Label | None = None) -> Work:
        if len(outputs) > 1 and self.traits.gathers_groups:
            return self._gather_many(outputs, inputs, self._gather_options) or _DONE  # type: ignore[misc]
        gather, options = self._gather_one, self._gather_options
        return _joined([gather(output, piece, options) for output, piece in zip(outputs, inputs, strict=True)])

    def reduce_scatter(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], label: Label | None = None, *, average: bool
    ) -> Work:
        # A program that replaces the function of `torch.distributed` wants to see what is reduced, or to do it.
        if dist.reduce_scatter_tensor is not _TENSOR or getattr(dist, "reduce_scatter_single", None) is not _SINGLE:
            return self._reduce_by_function(outputs, inputs, average)
        if not self._exchanges and list(map(_dtype_of, outputs)) == list(map(_dtype_of, inputs)):
            return self._reduce_by_backend(outputs, inputs, average)
        works, same = [], []
        for output, unreduced in zip(outputs, inputs, strict=True):
            if self._exchanges or output.dtype != unreduced.dtype:
                works.append(self._exchange(output, unreduced, average))
            else:
                same.append((output, unreduced))
        if same:
            works.append(self._reduce_by_backend([o for o, _ in same], [i for _, i in same], average))
        return _joined(works)

    def _reduce_by_function(self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], average: bool) -> Work:
        """What a program has put in the place of `torch.distributed`'s reduce-scatter."""
        single = getattr(dist, "reduce_scatter_single", None)
        function: Any = single if single is not _SINGLE else dist.reduce_scatter_tensor
        works: list[Work] = []
        for output, unreduced in zip(outputs, inputs, strict=True):
            if output.dtype != unreduced.dtype:
                works.append(self._exchange(output, unreduced, average))
            else:
                function(output, unreduced, group=self._group)
                if average:
                    output.div_(self.world)
        return Works(works)

    def _reduce_by_backend(self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], average: bool) -> Work:
        """The backend's own reduce-scatter."""
        options = self._mean if average else self._sum
        if len(outputs) > 1 and self.traits.reduces_groups:
            return self._reduce_many(outputs, inputs, options) or _DONE  # type: ignore[misc]
        reduce = self._reduce_one
        return _joined([reduce(output, whole, options) for output, whole in zip(outputs, inputs, strict=True)])

    def _exchange(self, output: torch.Tensor, unreduced: torch.Tensor, average: bool) -> Work:
        """Send each rank its piece as it is; the receiver adds the pieces up."""
        if self._all_to_all is None:
            return self._reduce_copy(output, unreduced, average)
        if self.world == 2 and self._exchanges:
            return self._exchange_pair(self._all_to_all, output, unreduced, average)
        received = torch.empty_like(unreduced)
        work = self._all_to_all(received, unreduced, [], []) or _DONE
        return AllToAllReduce(work, received.view(self.world, -1), output, average)

    def _reduce_copy(self, output: torch.Tensor, unreduced: torch.Tensor, average: bool) -> Work:
        """For a group without an all-to-all: reduce a copy in the dtype of the output."""
        # Both are padded to the same number of bytes, so narrow rows may be longer.
        copy = unreduced.view(self.world, -1)[:, : output.numel()].to(output.dtype).flatten()
        return ReduceOfCopy(self._reduce_by_backend([output], [copy], average), copy)

    def _exchange_pair(self, all_to_all: Any, output: torch.Tensor, unreduced: torch.Tensor, average: bool) -> Work:
        """One piece to send and one to receive, into the output itself if the dtypes are the same."""
        other, piece = 1 - self.rank, unreduced.numel() // 2
        sent, own = unreduced.narrow(0, other * piece, piece), unreduced.narrow(0, self.rank * piece, piece)
        received = output if output.dtype == unreduced.dtype else torch.empty_like(own)
        splits = [piece, 0] if other == 0 else [0, piece]
        work = all_to_all(received, sent, splits, splits) or _DONE
        return PairwiseReduce(work, own, received, output, average)

    def all_reduce(self, tensors: list[torch.Tensor], label: Label | None = None, *, average: bool) -> Work:
        options = self._mean_all if average else self._sum_all
        reduce = self._all_reduce
        return _joined([reduce([tensor], options) for tensor in tensors])


def _joined(works: list[Any]) -> Work:
    return works[0] or _DONE if len(works) == 1 else Works([work or _DONE for work in works])


EXIT_DELAY = 0.05  # seconds


@cache
def delay_exit() -> None:
    """Let Gloo's threads finish before the interpreter ends. Calling it once is enough.

    A thread that has carried out a collective frees its tensors a little later, for which it needs the interpreter; if
    that is ending by then, Python up to 3.13 ends the thread, and C++ answers by ending the process: "terminate called
    without an active exception". `destroy_process_group` would wait for the thread, but since torch 2.13 a device mesh
    keeps its groups alive beyond that. Seen in 7 of 50 ends of a program of 15 lines without this library: a mesh,
    `all_gather_object`, `destroy_process_group`. In none of 160 with a delay in which the interpreter is free.
    """
    if sys.version_info < (3, 14):
        atexit.register(time.sleep, EXIT_DELAY)


def _exchange_is_faster(backend: str, device: torch.device) -> bool:
    """Whether an exchange and sums of our own are faster than the backend's reduce-scatter.

    Gloo's is an all-reduce of a copy: twice the bytes, about twice the time. Measured with tensors on the host.
    """
    return backend == "gloo" and device.type == "cpu"


def _grouping(backend: str, in_python: bool) -> tuple[bool, bool]:
    """Whether the backend gathers, and reduces, several tensors in one collective."""
    # Gloo's coalesced all-gather corrupts the heap when two are in flight, and numbers when dtypes differ (torch 2.13,
    # seen without this library); with CUDA tensors it crashes. Its coalesced reduce-scatter works, but not for a group
    # that is written in Python: see `group_methods`.
    return backend == "nccl", backend == "nccl" or (backend == "gloo" and not in_python)
