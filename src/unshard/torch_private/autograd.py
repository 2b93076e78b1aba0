"""Autograd's backward, hooks and sequence numbers; the compiler, the profiler, tracing and CUDA graphs."""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from operator import attrgetter
from typing import Any, TypeVar

import torch

_Function = TypeVar("_Function", bound=Callable[..., Any])

# -- backward and hooks ------------------------------------------------------------------------------------

current_graph_task: Callable[[], int] = torch._C._current_graph_task_id
"""The number of the backward that runs on the calling thread, or -1. No public way. All versions."""


def inside_backward() -> bool:
    return current_graph_task() != -1


def queue_backward_callback(callback: Callable[[], None]) -> None:
    """Run `callback` at the end of the running backward. Only valid inside a backward. No public way. All versions."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def add_gradient_hook(tensor: torch.Tensor, hook: Callable[[Any], None]) -> None:
    """Call `hook` when the gradient of `tensor` is computed. The hook cannot be removed.

    `tensor` must be new and without hooks. `register_hook` also makes a handle, which takes three times as long as the
    rest, and every unit registers two hooks per step. All versions.
    """
    node = tensor.grad_fn
    if node is None or tensor._backward_hooks is not None:
        tensor.register_hook(hook)
        return
    hooks: OrderedDict[int, Any] = OrderedDict()  # a user's own `register_hook` adds to this dict
    hooks[0] = hook
    tensor._backward_hooks = hooks
    node._register_hook_dict(tensor)


# Called for every parameter in every step, so not a Python function.
post_accumulate_hooks: Callable[[torch.Tensor], dict[int, Callable[[torch.Tensor], None]] | None]
post_accumulate_hooks = attrgetter("_post_accumulate_grad_hooks")
"""Hooks that users registered with `register_post_accumulate_grad_hook`. No public way to read. All versions."""


def preserve_version_counter(tensor: torch.Tensor) -> AbstractContextManager[Any]:
    """A context in which writes do not increment the version counter of `tensor`.

    For writes that restore the values that autograd saved. All versions.
    """
    return torch.autograd._unsafe_preserve_version_counter(tensor)


next_sequence_nr: Callable[[], int] = torch._C._autograd._get_sequence_nr
"""The sequence number that the calling thread gives to the next node of the graph. No public way. All versions.

Among the nodes that are ready, backward runs the one with the highest number first.
"""


def sequence_nr_of(tensor: torch.Tensor) -> int:
    """The sequence number of the node that computed `tensor`. Leaves run before all other nodes. All versions."""
    node = tensor.grad_fn
    return sys.maxsize if node is None else node._sequence_nr()


# -- tracing, compiler, profiler ---------------------------------------------------------------------------


def traced_by_make_fx() -> bool:
    """Return True while operations are recorded in a graph, as by `torch.func.linearize` and `torch.export`.

    No public way. All versions.
    """
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY) is not None


_SKIP, _DEFAULT = torch._C._dynamo.eval_frame._FrameAction.SKIP, torch._C._dynamo.eval_frame._FrameAction.DEFAULT


def never_compiled(function: _Function) -> _Function:
    """Exclude `function` and everything it calls from `torch.compile`. Returns `function` itself.

    As the outermost Python frame it is skipped without a graph break, so a module whose hooks are such functions
    compiles with `fullgraph=True`. Called from compiled code, it is a graph break with the reason below. The decorator
    `torch.compiler.disable` sets the same attributes, but adds a frame that is traced and breaks in both cases, and
    imports the compiler, which takes seconds. All versions.
    """
    _skip(function, recursive=True)
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    function._torchdynamo_disable_recursive = True  # type: ignore[attr-defined]
    function._torchdynamo_disable_msg = _REASON  # type: ignore[attr-defined]
    return function


def frame_not_compiled(function: _Function) -> _Function:
    """Exclude the code of `function` from `torch.compile`, but not the functions it calls. All versions."""
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
"""Returns True while a profiler records. `record_function` costs time even if none does. All versions."""


# -- CUDA graphs -------------------------------------------------------------------------------------------


def end_failed_recording(device: torch.device, pool: Any, stream: torch.cuda.Stream) -> None:
    """Tell the allocator and the random number generator that the recording on `stream` into `pool` is over.

    `CUDAGraph.capture_end` tells them only if it succeeds. Otherwise the pool cannot be recorded into again, and the
    generator raises at its next use. For the pool there is no public way. For the generator, another recording ends the
    failed one. Tried with torch 2.11.
    """
    with suppress(RuntimeError):
        torch._C._cuda_endAllocateToPool(device.index, pool)
        torch._C._cuda_releasePool(device.index, pool)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        graph.capture_begin(capture_error_mode="thread_local")
        torch.zeros((), device=device)  # an empty recording warns
        graph.capture_end()
    graph.reset()
