"""Side streams: streams other than the compute stream, for copies from and to the host and for reductions.

No other file of the engine creates streams. This one also knows whether a step is being recorded as a CUDA graph,
because recorded steps use more streams.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache

import torch
from torch.accelerator import current_device_index

from ..torch_private import foreach_copy

recording = False
"""True while a step is being recorded as a CUDA graph.

Host time does not matter then. Kernels must not read host memory: a replay would read it again, after torch's allocator
may have reused it.
"""


@contextmanager
def recording_step() -> Iterator[None]:
    """Set `recording` for all units of this process, because a device records one step at a time."""
    global recording
    before, recording = recording, True
    try:
        yield
    finally:
        recording = before


class StreamEvent:
    """A point in a stream that other streams, or the host, wait for. It can be recorded again."""

    def __init__(self, device: torch.device):
        self._device = device
        self.event = torch.Event(device)

    def record(self) -> StreamEvent:
        """Mark the end of what this thread has queued so far on its current stream (compute or side stream)."""
        self.event.record(self._stream())
        return self

    def wait(self) -> None:
        """Let the current stream of this thread wait for the event. The host does not wait."""
        self.event.wait(self._stream())

    def _stream(self) -> torch.Stream | None:
        """Return this thread's current stream on the device, or None, which means the same and costs less."""
        if current_device_index() == self._device.index:
            return None
        return torch.accelerator.current_stream(self._device)

    def synchronize(self) -> None:
        """Let the host wait for the event."""
        self.event.synchronize()


class SideStream:
    """A stream of the device. Work runs in the order in which it is queued; the host does not wait."""

    def __init__(self, device: torch.device):
        self._device = device
        self._stream = torch.Stream(device)
        self._contexts = threading.local()

    def after(self, event: StreamEvent) -> torch.Stream:
        """Return a context whose work is queued on this stream, after `event`.

        Memory that is allocated inside belongs to this stream. It can be freed as soon as its last use is queued: the
        next owner of the memory is queued on the same stream, so after that use.
        """
        self._stream.wait_event(event.event)
        return self._context()

    def _context(self) -> torch.Stream:
        """Return the stream as a context manager. Each thread has its own, which remembers the stream to return to."""
        try:
            return self._contexts.mine
        except AttributeError:
            one = self._stream
            self._contexts.mine = torch.Stream(
                stream_id=one.stream_id, device_index=one.device_index, device_type=one.device_type
            )
            return self._contexts.mine

    def queue(self, do: Callable[[], object], first: Callable[[], object] | None = None) -> StreamEvent:
        """Queue `do` here, after everything on the compute stream so far; return an event at the end of `do`.

        `first` is queued before `do` and does not wait for the compute stream. Memory that either of them allocates
        belongs to this stream.
        """
        computed = StreamEvent(self._device).record()
        with self._context():
            if first is not None:
                first()
            computed.wait()
            do()
            return StreamEvent(self._device).record()

    def copy(self, targets: list[torch.Tensor], sources: list[torch.Tensor]) -> StreamEvent:
        """Copy `sources` to `targets` on this stream, after the compute stream; return an event at the end."""
        return self.queue(lambda: foreach_copy(targets, sources, True))

    def synchronize(self) -> None:
        """Let the host wait for everything on this stream."""
        self._stream.synchronize()


@dataclass(frozen=True)
class CopyStreams:
    """Two streams, one per direction, because a device can copy in both directions at once."""

    up: SideStream
    """From the host."""
    down: SideStream
    """To the host."""

    def synchronize(self) -> None:
        self.up.synchronize()
        self.down.synchronize()


# All units of a process share these streams. The functions return None for the CPU.


@cache
def copy_streams_of(device: torch.device) -> CopyStreams | None:
    return None if device.type == "cpu" else CopyStreams(SideStream(device), SideStream(device))


@cache
def reduce_stream(device: torch.device) -> SideStream | None:
    """Return the stream on which gradients are packed and reduced."""
    return None if device.type == "cpu" else SideStream(device)


@cache
def gather_streams(device: torch.device) -> tuple[SideStream, SideStream] | None:
    """Return two streams for recorded steps: one for casts and all-gathers, one to copy packed parameters out."""
    return None if device.type == "cpu" else (SideStream(device), SideStream(device))
