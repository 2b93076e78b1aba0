"""A process group of many ranks of which only this one exists: every collective is one device copy per tensor.

All sides of a comparison pay the same for it, so what differs is the sharding library. A real group launches one
kernel for a whole group of tensors, so the host time that is spent in here is counted, and taken off. Numbers are not
those of a training (nothing is summed); nobody looks at them.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

RANGE = "benchmarks.loopback"
"""Profile range around the copies, by which they are told from copies of the sides."""

NAME = "simulated"


class Call(NamedTuple):
    """A collective: its kind, the bytes of its whole tensors, and the number of ranks, or 0 if that is unknown."""

    kind: str
    size: int
    ranks: int = 0


class Meter:
    """What the groups of this process did."""

    def __init__(self) -> None:
        self.seconds = self.cpu_seconds = 0.0
        self.log: list[Call] | None = None
        """Each collective, while somebody listens."""

    @contextlib.contextmanager
    def listening(self) -> Iterator[list[Call]]:
        self.log = []
        try:
            yield self.log
        finally:
            self.log = None


METER = Meter()


class _Done(dist._Work):
    """A collective that was over when it was issued: later work on the same stream sees its result."""

    def __init__(self, result: Any) -> None:
        super().__init__()
        self._future: Any = torch.futures.Future()
        self._future.set_result(result)

    def wait(self, timeout: Any = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def get_future(self) -> Any:
        return self._future


def _do(call: Call, copies: Callable[[], None], result: Any) -> _Done:
    began, cpu = time.perf_counter(), time.thread_time()
    if METER.log is not None:
        METER.log.append(call)
    if METER.log is not None or torch.autograd._profiler_enabled():
        with _disable_current_modes(), torch.profiler.record_function(RANGE):
            copies()
    else:
        copies()
    done = _Done(result)
    METER.seconds += time.perf_counter() - began
    METER.cpu_seconds += time.thread_time() - cpu
    return done


def _bytes(tensors: list[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


class Loopback(dist.ProcessGroup):
    def __init__(self, rank: int, world: int) -> None:
        super().__init__(rank, world)
        self._place, self._ranks, self._name = rank, world, ""

    def getBackendName(self) -> str:
        return NAME

    def setGroupName(self, name: str) -> None:
        self._name = name

    def getGroupName(self) -> str:
        return self._name

    def _allgather_base(self, output: Tensor, input: Tensor, opts: Any = None) -> _Done:
        return self.allgather_into_tensor_coalesced([output], [input])

    def allgather_into_tensor_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> _Done:
        def copies() -> None:
            for whole, piece in zip(outputs, inputs, strict=True):
                whole.view(self._ranks, -1).copy_(piece.view(1, -1).expand(self._ranks, -1))

        return _do(Call("gather", _bytes(outputs), self._ranks), copies, outputs)

    def _reduce_scatter_base(self, output: Tensor, input: Tensor, opts: Any = None) -> _Done:
        return self.reduce_scatter_tensor_coalesced([output], [input])

    def reduce_scatter_tensor_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None) -> _Done:
        def copies() -> None:
            for piece, whole in zip(outputs, inputs, strict=True):
                piece.view(-1).copy_(whole.view(self._ranks, -1)[self._place])

        return _do(Call("reduce_scatter", _bytes(inputs), self._ranks), copies, outputs)

    # The names since torch 2.13.
    all_gather_single = _allgather_base
    all_gather_single_coalesced = allgather_into_tensor_coalesced
    reduce_scatter_single = _reduce_scatter_base
    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> _Done:
        def copies() -> None:
            for places, piece in zip(outputs, inputs, strict=True):
                for place in places:
                    place.copy_(piece)

        return _do(Call("gather", sum(map(_bytes, outputs)), self._ranks), copies, outputs)

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> _Done:
        return _do(Call("all_reduce", _bytes(tensors), self._ranks), _nothing, tensors)

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = None) -> _Done:
        return self.allreduce(tensors)

    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> _Done:
        return _do(Call("other", _bytes(tensors), self._ranks), _nothing, tensors)

    def barrier(self, opts: Any = None) -> _Done:
        return _do(Call("other", 0, self._ranks), _nothing, None)


def _nothing() -> None:
    """In place, and this rank's own numbers are already there."""


def register() -> None:
    if NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(NAME, _create, devices=["cpu", "cuda"])


def _create(store: Any, rank: int, world: int, timeout: Any) -> Loopback:
    return Loopback(rank, world)
