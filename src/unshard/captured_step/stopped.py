"""Which line of a program stopped a recording."""

from __future__ import annotations

import inspect
import traceback
from pathlib import Path

import torch

_LIBRARIES = (str(Path(torch.__file__).parent), str(Path(__file__).parent.parent))


def frames_to_program() -> int:
    """How many frames the caller of this function is away from the program, for `stacklevel`."""
    frame, count = inspect.currentframe(), 0
    while frame is not None and frame.f_code.co_filename.startswith(_LIBRARIES):
        frame, count = frame.f_back, count + 1
    return count


def described(error: BaseException) -> str:
    """The innermost line of the program that `error` comes from, and what it says."""
    lines = str(error).strip().splitlines()
    said = f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not frame.filename.startswith(_LIBRARIES)]
    if not own:
        return said
    return f"{own[-1].filename}:{own[-1].lineno}, {own[-1].line!r}, cannot be recorded ({said})"
