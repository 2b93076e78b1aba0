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
        """A forward begins."""


_listeners: weakref.WeakSet[Listener] = weakref.WeakSet()


def listen(listener: Listener) -> None:
    """For as long as it lives."""
    _listeners.add(listener)


def listeners() -> list[Listener]:
    return list(_listeners) if _listeners else []
