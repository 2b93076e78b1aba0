"""Tells whoever wants to know that a unit's gradients are on their way to the host, and complete."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Protocol

from .grad_shard import GradShard


class Listener(Protocol):
    def arrived(self, shards: Sequence[GradShard]) -> None:
        """These gradients are `.grad` now, and this backward adds nothing to them; `GradShard.arrive` waits for them.

        Called inside backward, in whatever thread that runs.
        """

    def settle(self) -> None:
        """Somebody is about to look at parameters."""


REFS: dict[int, weakref.ref[Listener]] = {}
"""Usually empty, which every unit asks in every step."""


def listen(listener: Listener) -> None:
    """For as long as it lives."""
    key = id(listener)
    REFS[key] = weakref.ref(listener, lambda _: REFS.pop(key, None))


def settle() -> None:
    """To be called before parameters are looked at outside a backward."""
    for listener in listeners():
        listener.settle()


def unlisten(listener: Listener) -> None:
    REFS.pop(id(listener), None)


def listeners() -> list[Listener]:
    return [listener for ref in list(REFS.values()) if (listener := ref()) is not None]
