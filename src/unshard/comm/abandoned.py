"""Collectives that will never complete, and what they may still read and write."""

from __future__ import annotations

import ctypes


def abandon(*things: object) -> None:
    """Never free these, not even when the interpreter ends.

    An abandoned collective may go on at any time, so its memory has to stay. And a process group is not destroyed
    before its collectives are done: `destroy_process_group`, or the end of the program, would wait for it (seen with
    Gloo, torch 2.11 and 2.13). A list in a module would be emptied at the end of the program, hence a reference that
    nobody holds.
    """
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(things))
