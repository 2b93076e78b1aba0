"""Where in a user's program a warning belongs."""

from __future__ import annotations

import inspect
import os
import pickle

import torch

_INSIDE = (
    os.path.dirname(torch.__file__),
    os.path.dirname(os.path.dirname(os.path.dirname(__file__))),
    pickle.__file__,
)


def stack_level_of_program() -> int:
    """The `stacklevel`, for a warning of the calling function, of the first frame outside torch and this package."""
    level, frame = 0, inspect.currentframe()
    while frame is not None and frame.f_code.co_filename.startswith(_INSIDE):
        level, frame = level + 1, frame.f_back
    return level
