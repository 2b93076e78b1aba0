"""Which line of a program stopped a recording."""

from __future__ import annotations

import traceback

from ..torch_private import LIBRARY_FILES


def described(error: BaseException) -> str:
    """The innermost line of the program that `error` comes from, and what it says."""
    lines = str(error).strip().splitlines()
    said = f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not frame.filename.startswith(LIBRARY_FILES)]
    if not own:
        return said
    return f"{own[-1].filename}:{own[-1].lineno}, {own[-1].line!r}, cannot be recorded ({said})"
