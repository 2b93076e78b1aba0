"""The inputs of a unit's forward: when their gradients are done, the unit's backward is over."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..torch_private import add_gradient_hook, current_graph_task, never_compiled


class InputWatch:
    """Several inputs: calls `done` when the gradients of all of them are done."""

    def __init__(self, done: Callable[[], None]):
        self._done = done
        self._inputs = 0
        self._gradients = 0
        self._backward = -1

    def through(self, tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.requires_grad:
            return tensor
        watched = alias_of(tensor)
        add_gradient_hook(watched, self._one_done)
        self._inputs += 1
        return watched

    @never_compiled
    def _one_done(self, gradients: Any) -> None:
        if self._backward != current_graph_task():  # a retained graph is run through again
            self._backward, self._gradients = current_graph_task(), 0
        self._gradients += 1
        if self._gradients == self._inputs:
            self._done()


def alias_of(tensor: torch.Tensor) -> torch.Tensor:
    """The same tensor with a place of its own in the graph.

    Indexing with nothing makes an alias, whose backward hands the gradient on; that of a view reshapes it. But not
    every subclass of tensors knows it.
    """
    return tensor[...] if type(tensor) is torch.Tensor else tensor.view_as(tensor)
