"""Code on the stack: the line of the user's program, and the functions of torch that call us."""

from __future__ import annotations

import os
import pickle
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import dropwhile
from types import FrameType
from typing import Any

import torch
from torch import nn

# -- the user's program ------------------------------------------------------------------------------------

LIBRARY_FILES = (
    os.path.dirname(torch.__file__) + os.sep,
    os.path.dirname(os.path.dirname(__file__)) + os.sep,
    pickle.__file__,
)
"""Prefixes of the files of torch, of this package, and of `pickle`, which calls both."""


def frames(first: FrameType | None) -> Iterator[FrameType]:
    """`first` and the frames that called it, innermost first."""
    while first is not None:
        yield first
        first = first.f_back


def stack_level_of_program() -> int:
    """The `stacklevel` with which a warning of the calling function names the user's program."""
    for level, frame in enumerate(frames(sys._getframe())):  # level 0 is this function
        if not frame.f_code.co_filename.startswith(LIBRARY_FILES):
            return level
    return level + 1


def line_of_program(thread: int) -> str:
    """File, line and function that a thread is at in the user's program; empty if it is not in any."""
    for frame in frames(sys._current_frames().get(thread)):
        if not frame.f_code.co_filename.startswith(LIBRARY_FILES):
            return f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"
    return ""


# -- backward, modules and optimizers ----------------------------------------------------------------------

RUN_BACKWARD = torch.autograd.graph._engine_run_backward.__code__
"""The code of the function that every backward runs in. There is no public way to find a backward. All versions."""
_FUNCTIONAL_CALL = nn.utils.stateless._functional_call.__code__


def any_thread_in_backward() -> bool:
    """Return True if any thread is inside a backward that it started. No public way. All versions."""
    return any(frame.f_code is RUN_BACKWARD for first in [*sys._current_frames().values()] for frame in frames(first))


def runs_split_backward(thread: int) -> bool:
    """Return True in a backward for inputs only, of a pipeline schedule that splits backward in two.

    Hooks of CUDA tensors run in autograd's threads. So if the calling thread did not start the backward, this looks at
    `thread`. There is no public way. All versions.
    """
    pipelining = sys.modules.get("torch.distributed.pipelining._backward")
    if pipelining is None:
        return False
    split = pipelining.stage_backward_input.__code__
    for first in (sys._getframe(1), sys._current_frames().get(thread)):
        codes = [frame.f_code for frame in frames(first)]
        if RUN_BACKWARD in codes:
            return split in codes[codes.index(RUN_BACKWARD) :]
    return False


def inside_functional_call() -> bool:
    """Return True if the calling thread is inside `torch.func.functional_call`. No public way. All versions."""
    return any(frame.f_code is _FUNCTIONAL_CALL for frame in frames(sys._getframe(1)))


def calls_on_stack(modules: list[nn.Module]) -> int:
    """How many calls of `modules` the calling thread is in, except compiled ones.

    Hooks cannot count the calls: torch runs none when a KeyboardInterrupt leaves a module. All versions.
    """
    call = nn.Module._call_impl.__code__
    return sum(frame.f_code is call and frame.f_locals["self"] in modules for frame in frames(sys._getframe(1)))


def stepped_by_plain_scaler() -> bool:
    """Return True if torch's own `GradScaler` calls the optimizer's step whose hook calls this.

    False for a subclass that unscales in its own way. The names of the methods are private. All versions.
    """
    plain: Any = torch.amp.GradScaler
    codes = (plain.step.__code__, plain._maybe_opt_step.__code__)
    for depth, frame in enumerate(frames(sys._getframe(1))):
        if depth == 12:
            break
        if frame.f_code in codes:
            scaler = type(frame.f_locals.get("self", None))
            methods = ("unscale_", "_unscale_grads_")
            return all(getattr(scaler, name, None) is getattr(plain, name) for name in methods)
    return False


# -- torch.distributed.checkpoint --------------------------------------------------------------------------

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
    """The helper asks for our wrapper's class: true only if the drop-in has put that into the helper's module."""


def helper_call() -> HelperCall | None:
    """The helper that calls the method which calls this function; None if no helper does.

    The helpers recognise PyTorch's FSDP1 by its class, and ask every module for `_fqn_modifiers` before they change
    anything. Only the arguments on the stack tell which helper asks, and for which optimizers. Versions 2.5 and later.
    """
    outermost = None
    for frame in _outside(("unshard.",)):
        if _module(frame) != HELPERS:
            break
        outermost = frame
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
    """The function of `torch.distributed.checkpoint` that calls the optimizer's method whose hook calls this.

    None if another function calls it, or a helper that knows our wrapper. All versions.
    """
    frame = next(_outside(_AROUND_OPTIMIZERS), None)
    if frame is None or not f"{_module(frame)}.".startswith(f"{CHECKPOINT}.") or _knows_wrapper(frame):
        return None
    return f"{_module(frame)}.{frame.f_code.co_name}"


def _outside(modules: tuple[str, ...]) -> Iterator[FrameType]:
    """The frames of the calling thread, from the innermost one that is not in `modules`."""
    return dropwhile(lambda frame: f"{_module(frame)}.".startswith(modules), frames(sys._getframe(1)))


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))


def _knows_wrapper(frame: FrameType) -> bool:
    values = list(frame.f_globals.values())
    return any(isinstance(each, type) and each.__module__.startswith("unshard.") for each in values)
