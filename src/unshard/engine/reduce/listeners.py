"""Listeners for complete gradients: optimizers that step a unit during backward."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Protocol

from .sharded_grad import ShardedGrad


class Listener(Protocol):
    def gradients_ready(self, grads: Sequence[ShardedGrad]) -> None:
        """These gradients are `.grad` now, and this backward adds nothing to them.

        Their copy to the host may be in flight: `ShardedGrad.wait_for_copy`. Called inside backward, in its thread.
        """

    def finish_steps(self) -> None:
        """A program is about to look at parameters."""


LISTENERS: dict[int, weakref.ref[Listener]] = {}
"""Usually empty, which every unit asks in every step."""


def listen(listener: Listener) -> None:
    """For as long as it lives."""
    key = id(listener)
    LISTENERS[key] = weakref.ref(listener, lambda _: LISTENERS.pop(key, None))


def unlisten(listener: Listener) -> None:
    LISTENERS.pop(id(listener), None)


def listeners() -> list[Listener]:
    return [listener for ref in list(LISTENERS.values()) if (listener := ref()) is not None]


def finish_steps() -> None:
    """To be called before parameters are looked at outside a backward."""
    for listener in listeners():
        listener.finish_steps()
