"""Lanes: queues beside the computation's own, for copies from and to the host and for reductions."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
from torch.accelerator import current_device_index

from ..torch_private import foreach_copy


class Mark:
    """A place in a queue, and whoever wants to be behind it. It can be put somewhere else later."""

    def __init__(self, device: torch.device):
        self._device = device
        self.event = torch.Event(device)

    def put(self) -> Mark:
        """Here, behind all that this thread has queued so far where it queues now: the computation, or a lane."""
        self.event.record(self._stream())
        return self

    def wait(self) -> None:
        """What is queued from now on comes after it; the host goes on."""
        self.event.wait(self._stream())

    def _stream(self) -> torch.Stream | None:
        """Where this thread queues on the device; None, which events take for the same, costs less."""
        if current_device_index() == self._device.index:
            return None
        return torch.accelerator.current_stream(self._device)

    def synchronize(self) -> None:
        """The host waits for it."""
        self.event.synchronize()


class Lane:
    """A stream of the device. What is queued runs in order; the host does not wait."""

    def __init__(self, device: torch.device):
        self._device = device
        self._stream = torch.Stream(device)
        self._doors = threading.local()

    def after(self, mark: Mark) -> torch.Stream:
        """A block whose work is queued here, after `mark`.

        Memory that is allocated in it is the lane's own: it can be given back as soon as its last use is queued, and
        whatever has it next in this lane comes after that.
        """
        self._stream.wait_event(mark.event)
        return self._door()

    def _door(self) -> torch.Stream:
        """To be entered: a stream object remembers where it was entered from, so each thread has one."""
        try:
            return self._doors.mine
        except AttributeError:
            one = self._stream
            self._doors.mine = torch.Stream(
                stream_id=one.stream_id, device_index=one.device_index, device_type=one.device_type
            )
            return self._doors.mine

    def queue(self, do: Callable[[], object], first: Callable[[], object] | None = None) -> Mark:
        """Run `do` after all that the computation has queued so far, and before that, at any time, `first`.

        Memory that they allocate, and give back, is the lane's own.
        """
        computed = Mark(self._device).put()
        with self._door():
            if first is not None:
                first()
            computed.wait()
            do()
            return Mark(self._device).put()

    def carry(self, targets: list[torch.Tensor], sources: list[torch.Tensor]) -> Mark:
        """Copy what the computation has made to where it is wanted."""
        return self.queue(lambda: foreach_copy(targets, sources, True))

    def synchronize(self) -> None:
        """The host waits for everything in the lane."""
        self._stream.synchronize()


@dataclass(frozen=True)
class Lanes:
    """One each way: a device copies in both directions at once."""

    up: Lane
    """From the host."""
    down: Lane
    """To the host."""

    def synchronize(self) -> None:
        self.up.synchronize()
        self.down.synchronize()


@cache
def lanes_of(device: torch.device) -> Lanes | None:
    """The same for all units: what they copy shares one wire. None where the host computes."""
    return None if device.type == "cpu" else Lanes(Lane(device), Lane(device))


@cache
def reduce_lane(device: torch.device) -> Lane | None:
    """Where gradients are packed and reduced, the same for all units. None where the host computes."""
    return None if device.type == "cpu" else Lane(device)
