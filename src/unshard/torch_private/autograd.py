"""Autograd's running backward, its hooks and node numbers; function transforms, the compiler and the profiler."""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable
from contextlib import AbstractContextManager
from operator import attrgetter
from typing import Any, TypeVar

import torch

_Function = TypeVar("_Function", bound=Callable[..., Any])

# -- backward and hooks ------------------------------------------------------------------------------------

current_graph_task: Callable[[], int] = torch._C._current_graph_task_id
"""The number of the backward that runs on the calling thread, or -1; there is no public way. All versions."""


def inside_backward() -> bool:
    return current_graph_task() != -1


def queue_backward_callback(callback: Callable[[], None]) -> None:
    """Run `callback` at the end of the running backward. Only valid inside a backward.

    There is no public way to queue a callback. All versions.
    """
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def add_gradient_hook(tensor: torch.Tensor, hook: Callable[[Any], None]) -> None:
    """Call `hook` when the gradient of `tensor` is computed. The hook cannot be removed.

    `tensor` must be new and without hooks. `register_hook` also makes a handle, which takes three times as long as the
    rest, and there are two such hooks per unit and step. All versions.
    """
    node = tensor.grad_fn
    if node is None or tensor._backward_hooks is not None:
        tensor.register_hook(hook)
        return
    hooks: OrderedDict[int, Any] = OrderedDict()  # a user's own `register_hook` adds to this dict
    hooks[0] = hook
    tensor._backward_hooks = hooks
    node._register_hook_dict(tensor)


# Called for every parameter in every step, hence no Python function.
post_accumulate_hooks: Callable[[torch.Tensor], dict[int, Callable[[torch.Tensor], None]] | None]
post_accumulate_hooks = attrgetter("_post_accumulate_grad_hooks")
"""The hooks that users registered with `register_post_accumulate_grad_hook`; no public way to read. All versions."""


def preserve_version_counter(tensor: torch.Tensor) -> AbstractContextManager[Any]:
    """Writes inside do not raise the version counter of `tensor`.

    For writes that restore the values that autograd saved. All versions.
    """
    return torch.autograd._unsafe_preserve_version_counter(tensor)


next_sequence_nr: Callable[[], int] = torch._C._autograd._get_sequence_nr
"""The sequence number that the calling thread gives to the next node of the graph; no public way. All versions.

Of the nodes that are ready, backward runs the one with the highest number first.
"""


def sequence_nr_of(tensor: torch.Tensor) -> int:
    """The sequence number of the node that computed `tensor`. Leaves run before all other nodes. All versions."""
    node = tensor.grad_fn
    return sys.maxsize if node is None else node._sequence_nr()


# -- function transforms, compiler, profiler ---------------------------------------------------------------


def traced_by_make_fx() -> bool:
    """Whether operations are being written to a graph, as `torch.func.linearize` and `torch.export` do.

    There is no public way to tell. All versions.
    """
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY) is not None


_SKIP, _DEFAULT = torch._C._dynamo.eval_frame._FrameAction.SKIP, torch._C._dynamo.eval_frame._FrameAction.DEFAULT


def never_compiled(function: _Function) -> _Function:
    """Exclude `function` and all that it calls from `torch.compile`; returns `function` itself.

    As the outermost Python frame it is skipped without a graph break: a module whose hooks are such functions is
    compiled with `fullgraph=True`. Called from compiled code it is a graph break, with the reason below. The decorator
    `torch.compiler.disable` makes a frame that is traced and breaks in both cases, and imports the compiler, which
    takes seconds. `set_code_exec_strategy` and the attributes are what it sets, too. All versions.
    """
    _skip(function, recursive=True)
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    function._torchdynamo_disable_recursive = True  # type: ignore[attr-defined]
    function._torchdynamo_disable_msg = _REASON  # type: ignore[attr-defined]
    return function


def frame_not_compiled(function: _Function) -> _Function:
    """Exclude the code of `function` from `torch.compile`, and not the functions that it calls. All versions."""
    _skip(function, recursive=False)
    return function


def _skip(function: Callable[..., Any], recursive: bool) -> None:
    strategy = torch._C._dynamo.eval_frame._FrameExecStrategy(_SKIP, _SKIP if recursive else _DEFAULT)
    torch._C._dynamo.eval_frame.set_code_exec_strategy(function.__code__, strategy)


_REASON = (
    "it is a hook of unshard, which all-gathers, reshards or reduces parameters. One graph cannot contain a sharded "
    "module inside another one. Compile each sharded module by itself, or the outer one without fullgraph=True"
)


profiler_enabled: Callable[[], bool] = torch._C._autograd._profiler_enabled
"""Whether a profiler is recording; `record_function` costs time even if none is. All versions."""
