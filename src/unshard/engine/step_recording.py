"""Whether a step is being recorded as a CUDA graph.

Then host time does not matter, and kernels should not read from host memory: a replay reads it again, and what it holds
then is up to torch's allocator.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

active = False


@contextmanager
def recording_step() -> Iterator[None]:
    """For all units of this process: a device records one step at a time."""
    global active
    before, active = active, True
    try:
        yield
    finally:
        active = before
