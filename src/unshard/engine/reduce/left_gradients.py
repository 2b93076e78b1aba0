"""What a step leaves of gradients for the next one, as the host knows it.

A replayed step leaves what its recording did. It runs no Python, so nothing tells the host that gradients are there;
their memory has to stay where it was when the step was recorded.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..states import GradState

Attached = tuple[int, int, tuple[int, ...]]
"""A sharded gradient: its number, where it lies, and which of its grads are `.grad` of their parameters."""


@dataclass(frozen=True)
class LeftGradients:
    """Of one param group. Equal ones are the same gradients, in the same memory."""

    state: GradState
    """LOCAL, PARTIAL, or REDUCED if nothing is left to reduce."""
    unreduced: tuple[int, tuple[int, ...]]
    """Where sums that no collective has seen lie, and of which parameters."""
    partial: tuple[tuple[int, tuple[tuple[int, ...], bool]], ...]
    """Where sums that still wait for their all-reduce lie, and of which parameters."""
    attached: tuple[Attached, ...]
    others: tuple[int, ...]
    """Parameters whose `.grad` a program has set, by their ids."""
    shown: bool
    """Whether unreduced sums are shown as `.grad`."""

    @property
    def nothing(self) -> bool:
        return self == NOTHING_LEFT

    @property
    def repeatable(self) -> bool:
        """Whether a replay can leave them."""
        return not self.others and not self.shown


NOTHING_LEFT = LeftGradients(GradState.REDUCED, (0, ()), (), (), (), False)
