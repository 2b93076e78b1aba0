"""Hooks that autograd calls during backward.

The backward of a unit begins when a gradient reaches an output of the unit. It ends when the gradients of all inputs of
the unit are computed. `BackwardEnd` is called at the end of the whole backward.
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

    Forward receives an alias of each input. The gradient of the alias contains only this unit's contribution.
    Therefore, the unit's reduction does not wait for other modules that use the same input.
    """
    if not kwargs and len(args) == 1 and isinstance(args[0], torch.Tensor):
        if not args[0].requires_grad:
            return args, kwargs
        watched = alias_of(args[0])
        add_gradient_hook(watched, done)
        return (watched,), kwargs
    return map_tensors(_InputWatch(done).through, (args, kwargs))


class _InputWatch:
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
    """Register hooks that call `begin` when a gradient reaches one of `outputs`, the tensors in `output`.

    Returns the output that forward must return instead of `output`, and a bool. The bool is True if at least one of the
    tensors can receive a gradient.
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
    """Register hooks that call `reached(parameter)` when backward has computed the gradient of a parameter.

    Use this function for a unit whose outputs cannot be watched. Backward may still reach such a unit through a tensor
    that forward stored elsewhere, and then no hook runs at the beginning of the unit's backward. Returns False if none
    of the parameters requires a gradient.
    """
    trained = [each for each in parameters if each.requires_grad]
    for parameter in trained:
        if parameter not in _watched:
            _watched[parameter] = True
            parameter.register_post_accumulate_grad_hook(reached)
    return bool(trained)


def alias_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return an alias of `tensor` with its own graph node.

    Plain tensors use `tensor[...]`, whose backward passes the gradient through unchanged. Tensor subclasses may not
    support this index, so they use `view_as`, whose backward reshapes the gradient.
    """
    return tensor[...] if type(tensor) is torch.Tensor else tensor.view_as(tensor)


class BackwardEnd:
    """The callback that autograd calls at the end of a backward.

    If backward raises an exception, autograd deletes the callback without calling it. The deletion then resets the
    root.
    """

    def __init__(self, root: Any, number: int):
        """`root` is a `Root` object, and `number` is the number that `root` has given to this backward."""
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
