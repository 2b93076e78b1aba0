"""One CUDA graph of a whole step, with the tensors that it reads and those that it returns."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch

from ..comm.order.recorded import RecordedCollectives
from ..torch_private import tree_map
from .arguments import Arguments


class Recorder:
    """The stream that steps run on, and the memory that their recordings share."""

    def __init__(self, device: torch.device):
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()
        torch.cuda.empty_cache()  # what other streams have kept: the first steps take as much again on this one

    @contextmanager
    def running(self) -> Iterator[None]:
        """What is queued in here comes after, and before, what the current stream has queued.

        Steps run on the stream that they are recorded on: autograd remembers where it has met a parameter, and a
        recording must not depend on other streams.
        """
        current = torch.cuda.current_stream()
        self._stream.wait_stream(current)
        try:
            with torch.cuda.stream(self._stream):
                yield
        finally:
            current.wait_stream(self._stream)

    def record(self, step: Callable[..., Any], arguments: Arguments) -> Recording:
        """Raises what the step raises, or what CUDA does not allow in a recording. Nothing runs on the device."""
        static, collectives, graph = arguments.static(), RecordedCollectives(), torch.cuda.CUDAGraph()
        with collectives.recording(), self._recorded(graph):
            returned = static.run(step)
        return Recording(static, collectives, graph, tree_map(_without_graph, returned))

    @contextmanager
    def _recorded(self, graph: torch.cuda.CUDAGraph) -> Iterator[None]:
        """As `torch.cuda.graph`, which stays on its stream if a recording fails (seen with torch 2.11)."""
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        with torch.cuda.stream(self._stream):
            # Other threads, of data loaders for example, may use the device meanwhile.
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            try:
                try:
                    yield
                except BaseException:
                    with suppress(RuntimeError):  # says that the recording has failed
                        graph.capture_end()
                    raise
                graph.capture_end()
            except BaseException:
                self._mend_generator()
                raise

    def _mend_generator(self) -> None:
        """A recording that fails leaves the random number generator in the belief that it goes on; another ends it."""
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        torch.zeros((), device=self._stream.device)
        graph.capture_end()
        graph.reset()


class Recording:
    """A step that was recorded and not run: `replay` runs it."""

    def __init__(self, static: Any, collectives: RecordedCollectives, graph: torch.cuda.CUDAGraph, returned: Any):
        self._static, self._collectives, self._graph, self._returned = static, collectives, graph, returned

    def replay(self, tensors: Sequence[torch.Tensor]) -> Any:
        """Run the step with these tensors; what it returns is overwritten by the next replay."""
        self._collectives.check()
        self._static.fill(tensors)
        self._graph.replay()
        return self._returned

    def drop(self) -> None:
        """Give the memory back. To be called before the process group is destroyed, which waits for it."""
        self._graph.reset()
        self._returned = None


def _without_graph(value: Any) -> Any:
    return value.detach() if isinstance(value, torch.Tensor) else value
