"""What a recording of a CUDA graph that has failed leaves behind in torch."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import torch


def end_failed_recording(device: torch.device, pool: Any, stream: torch.cuda.Stream) -> None:
    """Let the allocator and the random number generator know that the recording on `stream` into `pool` is over.

    `CUDAGraph.capture_end` tells them only if it succeeds: otherwise the pool cannot be recorded into again, and the
    generator raises at its next use. There is no public way for the pool; the generator takes another recording for
    the end of the failed one. Tried with torch 2.11.
    """
    with suppress(RuntimeError):
        torch._C._cuda_endAllocateToPool(device.index, pool)
        torch._C._cuda_releasePool(device.index, pool)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        graph.capture_begin(capture_error_mode="thread_local")
        torch.zeros((), device=device)  # an empty recording would warn
        graph.capture_end()
    graph.reset()
