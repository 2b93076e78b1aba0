"""An exception of a user's module, in forward or in backward."""

from __future__ import annotations

from torch import Tensor, nn


class Boom(Exception):
    pass


def boom(*unused: object) -> None:
    """A forward pre-hook, or a hook on a gradient."""
    raise Boom


def boom_in_backward(module: nn.Module, args: object, output: Tensor) -> None:
    """A forward hook."""
    output.register_hook(boom)
