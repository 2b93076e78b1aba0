"""The stream on which a loop-back group works: when a collective reads its inputs and when it writes its outputs.

A collective may do so at any moment between issue and wait, so code that waits correctly cannot tell when. A stream
picks the moments that hurt most: from the issue on the outputs hold NaN, and the inputs are read and the outputs
written as late as can be. On the CPU that is inside `wait()`, so it needs no thread and gives the same result every
time; on a GPU it is a stream of its own that sleeps first.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import ParamSpec, TypeVar

import torch
import torch.distributed as dist
from bed.recorders import Call
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

P = ParamSpec("P")
T = TypeVar("T")


def unseen(function: Callable[P, T]) -> Callable[P, T]:
    """Hide the operations of the stream from whoever counts those of the code under test."""

    @functools.wraps(function)
    def quietly(*args: P.args, **kwargs: P.kwargs) -> T:
        with _disable_current_modes():
            return function(*args, **kwargs)

    return quietly


def poison(outputs: Iterable[Tensor], keep: Iterable[Tensor] = ()) -> None:
    """Make the outputs unusable, but not the inputs that may lie inside them (a gather in place)."""
    outputs = list(outputs)
    storages = {each.untyped_storage()._cdata for each in outputs}
    kept = [(each, each.clone()) for each in keep if each.untyped_storage()._cdata in storages]
    for each in outputs:
        each.fill_(_garbage(each.dtype))
    for each, copy in kept:
        each.copy_(copy)


def _garbage(dtype: torch.dtype) -> float:
    if dtype.is_floating_point or dtype.is_complex:
        return float("nan")
    if dtype == torch.bool:
        return True
    # All bits set: bytes that are later read as floating point numbers are NaN then, whatever their type.
    return {torch.uint8: 255, torch.int8: -1}.get(dtype, torch.iinfo(dtype).max)


def _extent(tensor: Tensor) -> tuple[int, int]:
    storage = tensor.untyped_storage()
    return storage.data_ptr(), storage.nbytes()


@dataclass(eq=False)
class Transfer:
    """A collective under way: `deliver` reads the inputs and writes the outputs."""

    number: int
    op: str
    inputs: list[Tensor]
    outputs: list[Tensor]
    deliver: Callable[[], None]
    lost: bool  # it never delivers, and stands so for a wait that was forgotten
    waited: bool = False
    done: bool = False
    ready: float = 0.0
    event: torch.cuda.Event | None = None
    extents: list[tuple[int, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.extents = [_extent(each) for each in (*self.inputs, *self.outputs)]

    def moved(self) -> str:
        """Empty, or which of its tensors lost or changed memory since the issue."""
        for place, (each, before) in enumerate(zip((*self.inputs, *self.outputs), self.extents, strict=True)):
            if (now := _extent(each)) != before:
                role = "input" if place < len(self.inputs) else "output"
                return (
                    f"{self.op} (number {self.number}): the storage of an {role} of {each.numel()} elements had "
                    f"{before[1]} bytes at {before[0]:#x} when issued and has {now[1]} at {now[0]:#x} before the wait"
                )
        return ""

    def release(self) -> None:
        """Let go of the memory, as a real group does after the wait."""
        self.inputs, self.outputs, self.extents = [], [], []
        self.deliver = lambda: None


@dataclass
class Ledger:
    """What all groups of a job share: the running number of their works, the log, and what went wrong."""

    skip_wait: frozenset[int] = frozenset()
    log: list[Call] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    open: dict[int, Transfer] = field(default_factory=dict)

    def enter(self, call: Call, inputs: list[Tensor], outputs: list[Tensor], deliver: Callable[[], None]) -> Transfer:
        number = len(self.log)
        self._note_moved()
        self.log.append(call)
        transfer = Transfer(number, call.op, inputs, outputs, deliver, lost=number in self.skip_wait)
        self.open[number] = transfer  # holds the memory until somebody waits
        return transfer

    def _note_moved(self) -> None:
        """A transfer that nobody waits for must keep its memory; whoever comes next looks."""
        for transfer in [each for each in self.open.values() if each.moved()]:
            self.errors.append(transfer.moved())
            del self.open[transfer.number]

    def close(self, transfer: Transfer) -> None:
        if transfer.lost:
            return  # the wait was forgotten: still under way
        transfer.waited = True
        if self.open.pop(transfer.number, None) and (problem := transfer.moved()):  # else it is noted already
            self.errors.append(problem)
        transfer.release()

    def problems(self) -> list[str]:
        return self.errors + [problem for each in self.open.values() if (problem := each.moved())]


class CpuStream:
    """Transfers one after the other, each `delay` seconds long, all delivered when somebody waits."""

    def __init__(self, ledger: Ledger, delay: float) -> None:
        self._ledger, self._delay = ledger, delay
        self._queue: list[Transfer] = []
        self._free = 0.0

    @unseen
    def issue(self, transfer: Transfer) -> None:
        poison(transfer.outputs, keep=transfer.inputs)
        self._free = transfer.ready = max(self._free, time.monotonic()) + self._delay
        self._queue.append(transfer)

    def wait(self, transfer: Transfer) -> None:
        if transfer.waited:
            return
        if not transfer.lost:
            time.sleep(max(0.0, transfer.ready - time.monotonic()))
            self._advance(transfer)
        self._ledger.close(transfer)

    def completed(self, transfer: Transfer) -> bool:
        if not transfer.lost and time.monotonic() >= transfer.ready:
            self._advance(transfer)
        return transfer.done

    @unseen
    def _advance(self, last: Transfer) -> None:
        """Deliver up to `last`: the stream is in order, so all before it have ended as well."""
        while not last.done:
            first = self._queue.pop(0)
            first.done = True
            if not first.lost and not first.moved():
                first.deliver()


class CudaStream:
    """A stream of its own: it starts where the issuing stream is, and a wait makes the waiting stream follow."""

    def __init__(self, ledger: Ledger, delay: float) -> None:
        self._ledger = ledger
        self._stream = torch.cuda.Stream()
        self._cycles = int(delay * _clock_rate()) if delay else 0

    @unseen
    def issue(self, transfer: Transfer) -> None:
        # On the issuing stream, so that whatever reads there without a wait is sure to meet the poison.
        poison(transfer.outputs, keep=transfer.inputs)
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            if self._cycles:
                torch.cuda._sleep(self._cycles)
            if not transfer.lost:
                transfer.deliver()
            transfer.event = torch.cuda.Event()
            transfer.event.record()

    def wait(self, transfer: Transfer) -> None:
        if transfer.waited:
            return
        torch.cuda.current_stream().wait_event(transfer.event)
        transfer.done = True
        self._ledger.close(transfer)

    def completed(self, transfer: Transfer) -> bool:
        return transfer.event is not None and transfer.event.query()


def _clock_rate() -> float:
    """Cycles per second of the clock that `torch.cuda._sleep` counts, measured: not every driver says."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    cycles = 20_000_000
    torch.cuda._sleep(cycles)  # the first launch loads the kernel
    start.record()
    torch.cuda._sleep(cycles)
    end.record()
    end.synchronize()
    return cycles / (start.elapsed_time(end) / 1e3)


class LoopbackWork(dist._Work):
    """The handle that the caller of a collective waits on."""

    def __init__(self, stream: CpuStream | CudaStream, transfer: Transfer) -> None:
        super().__init__()
        self._stream, self._transfer = stream, transfer

    @property
    def number(self) -> int:
        return self._transfer.number

    def wait(self, timeout: object = None) -> bool:
        self._stream.wait(self._transfer)
        return True

    def synchronize(self) -> None:
        self.wait()

    def is_completed(self) -> bool:
        return self._stream.completed(self._transfer)

    def is_success(self) -> bool:
        return self.is_completed()

    def result(self) -> list[Tensor]:
        return list(self._transfer.outputs)

    def get_future(self) -> torch.futures.Future[list[Tensor]]:
        """Waits: a future has no moment of its own on this stream."""
        outputs = self.result()
        self.wait()
        future: torch.futures.Future[list[Tensor]] = torch.futures.Future()
        future.set_result(outputs)
        return future
