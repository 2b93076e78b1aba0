"""Private APIs of backward, hooks, the compiler, the profiler, CUDA graphs, and the call stack."""

from __future__ import annotations

import contextlib
import os
import pickle
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, suppress
from itertools import dropwhile
from operator import attrgetter
from threading import get_ident
from types import CodeType, FrameType
from typing import Any, TypeVar

import torch
from torch import nn

_Function = TypeVar("_Function", bound=Callable[..., Any])

# -- backward and hooks ------------------------------------------------------------------------------------

current_graph_task: Callable[[], int] = torch._C._current_graph_task_id
"""Return the number of the backward that is running on the calling thread, or -1 if there is none."""


def inside_backward() -> bool:
    return current_graph_task() != -1


def queue_backward_callback(callback: Callable[[], None]) -> None:
    """Run `callback` at the end of the running backward. Call this only inside a backward."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def add_gradient_hook(tensor: torch.Tensor, hook: Callable[[Any], None]) -> None:
    """Call `hook` when the gradient of `tensor` has been computed. The hook cannot be removed.

    This is fast if `tensor` has a graph node and no hooks. `register_hook` takes four times as long, because it creates
    a handle. Speed matters here, because every unit registers two hooks per step.
    """
    node = tensor.grad_fn
    if node is None or tensor._backward_hooks is not None:
        tensor.register_hook(hook)
        return
    hooks: OrderedDict[int, Any] = OrderedDict()  # a later `register_hook` of the user adds to this dict
    hooks[0] = hook
    tensor._backward_hooks = hooks
    node._register_hook_dict(tensor)


# Called for every parameter in every step, so not a Python function.
post_accumulate_hooks: Callable[[torch.Tensor], dict[int, Callable[[torch.Tensor], None]] | None]
post_accumulate_hooks = attrgetter("_post_accumulate_grad_hooks")
"""Return the hooks that `register_post_accumulate_grad_hook` has added to a tensor, or None."""


def preserve_version_counter(tensor: torch.Tensor) -> AbstractContextManager[Any]:
    """Return a context manager in which writes do not increment the version counter of `tensor`.

    Use this only for writes that restore the values that autograd has saved.
    """
    return torch.autograd._unsafe_preserve_version_counter(tensor)


next_sequence_nr: Callable[[], int] = torch._C._autograd._get_sequence_nr
"""Return the sequence number that the next graph node of the calling thread will have.

Among the nodes that are ready, backward runs the node with the highest number first.
"""


def sequence_nr_of(tensor: torch.Tensor) -> int:
    """Return the sequence number of the node that computed `tensor`. Return the largest integer for a leaf."""
    node = tensor.grad_fn
    return sys.maxsize if node is None else node._sequence_nr()


# -- tracing, compiler, profiler ---------------------------------------------------------------------------


def traced_by_make_fx() -> bool:
    """Return True while `make_fx` traces the calling code, as in `torch.func.linearize` and `torch.export`."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY) is not None


_SKIP, _DEFAULT = torch._C._dynamo.eval_frame._FrameAction.SKIP, torch._C._dynamo.eval_frame._FrameAction.DEFAULT


def never_compiled(function: _Function) -> _Function:
    """Exclude `function` and everything that it calls from `torch.compile`. Return `function` itself.

    If `function` is the outermost frame that the compiler sees, the compiler skips it without a graph break. So a
    module whose hook is `function` can be compiled with `fullgraph=True`. If compiled code calls `function`, the graph
    breaks, and the compiler's message contains `_REASON`.

    `torch.compiler.disable` sets the same attributes, but wraps `function` in another function. The compiler traces
    this wrapper, so the graph always breaks. The decorator also imports the compiler, which takes seconds.
    """
    _skip(function, recursive=True)
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    function._torchdynamo_disable_recursive = True  # type: ignore[attr-defined]
    function._torchdynamo_disable_msg = _REASON  # type: ignore[attr-defined]
    return function


def frame_not_compiled(function: _Function) -> _Function:
    """Exclude the code of `function` from `torch.compile`, but not the functions that it calls. Return `function`."""
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
"""Return True while a profiler is recording.

Check this before calling `record_function`, which costs time even if no profiler is recording.
"""


# -- CUDA graphs -------------------------------------------------------------------------------------------


def end_failed_recording(device: torch.device, pool: Any, stream: torch.cuda.Stream) -> None:
    """End a failed recording on `stream` into the memory pool `pool`.

    `CUDAGraph.capture_end` tells the allocator and the random number generator that a recording is over, but only if it
    succeeds. After a failed recording, no other graph could be recorded into the pool, and the generator would raise an
    error at its next use. So this function tells the allocator directly. It then makes a second recording, which
    succeeds and resets the generator. Tested with torch 2.11.
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


# -- the stack: the user's program ---------------------------------------------------------------------------

LIBRARY_FILES = (
    os.path.dirname(torch.__file__) + os.sep,
    os.path.dirname(os.path.dirname(__file__)) + os.sep,
    contextlib.__file__,
    pickle.__file__,
)
"""Prefixes of the paths of source files that do not belong to the user's program.

These are the folders of torch and of this package, and the files of `contextlib` and `pickle`, which call both.
"""


def frames(first: FrameType | None) -> Iterator[FrameType]:
    """Yield the frame `first` and then its callers, from the innermost to the outermost."""
    while first is not None:
        yield first
        first = first.f_back


def stack_level_of_program() -> int:
    """Return a `stacklevel` with which a warning from the calling function points to the user's program."""
    for level, frame in enumerate(frames(sys._getframe())):  # level 0 is this function
        if not frame.f_code.co_filename.startswith(LIBRARY_FILES):
            return level
    return level + 1


