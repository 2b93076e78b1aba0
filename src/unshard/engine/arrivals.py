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


REFS: dict[int, weakref.ref[Listener]] = {}
"""Usually empty, which every unit asks in every step."""


def listen(listener: Listener) -> None:
    """For as long as it lives."""
    key = id(listener)
    REFS[key] = weakref.ref(listener, lambda _: REFS.pop(key, None))


def listeners() -> list[Listener]:
    return [listener for ref in list(REFS.values()) if (listener := ref()) is not None]
