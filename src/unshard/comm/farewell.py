"""The last moment of a program, in which the threads of its process groups put down what they hold."""

from __future__ import annotations

import atexit
import sys
import time
from functools import cache

MOMENT = 0.05  # seconds


@cache
def expect_end() -> None:
    """Let Gloo's threads finish before the interpreter ends. Calling it once is enough.

    A thread that has carried out a collective frees its tensors a little later, for which it needs the interpreter; if
    that is ending by then, Python up to 3.13 ends the thread, and C++ answers by ending the process: "terminate called
    without an active exception". `destroy_process_group` would wait for the thread, but since torch 2.13 a device mesh
    keeps its groups alive beyond that. Seen in 7 of 50 ends of a program of 15 lines without this library: a mesh,
    `all_gather_object`, `destroy_process_group`. In none of 160 with a moment in which the interpreter is free.
    """
    if sys.version_info < (3, 14):
        atexit.register(time.sleep, MOMENT)
