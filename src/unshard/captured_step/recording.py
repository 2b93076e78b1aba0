"""One CUDA graph of a whole step, with the tensors that it reads and those that it returns."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from typing import Any

import torch

from ..comm.order.check import RecordedCollectives
from ..torch_private import end_failed_recording, tree_flatten, tree_map, tree_unflatten
from .arguments import Arguments, StaticArguments


@cache
def _stream_of_steps(device: torch.device) -> torch.cuda.Stream:
    """The same for all captured steps: for each stream and thread that multiplies matrices, cuBLAS has 32 MiB."""
    # Compute comes before casts and copies of side streams, which run in the gaps that it leaves.
    stream = torch.cuda.Stream(device, priority=-1)
    # CuBLAS takes its memory now. In a step it would get a part of a larger block, which then is never given back.
    with suppress(RuntimeError), torch.cuda.stream(stream), torch.inference_mode(False), torch.enable_grad():
        matrix = torch.ones(16, 16, device=device, requires_grad=True)
        (matrix @ matrix).sum().backward()
    return stream


class Recorder:
    """The stream that steps run on, and the memory that their recordings share."""

    def __init__(self, device: torch.device):
        torch.cuda.empty_cache()  # what other streams have kept: the first steps take as much again on this one
        self._device, self._stream = device, _stream_of_steps(device)
        self._pool: Any = None
        self._alive = 0
        self._pool_is_spent = False
        """By torch's sources, nothing can be recorded into a pool after a recording has failed, or all were dropped."""
        self._failed: list[torch.cuda.CUDAGraph] = []
        """Kept: the allocator may still ask them whether a stream is theirs."""

    @contextmanager
    def running(self) -> Iterator[None]:
        """What is queued in here comes after, and before, what the current stream has queued.

        Steps run on the stream that they are recorded on: autograd remembers where it has met a parameter, and a
        recording must not depend on other streams.
        """
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        try:
            with torch.cuda.stream(self._stream):
                yield
        finally:
            current.wait_stream(self._stream)

    def record(self, step: Callable[..., Any], arguments: Arguments) -> Recording:
        """Raises what the step raises, or what CUDA does not allow in a recording. Nothing runs on the device."""
        is_new = self._pool_is_spent or not self._alive
        if is_new:
            self._pool, self._pool_is_spent = torch.cuda.graph_pool_handle(), False
        static, collectives, graph = arguments.static(), RecordedCollectives(), torch.cuda.CUDAGraph()
        nbytes = self._give_back()
        with collectives.recording(), _without_earlier_casts(), self._recorded(graph):
            if is_new:
                self._take_at_once(nbytes)
            returned = static.run(step)
        # Torch has written a seed and an offset for random numbers on this stream. A replay first writes its own.
        torch.cuda.current_stream(self._device).wait_stream(self._stream)
        self._alive += 1
        return Recording(static, collectives, graph, tree_map(_without_graph, returned), self._dropped)

    def wait(self) -> None:
        """Until replays have ended. Memory of a dropped recording may be given back while its last replay runs.

        Torch waits for the stream that has allocated it, if it uses `expandable_segments`: not for the one of replays.
        """
        torch.cuda.synchronize(self._device)

    def _dropped(self) -> None:
        self._alive -= 1

    def _give_back(self) -> int:
        """Give the memory that steps have used back; returns how much of it a step needs at the same time, or more."""
        torch.cuda.synchronize(self._device)
        reserved = torch.cuda.memory_reserved(self._device)
        torch.cuda.empty_cache()
        given_back = reserved - torch.cuda.memory_reserved(self._device)
        # The peak may be one of before; no step has needed more than what it has left behind.
        peak = torch.cuda.max_memory_allocated(self._device) - torch.cuda.memory_allocated(self._device)
        return min(given_back, peak)

    def _take_at_once(self, nbytes: int) -> None:
        """Fill the empty pool with one block, which the step then cuts up.

        Else the pool gets a block for everything that does not fit into a free one, and those that are freed in
        forward are too small for backward.
        """
        if can_cut_blocks() and nbytes <= torch.cuda.mem_get_info(self._device)[0]:
            torch.empty(nbytes, dtype=torch.uint8, device=self._device)

    @contextmanager
    def _recorded(self, graph: torch.cuda.CUDAGraph) -> Iterator[None]:
        """As `torch.cuda.graph`, which leaves much behind if a recording fails: its stream stays the current one."""
        try:
            with torch.cuda.stream(self._stream):
                # Other threads, of data loaders for example, may use the device meanwhile.
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                try:
                    yield
                except BaseException:
                    with suppress(RuntimeError), warnings.catch_warnings():
                        warnings.simplefilter("ignore")  # that the graph is empty; the error says that it has failed
                        graph.capture_end()
                    raise
                graph.capture_end()
        except BaseException:
            graph.reset()
            self._failed.append(graph)
            end_failed_recording(self._device, self._pool, self._stream)
            self._pool_is_spent = True
            raise


class Recording:
    """A step that was recorded and not run: `replay` runs it."""

    def __init__(
        self,
        static: StaticArguments,
        collectives: RecordedCollectives,
        graph: torch.cuda.CUDAGraph,
        returned: Any,
        dropped: Callable[[], None],
    ):
        """`dropped` is called by `drop`."""
        self._static, self._collectives, self._graph = static, collectives, graph
        self._returned, self._structure = tree_flatten(returned)
        self._on_drop = dropped

    def replay(self, tensors: Sequence[torch.Tensor]) -> Any:
        """Run the step with these tensors; those that it returns are overwritten by the next replay."""
        self._collectives.check()
        self._static.fill(tensors)
        self._graph.replay()
        return tree_unflatten(self._returned, self._structure)  # other containers: programs change those they get

    def drop(self) -> None:
        """Give the memory back. To be called before the process group is destroyed, which waits for it."""
        self._graph.reset()
        self._returned = []
        self._on_drop()


def can_cut_blocks() -> bool:
    """Whether torch's allocator gives parts of a large block to small tensors."""
    settings = os.environ.get("PYTORCH_ALLOC_CONF", "") + os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "")
    return torch.cuda.get_allocator_backend() == "native" and "max_split_size_mb" not in settings


@contextmanager
def _without_earlier_casts() -> Iterator[None]:
    """Autocast keeps casts of weights. A recording must not read earlier ones, nor leave its own: others would."""
    torch.clear_autocast_cache()
    try:
        yield
    finally:
        torch.clear_autocast_cache()


def _without_graph(value: Any) -> Any:
    return value.detach() if isinstance(value, torch.Tensor) else value