def line_of_program(thread: int) -> str:
    """Return the file, line and function of the user's program that `thread` is running, or an empty string."""
    for frame in frames(sys._current_frames().get(thread)):
        if not frame.f_code.co_filename.startswith(LIBRARY_FILES):
            return f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"
    return ""


def line_of_error(error: BaseException | None) -> str:
    """Return the user's innermost line in the traceback of `error`, as `line_of_program` does."""
    place, trace = "", error.__traceback__ if error is not None else None
    while trace is not None:
        code = trace.tb_frame.f_code
        if not code.co_filename.startswith(LIBRARY_FILES):
            place = f"{code.co_filename}:{trace.tb_lineno} in {code.co_name}"
        trace = trace.tb_next
    return place


# -- the stack: backward, modules and optimizers -----------------------------------------------------------

RUN_BACKWARD = torch.autograd.graph._engine_run_backward.__code__
"""The code object of the function that runs every backward."""
_FUNCTIONAL_CALL = nn.utils.stateless._functional_call.__code__


def any_thread_in_backward() -> bool:
    """Return True if any thread has started a backward that is still running."""
    return any(frame.f_code is RUN_BACKWARD for first in [*sys._current_frames().values()] for frame in frames(first))


def runs_split_backward(thread: int) -> bool:
    """Return True during the part of a split backward that computes the gradients of inputs.

    Some pipeline schedules split backward into this part and a part that computes the gradients of weights. Autograd
    runs hooks of CUDA tensors in its own threads. So if the calling thread has not started the backward, this function
    inspects the stack of `thread`.
    """
    pipelining = sys.modules.get("torch.distributed.pipelining._backward")
    if pipelining is None:
        return False
    codes = _codes_from(sys._getframe(1))
    if RUN_BACKWARD not in codes and thread != get_ident():
        codes = _codes_from(sys._current_frames().get(thread))
    split = pipelining.stage_backward_input.__code__
    return RUN_BACKWARD in codes and split in codes[codes.index(RUN_BACKWARD) :]


def _codes_from(first: FrameType | None) -> list[CodeType]:
    # A function whose local variable is its own frame is a cycle, which keeps the locals of all its callers.
    return [frame.f_code for frame in frames(first)]


def inside_functional_call() -> bool:
    """Return True if the calling thread is inside `torch.func.functional_call`."""
    return any(frame.f_code is _FUNCTIONAL_CALL for frame in frames(sys._getframe(1)))


def calls_on_stack(modules: list[nn.Module]) -> int:
    """Return how many calls of `modules` are on the stack of the calling thread. Compiled calls do not count.

    Hooks cannot count these calls, because torch runs no hook when a KeyboardInterrupt ends a module's forward.
    """
    call = nn.Module._call_impl.__code__
    return sum(frame.f_code is call and frame.f_locals["self"] in modules for frame in frames(sys._getframe(1)))


def stepped_by_plain_scaler() -> bool:
    """Return True if torch's own `GradScaler` called the current optimizer step. Call this in a step hook.

    Return False if the scaler's class overrides how gradients are unscaled.
    """
    plain: Any = torch.amp.GradScaler
    codes = (plain.step.__code__, plain._maybe_opt_step.__code__)
    for depth, frame in enumerate(frames(sys._getframe(1))):
        if depth == 12:
            break
        if frame.f_code in codes:
            scaler = type(frame.f_locals.get("self", None))
            methods = ("unscale_", "_unscale_grads_")
            return all(getattr(scaler, name, None) is getattr(plain, name) for name in methods)
    return False


# -- the stack: torch.distributed.checkpoint ---------------------------------------------------------------

CHECKPOINT = "torch.distributed.checkpoint"
HELPERS = f"{CHECKPOINT}.state_dict"
_AROUND_OPTIMIZERS = ("unshard.", "torch.optim.", "torch._compile", "torch._dynamo.")


def helper_call() -> tuple[str, tuple[Any, ...], bool] | None:
    """Return which function of `torch.distributed.checkpoint.state_dict` called our code, and two of its arguments.

    The result contains the function's name, its optimizers, and True if its caller asked for a full state dict. Return
    None if no function of this torch module called our code, or if the drop-in has put our wrapper's class there.

    These functions call `_fqn_modifiers` of every module, without arguments, before they change anything. So only the
    stack shows which function is running, and for which optimizers.
    """
    outermost = None
    for frame in _outside(("unshard.",)):
        if _module(frame) != HELPERS:
            break
        outermost = frame
    if outermost is None or _knows_wrapper(outermost):
        return None
    arguments = outermost.f_locals
    optimizers = arguments.get("optimizers") or ()
    return (
        outermost.f_code.co_name,
        optimizers if isinstance(optimizers, tuple) else (optimizers,),
        bool(getattr(arguments.get("options"), "full_state_dict", False)),
    )


def caller_in_checkpoint() -> str | None:
    """Return the name of the `torch.distributed.checkpoint` function that called the current optimizer method.

    Call this in a hook of the method. Return None for any other caller. Also return None if the drop-in has put our
    wrapper's class into the caller's module.
    """
    frame = next(_outside(_AROUND_OPTIMIZERS), None)
    if frame is None or not f"{_module(frame)}.".startswith(f"{CHECKPOINT}.") or _knows_wrapper(frame):
        return None
    return f"{_module(frame)}.{frame.f_code.co_name}"


def _outside(modules: tuple[str, ...]) -> Iterator[FrameType]:
    return dropwhile(lambda frame: f"{_module(frame)}.".startswith(modules), frames(sys._getframe(1)))


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))


def _knows_wrapper(frame: FrameType) -> bool:
    values = list(frame.f_globals.values())
    return any(isinstance(each, type) and each.__module__.startswith("unshard.") for each in values)
