"""Who looks at the code that runs: the compiler, function transforms, profilers."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import torch

_Function = TypeVar("_Function", bound=Callable[..., Any])


def outside_transforms() -> AbstractContextManager[Any]:
    """Tensors made in here are plain ones even inside `torch.func.grad`, `vmap` and the like. All versions."""
    return torch._C._DisableFuncTorch()


_frames_compiled_by: Callable[[], Any] = torch._C._dynamo.eval_frame.get_eval_frame_callback
"""What compiles the Python frames of the calling thread; None outside of compiled functions. All versions."""


def never_compiled(function: _Function) -> _Function:
    """Keep `torch.compile` from tracing `function`: it breaks the graph and runs as it is.

    `torch.compiler.disable` would import the compiler, seconds for every program; this waits until somebody else has,
    which every optimizer does. So it also asks whether anything is being compiled here and now. All versions.
    """
    disabled = torch._disable_dynamo(function)

    @functools.wraps(function)
    def call(*args: Any) -> Any:
        if "torch._dynamo" in sys.modules and (torch.compiler.is_compiling() or _frames_compiled_by() is not None):
            return disabled(*args)
        return function(*args)

    return call  # type: ignore[return-value]


profiling: Callable[[], bool] = torch._C._autograd._profiler_enabled
"""Whether a profiler records right now. All versions."""
