"""The end of a backward, reached or not."""

from __future__ import annotations

import weakref
from contextlib import suppress
from typing import TYPE_CHECKING

from ..torch_private import inside_backward, never_compiled

if TYPE_CHECKING:
    from .root import Root


class BackwardEnd:
    """Called at the end of a backward; deleted without a call if the backward raised."""

    def __init__(self, root: Root, number: int):
        self._root, self._number = weakref.ref(root), number
        self._called = False

    @never_compiled
    def __call__(self) -> None:
        self._called = True
        root = self._root()
        if root is not None:
            try:
                root.end_backward()
            except BaseException as error:
                root.fail_backward(error)
                raise

    def __del__(self) -> None:
        root = self._root()
        # A backward inside another one may be dropped while the outer one still unwinds: see `recover`.
        if not self._called and root is not None and not inside_backward():
            # The exception that left the backward reaches the user. If the reset fails too, because another rank is
            # gone, a second traceback helps nobody; the next forward tries again.
            with suppress(Exception):
                root.drop_backward(self._number)
