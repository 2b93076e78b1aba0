"""The backward that is running, and hooks that autograd calls."""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable
from contextlib import AbstractContextManager
from operator import attrgetter
from typing import Any

import torch

post_accumulate_hooks: Callable[[torch.Tensor], dict[int, Callable[[torch.Tensor], None]] | None]
post_accumulate_hooks = attrgetter("_post_accumulate_grad_hooks")
"""What users registered with `register_post_accumulate_grad_hook`, which autograd calls itself. All versions."""


def keep_version(tensor: torch.Tensor) -> AbstractContextManager[Any]:
    """Writes in here do not look to autograd like a change of `tensor`: its saved values come back. All versions."""
    return torch.autograd._unsafe_preserve_version_counter(tensor)


current_backward: Callable[[], int] = torch._C._current_graph_task_id
"""The number of the backward the calling thread is running inside, or -1. All versions."""


def inside_backward() -> bool:
    return current_backward() != -1


def on_backward_end(callback: Callable[[], None]) -> None:
    """Run `callback` when the running backward is over; only valid inside one. All versions."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def watch_gradient(tensor: torch.Tensor, hook: Callable[[Any], None]) -> None:
    """Call `hook` when a gradient reaches `tensor`, which was just made and has no hooks yet; for good.

    What `register_hook` does without a handle to remove the hook with, which costs three times as much as the rest: two
    of these are set per unit and step. All versions.
    """
    node = tensor.grad_fn
    if node is None or tensor._backward_hooks is not None:
        tensor.register_hook(hook)
        return
    hooks: OrderedDict[int, Any] = OrderedDict()  # a user's own `register_hook` adds to it
    hooks[0] = hook
    tensor._backward_hooks = hooks
    node._register_hook_dict(tensor)


next_node: Callable[[], int] = torch._C._autograd._get_sequence_nr
"""The number that the next node of the graph will have. Backward runs what is ready by number, highest first.

A thread counts for itself. All versions.
"""


def node_number(tensor: torch.Tensor) -> int:
    """That of the node which computed `tensor`. Leaves come before all others. All versions."""
    node = tensor.grad_fn
    return sys.maxsize if node is None else node._sequence_nr()
