"""Torch's functions for checkpoints, seen from an object that they ask."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from types import FrameType
from typing import Any

CHECKPOINT = "torch.distributed.checkpoint"
HELPERS = f"{CHECKPOINT}.state_dict"
_AROUND_OPTIMIZERS = ("unshard.", "torch.optim.", "torch._compile", "torch._dynamo.")


@dataclass(frozen=True)
class HelperCall:
    """A call of one of the helpers in `torch.distributed.checkpoint.state_dict`, and its arguments."""

    name: str
    optimizers: tuple[Any, ...]
    full_state_dict: bool
    knows_wrapper: bool
    """Whether it asks for our wrapper's class: only where the drop-in has put that into its module."""


def helper_call() -> HelperCall | None:
    """The call of a helper that asks the object whose method calls this, if there is one.

    The helpers know PyTorch's own FSDP1 by its class, and ask every module for `_fqn_modifiers` before they touch
    anything. They do not say which of them asks and for which optimizers; the arguments on the stack do. Versions 2.5
    and later.
    """
    frame, outermost = _first_outside(("unshard.",)), None
    while frame is not None and _module(frame) == HELPERS:
        outermost, frame = frame, frame.f_back
    if outermost is None:
        return None
    arguments = outermost.f_locals
    optimizers = arguments.get("optimizers") or ()
    return HelperCall(
        outermost.f_code.co_name,
        optimizers if isinstance(optimizers, tuple) else (optimizers,),
        bool(getattr(arguments.get("options"), "full_state_dict", False)),
        _knows_wrapper(outermost),
    )


def caller_in_checkpoint() -> str | None:
    """The function of `torch.distributed.checkpoint` that calls the method of an optimizer whose hook calls this.

    None if that is somebody else, or a helper that knows our wrapper. All versions.
    """
    frame = _first_outside(_AROUND_OPTIMIZERS)
    if frame is None or not f"{_module(frame)}.".startswith(f"{CHECKPOINT}.") or _knows_wrapper(frame):
        return None
    return f"{_module(frame)}.{frame.f_code.co_name}"


def _first_outside(modules: tuple[str, ...]) -> FrameType | None:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and f"{_module(frame)}.".startswith(modules):
        frame = frame.f_back
    return frame


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))


def _knows_wrapper(frame: FrameType) -> bool:
    values = list(frame.f_globals.values())
    return any(isinstance(each, type) and each.__module__.startswith("unshard.") for each in values)
