"""Lanes: queues beside the computation's own, in which a device copies from and to the host."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from ..torch_private import foreach_copy


class Mark:
    """A place in a lane, and whoever wants to be behind it."""

    def __init__(self, event: Any, device: torch.device):
        self._event, self._device = event, device

    def wait(self) -> None:
        """What is computed from now on comes after it; the host goes on."""
        _computation(self._device).wait_event(self._event)

    def synchronize(self) -> None:
        """The host waits for it."""
        self._event.synchronize()


class Lane:
    """A stream of the device. What is queued runs in order; the host does not wait."""

    def __init__(self, device: torch.device):
        self._device, self._module = device, torch.get_device_module(device)
        self._stream = self._module.Stream(device)

    def queue(self, do: Callable[[], object], first: Callable[[], object] | None = None) -> Mark:
        """Run `do` after all that the computation has queued so far, and before that, at any time, `first`.

        Memory that they allocate, and give back, is the lane's own.
        """
        computed = _computation(self._device).record_event()
        with self._module.stream(self._stream):
            if first is not None:
                first()
            self._stream.wait_event(computed)
            do()
            return Mark(self._stream.record_event(), self._device)

    def carry(self, targets: list[torch.Tensor], sources: list[torch.Tensor]) -> Mark:
        """Copy what the computation has made to where it is wanted."""
        return self.queue(lambda: foreach_copy(targets, sources, True))

    def synchronize(self) -> None:
        """The host waits for everything in the lane."""
        self._stream.synchronize()


def _computation(device: torch.device) -> Any:
    """The stream in which the program computes now."""
    return torch.get_device_module(device).current_stream(device)


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
