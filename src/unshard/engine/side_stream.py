"""Side streams run copies from and to the host, and reductions, in parallel with the compute stream.

No other module of the engine creates streams. This module also knows if a step is being recorded as a CUDA graph,
because recorded steps use more streams than other steps.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch.accelerator import current_device_index

from ..torch_private import foreach_copy

recording = False
"""True while a step is being recorded as a CUDA graph.

During a recording, host time does not matter, and kernels must not read host memory. A replay would read the same host
memory again, although torch's allocator may have reused it.
"""


@contextmanager
def recording_step() -> Iterator[None]:
    """Set `recording` inside the context, for all units of this process. A device records only one step at a time."""
    global recording
    before, recording = recording, True
    try:
        yield
    finally:
        recording = before


simulated = False
"""True while units on the CPU run as if they were on a device. See `simulating_device`."""


@contextmanager
def simulating_device() -> Iterator[None]:
    """Let units on the CPU queue work, and take and free memory, in the order in which units on a device do.

    Their streams and events do nothing. `tools.plan` uses this on machines without a device.
    """
    global simulated
    before, simulated = simulated, True
    for each in (copy_streams_of, reduce_stream, gather_streams):
        each.cache_clear()
    try:
        yield
    finally:
        simulated = before
        for each in (copy_streams_of, reduce_stream, gather_streams):
            each.cache_clear()


class StreamEvent:
    """A point in a stream that other streams, or the host, can wait for. An event can be recorded repeatedly."""

    def __new__(cls, device: torch.device, timing: bool = False) -> StreamEvent:
        return object.__new__(_SimulatedEvent if simulated else cls)

    def __init__(self, device: torch.device, timing: bool = False):
        """If `timing` is True, `elapsed_since` can measure the time between two such events."""
        self._device = device
        self.event = torch.Event(device, enable_timing=True) if timing else torch.Event(device)

    def record(self) -> StreamEvent:
        """Move the event to the end of the work that is queued on this thread's current stream. Return the event."""
        self.event.record(self._stream())
        return self

    def wait(self) -> None:
        """Make this thread's current stream wait for the event. This method does not block the host."""
        self.event.wait(self._stream())

    def _stream(self) -> torch.Stream | None:
        if current_device_index() == self._device.index:
            return None  # means the current stream, too, and costs less
        return torch.accelerator.current_stream(self._device)

    def synchronize(self) -> None:
        """Block the host until the event has completed."""
        self.event.synchronize()

    def elapsed_since(self, earlier: StreamEvent) -> float:
        """Return the milliseconds between two completed events."""
        return earlier.event.elapsed_time(self.event)


class SideStream:
    """A stream of the device that runs work in the order in which the work was queued, without blocking the host."""

    def __init__(self, device: torch.device):
        self._device = device
        self._stream = torch.Stream(device)
        self._contexts = threading.local()

    def after(self, event: StreamEvent) -> torch.Stream:
        """Return a context manager that queues the work inside the context on this stream, after `event`.

        Memory that is allocated inside the context belongs to this stream. The memory can be freed as soon as its last
        use is queued, because work that reuses the memory is queued on the same stream after that use.
        """
        self._stream.wait_event(event.event)
        return self.inside()

    def inside(self) -> torch.Stream:
        """Return a context manager that queues the work inside the context at the end of this stream."""
        # Each thread has its own context manager, because the object stores the stream to return to.
        try:
            return self._contexts.mine
        except AttributeError:
            one = self._stream
            self._contexts.mine = torch.Stream(
                stream_id=one.stream_id, device_index=one.device_index, device_type=one.device_type
            )
            return self._contexts.mine

    def queue(self, do: Callable[[], object], first: Callable[[], object] | None = None) -> StreamEvent:
        """Queue `do` on this stream, after the work queued on the compute stream. Return an event at the end of `do`.

        If `first` is given, it is queued before `do` and does not wait for the compute stream. Memory that `first` or
        `do` allocates belongs to this stream.
        """
        computed = StreamEvent(self._device).record()
        with self.inside():
            if first is not None:
                first()
            computed.wait()
            do()
            return StreamEvent(self._device).record()

    def copy(self, targets: list[torch.Tensor], sources: list[torch.Tensor]) -> StreamEvent:
        """Copy `sources` to `targets` on this stream, after the work queued on the compute stream.

        Returns an event at the end of the copy.
        """
        return self.queue(lambda: foreach_copy(targets, sources, True))

    def synchronize(self) -> None:
        """Block the host until all work on this stream has completed."""
        self._stream.synchronize()


def is_recording() -> bool:
    """Return True while a step is being recorded as a CUDA graph."""
    return recording


class _SimulatedEvent(StreamEvent):
    def __init__(self, device: torch.device):
        pass

    def record(self) -> StreamEvent:
        return self

    def wait(self) -> None:
        pass

    def synchronize(self) -> None:
        pass


class _SimulatedStream(SideStream):
    def __init__(self, device: torch.device):
        self._device = device

    def after(self, event: StreamEvent) -> Any:
        return nullcontext()

    def inside(self) -> Any:
        return nullcontext()

    def synchronize(self) -> None:
        pass


@dataclass(frozen=True)
class CopyStreams:
    """Two streams for copies, one for each direction. A device can copy in both directions at the same time."""

    up: SideStream
    """Copies from the host to the device."""
    down: SideStream
    """Copies from the device to the host."""

    def synchronize(self) -> None:
        self.up.synchronize()
        self.down.synchronize()


def _stream_on(device: torch.device) -> SideStream | None:
    if simulated:
        return _SimulatedStream(device)
    return None if device.type == "cpu" else SideStream(device)


# All units of a process share these streams. The functions return None for the CPU.


@cache
def copy_streams_of(device: torch.device) -> CopyStreams | None:
    up, down = _stream_on(device), _stream_on(device)
    return None if up is None or down is None else CopyStreams(up, down)


def mps_runs() -> bool:
    """Return True if CUDA's multi-process service runs, so that several processes may share a GPU."""
    return Path(os.environ.get("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps"), "control").exists()


def has_spare_queues() -> bool:
    """Return True if one more stream that waits holds up no other stream.

    Streams share CUDA's work queues, and a stream that waits also holds up the streams in its queue. By default, a
    process has 8 queues, and fewer under the multi-process service. There, one more stream made a step 1.2 times as
    long; with `CUDA_DEVICE_MAX_CONNECTIONS=8` it cost nothing.
    """
    queues = os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS", "")
    return int(queues) >= 8 if queues.isdecimal() else not mps_runs()


@cache
def timing_stream(device: torch.device, purpose: str) -> SideStream:
    """Return a stream on which an observer waits for collectives to record when they end. It runs no kernels."""
    return SideStream(device)


@cache
def reduce_stream(device: torch.device) -> SideStream | None:
    """Return the stream that packs and reduces gradients."""
    return _stream_on(device)


@cache
def gather_streams(device: torch.device) -> tuple[SideStream, SideStream] | None:
    """Return two streams for recorded steps.

    The first stream runs casts and all-gathers. The second stream copies packed parameters into the unsharded buffer.
    """
    gather, copy_out = _stream_on(device), _stream_on(device)
    return None if gather is None or copy_out is None else (gather, copy_out)
