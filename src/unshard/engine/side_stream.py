"""Side streams: queues of the device beside the compute stream, for copies from and to the host and for reductions.

The only file that creates streams.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
from torch.accelerator import current_device_index

from ..torch_private import foreach_copy


class StreamEvent:
    """A point in a stream that others wait for. It can be recorded again."""

    def __init__(self, device: torch.device):
        self._device = device
        self.event = torch.Event(device)

    def record(self) -> StreamEvent:
        """Behind all that this thread has queued so far on its current stream: the compute stream, or a side stream."""
        self.event.record(self._stream())
        return self

    def wait(self) -> None:
        """What this thread queues from now on comes after it; the host goes on."""
        self.event.wait(self._stream())

    def _stream(self) -> torch.Stream | None:
        """Where this thread queues on the device; None, which events take for the same, costs less."""
        if current_device_index() == self._device.index:
            return None
        return torch.accelerator.current_stream(self._device)

    def synchronize(self) -> None:
        """The host waits for it."""
        self.event.synchronize()


class SideStream:
    """A stream of the device. What is queued runs in order; the host does not wait."""

    def __init__(self, device: torch.device):
        self._device = device
        self._stream = torch.Stream(device)
        self._contexts = threading.local()

    def after(self, event: StreamEvent) -> torch.Stream:
        """A block whose work is queued here, after `event`.

        Memory that is allocated in it belongs to this stream: it can be freed as soon as its last use is queued, and
        whatever has it next on this stream comes after that.
        """
        self._stream.wait_event(event.event)
        return self._context()

    def _context(self) -> torch.Stream:
        """To be entered: a stream object remembers where it was entered from, so each thread has one."""
        try:
            return self._contexts.mine
        except AttributeError:
            one = self._stream
            self._contexts.mine = torch.Stream(
                stream_id=one.stream_id, device_index=one.device_index, device_type=one.device_type
            )
            return self._contexts.mine

    def queue(self, do: Callable[[], object], first: Callable[[], object] | None = None) -> StreamEvent:
        """Run `do` after all that the compute stream has queued so far, and before that, at any time, `first`.

        Memory that they allocate and free belongs to this stream.
        """
        computed = StreamEvent(self._device).record()
        with self._context():
            if first is not None:
                first()
            computed.wait()
            do()
            return StreamEvent(self._device).record()

    def copy(self, targets: list[torch.Tensor], sources: list[torch.Tensor]) -> StreamEvent:
        """Copy what the compute stream has made so far."""
        return self.queue(lambda: foreach_copy(targets, sources, True))

    def synchronize(self) -> None:
        """The host waits for everything on this stream."""
        self._stream.synchronize()


@dataclass(frozen=True)
class CopyStreams:
    """One each way: a device copies in both directions at once."""

    up: SideStream
    """From the host."""
    down: SideStream
    """To the host."""

    def synchronize(self) -> None:
        self.up.synchronize()
        self.down.synchronize()


@cache
def copy_streams_of(device: torch.device) -> CopyStreams | None:
    """The same for all units: their copies share one bus. None where the host computes."""
    return None if device.type == "cpu" else CopyStreams(SideStream(device), SideStream(device))


@cache
def reduce_stream(device: torch.device) -> SideStream | None:
    """Where gradients are packed and reduced, the same for all units. None where the host computes."""
    return None if device.type == "cpu" else SideStream(device)


@dataclass(frozen=True)
class GatherStreams:
    """Of recorded steps, the same for all units. Two: the next unit is gathered while this one is copied out."""

    gather: SideStream
    """Casts, and issues all-gathers."""
    copy_out: SideStream
    """Copies packed parameters to their places."""


@cache
def gather_streams(device: torch.device) -> GatherStreams | None:
    """None where the host computes."""
    return None if device.type == "cpu" else GatherStreams(SideStream(device), SideStream(device))
