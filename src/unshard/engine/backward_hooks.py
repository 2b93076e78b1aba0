"""Hooks that autograd calls: when the backward of a unit begins and ends, and at the end of the whole backward.

The backward of a unit begins when a gradient reaches an output, and ends when the gradients of all inputs are computed.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from ..torch_private import (
    add_gradient_hook,
    base_of,
    current_graph_task,
    inside_backward,
    never_compiled,
    next_sequence_nr,
    sequence_nr_of,
)
from .forward_tensors import map_tensors

Hook = Callable[..., None]

_watched = WeakTensorKeyDictionary()  # unsharded parameters that have the hook


def watch_inputs(args: tuple[Any, ...], kwargs: dict[str, Any], done: Hook) -> tuple[Any, Any]:
    """Return the inputs for forward, with hooks that call `done` when the gradients of all inputs are computed.

    Forward gets an alias of each input. The graph node of the alias sees only this unit's share of the gradient, so
    other modules that use the input do not delay the reduction.
    """
    if not kwargs and len(args) == 1 and isinstance(args[0], torch.Tensor):
        if not args[0].requires_grad:
            return args, kwargs
        watched = alias_of(args[0])
        add_gradient_hook(watched, done)
        return (watched,), kwargs
    return map_tensors(_InputWatch(done).through, (args, kwargs))


class _InputWatch:
    """Calls `done` when the gradients of all of several inputs are computed."""

    def __init__(self, done: Hook):
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
        if self._backward != current_graph_task():  # another backward through a retained graph
            self._backward, self._gradients = current_graph_task(), 0
        self._gradients += 1
        if self._gradients == self._inputs:
            self._done()


def watch_outputs(output: Any, outputs: Sequence[torch.Tensor], begin: Hook) -> tuple[Any, bool]:
    """Call `begin` when a gradient reaches one of `outputs`, the tensors in `output`.

    Return the output that forward must return instead of `output`, and True if a gradient can reach any tensor in it.
    """
    last = -1
    for tensor in outputs:
        if tensor.requires_grad:
            add_gradient_hook(tensor, begin)
            last = max(last, sequence_nr_of(tensor))
            base = base_of(tensor)
            if base is not None and base.grad_fn is not None:
                # A view that is overwritten in place gets another graph node, and its hook never fires. The node that
                # made its base stays.
                base.grad_fn.register_prehook(begin)
    if -1 < last < next_sequence_nr() - 1:
        # Autograd runs later nodes first, so nodes that forward made after the outputs would run before the hook. The
        # node of an alias that is made now is later still.

        def alias_with_hook(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.requires_grad:
                tensor = alias_of(tensor)
                add_gradient_hook(tensor, begin)
            return tensor

        output = map_tensors(alias_with_hook, output)
    return output, last > -1


def watch_parameters(parameters: Iterable[torch.Tensor], reached: Hook) -> bool:
    """Call `reached(parameter)` when backward has computed a gradient. Return False if no parameter requires one.

    For a unit without outputs to watch: backward may still reach the unit through a tensor that forward stored
    elsewhere, and no hook runs when that backward begins.
    """
    trained = [each for each in parameters if each.requires_grad]
    for parameter in trained:
        if parameter not in _watched:
            _watched[parameter] = True
            parameter.register_post_accumulate_grad_hook(reached)
    return bool(trained)


def alias_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return an alias of `tensor` with its own graph node.

    Prefers `tensor[...]`, whose backward passes the gradient through; the backward of `view_as` reshapes it. Not every
    tensor subclass supports such indexing.
    """
    return tensor[...] if type(tensor) is torch.Tensor else tensor.view_as(tensor)


class BackwardEnd:
    """A callback for the end of a backward. If backward raises, autograd drops the callback, which resets the root."""

    def __init__(self, root: Any, number: int):
        """`root`: a `Root`. `number`: the number of this backward, as `root` counts."""
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
        # A nested backward may be dropped while the outer one still unwinds; then `Root.recover` resets.
        if not self._called and root is not None and not inside_backward():
            # The user gets the exception that left the backward. If the reset fails too, because another rank is gone,
            # a second traceback would not help. The next forward tries again.
            with suppress(Exception):
                root.drop_backward(self._number)
