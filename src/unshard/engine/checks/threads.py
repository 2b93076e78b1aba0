"""One model used by two threads at once."""

from __future__ import annotations

import sys
from typing import Any

from torch import nn

from ...errors import ThreadError
from ...torch_private import RUN_BACKWARD, frames
from ..unit import STATE_KEY, Unit


def refuse_two_threads(unit: Unit, thread: int, forward_only: bool = False) -> None:
    """Raise if `thread` is in the forward of `unit`, the root's, or in a backward.

    A forward that was left by an interrupt also looks as if it were still running. The stack of the thread tells them
    apart. `forward_only`: a backward that runs inside the forward is the one that asks.
    """
    for frame in frames(sys._current_frames().get(thread)):
        if frame.f_code is RUN_BACKWARD:
            if forward_only:
                return
            refuse_thread(unit)
        if _is_call_of(frame.f_locals.get("self"), unit):
            refuse_thread(unit)


def refuse_thread(unit: Unit) -> None:
    raise ThreadError(
        f"Another thread is in a forward or backward of the model of {unit}. Its units are unsharded and resharded by "
        "one thread at a time: let one thread run the model, or put a lock around forward, backward and the "
        "optimizer's step. Copies of the model (copy.deepcopy) in several threads are no way out either: the order of "
        "their collectives must be the same on all ranks."
    )


def _is_call_of(module: Any, unit: Unit) -> bool:
    return isinstance(module, nn.Module) and getattr(module.__dict__.get(STATE_KEY), "unit", None) is unit
