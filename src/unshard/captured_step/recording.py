"""A CUDA graph of one step: how the ranks agree to record it, and how it is recorded, undone and replayed."""

from __future__ import annotations

import os
import time
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from enum import Enum
from functools import cache
from itertools import count
from typing import Any

import torch
import torch.distributed as dist

from ..comm.order.check import Recorded, check_replay, recorded_collectives
from ..comm.order.peers import keys_of_job
from ..engine.api import ShardedGrad
from ..errors import StateError
from ..torch_private import end_failed_recording, forget_scaler_stages, tree_flatten, tree_map, tree_unflatten
from .signature import Arguments
from .trained import Snapshots, Trained

PATIENCE = 60.0  # seconds that a rank waits for other ranks, as the step itself would
KEPT = 64  # calls whose keys stay in the store; ranks are never that far apart

_numbers: weakref.WeakKeyDictionary[Any, Iterator[int]] = weakref.WeakKeyDictionary()
"""Counters that number captured steps, by default process group."""
_numbers_without_group = count(-1, -1)


# -- agreement ----------------------------------------------------------------------------------------------


class Answer(Enum):
    YES = "yes"
    NO = "no"
    """A rank does not want to record."""
    REFUSED = "refused"
    """A rank cannot record, now or later."""
    LATE = "late"
    """A rank did not answer in time."""


def next_number() -> int:
    """Return the number of a new captured step. The steps with the same number on all ranks decide together."""
    grouped = dist.is_initialized()
    return next(_numbers.setdefault(dist.group.WORLD, count(1)) if grouped else _numbers_without_group)


class Agreement:
    """Lets ranks agree, through the job's store, on whether to record a call of one captured step."""

    def __init__(self, ranks: Sequence[int], number: int):
        """`ranks` decide together. If `ranks` is empty, this process decides alone."""
        self._size, self._cleans = len(ranks), bool(ranks) and dist.get_rank() == ranks[0]
        self._store: dist.Store | None = None
        if self._size > 1:
            self._store = dist.PrefixStore(f"capture {number} {','.join(map(str, ranks))}", keys_of_job())

    def decide(self, call: int, about: str, wanted: bool, patience: float | None = None) -> Answer:
        """Return the ranks' common answer for `call`. `wanted`: this rank's vote. Wait `patience` seconds at most."""
        store, name = self._store, f"{call} {about}"
        if store is None:
            return Answer.YES if wanted else Answer.NO
        self._clean(store, call, about)
        if not wanted:
            return self._settle(store, name, Answer.NO)
        if store.add(f"{name} count", 1) == self._size:
            return self._settle(store, name, Answer.YES)
        deadline, pause = time.monotonic() + (PATIENCE if patience is None else patience), 0.0005
        while not store.check([name]):
            if time.monotonic() > deadline:
                return self._settle(store, name, Answer.LATE)
            time.sleep(pause)
            pause = min(2 * pause, 0.05)
        return Answer(store.get(name).decode())

    def refuse(self, call: int, about: str) -> None:
        """Tell the other ranks that this rank cannot record, so that they do not wait."""
        if self._store is not None:
            self._clean(self._store, call, about)
            self._settle(self._store, f"{call} {about}", Answer.REFUSED)

    def _clean(self, store: dist.Store, call: int, about: str) -> None:
        if self._cleans and call > KEPT:
            store.delete_key(f"{call - KEPT} {about}")
            store.delete_key(f"{call - KEPT} {about} count")

    @staticmethod
    def _settle(store: dist.Store, name: str, answer: Answer) -> Answer:
        """Write the answer, unless another rank has already written one. Return the answer in the store."""
        return Answer(store.compare_set(name, "", answer.value).decode())


# -- recording ----------------------------------------------------------------------------------------------


@cache
def _stream_of_steps(device: torch.device) -> torch.cuda.Stream:
    """Return the stream that all captured steps share, because cuBLAS keeps 32 MiB for each stream and thread."""
    # High priority: casts and copies on side streams run in the gaps of compute.
    stream = torch.cuda.Stream(device, priority=-1)
    # Let cuBLAS allocate now. In a step, it would get part of a larger block, which could then never be freed.
    with suppress(RuntimeError), torch.cuda.stream(stream), torch.inference_mode(False), torch.enable_grad():
        matrix = torch.ones(16, 16, device=device, requires_grad=True)
        (matrix @ matrix).sum().backward()
    return stream


class Recorder:
    """The stream that steps run on, and the memory pool that their recordings share."""

    def __init__(self, device: torch.device):
        torch.cuda.empty_cache()  # free memory that other streams cached: the first steps need as much on this stream
        self._device, self._stream = device, _stream_of_steps(device)
        self._pool: Any = None
        self._alive = 0
        self._pool_is_spent = False
        """True after a failed recording, which makes the pool unusable according to torch's sources."""
        self._failed: list[torch.cuda.CUDAGraph] = []
        """Graphs of failed recordings, kept alive because the allocator may still ask whether they use a stream."""

    @contextmanager
    def running(self) -> Iterator[None]:
        """A context that runs work on the stream of steps, between earlier and later work of the current stream.

        Eager steps also use the stream that steps are recorded on, because autograd remembers the stream that first
        used a parameter, and a recording must not depend on other streams.
        """
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        try:
            with torch.cuda.stream(self._stream):
                yield
        finally:
            current.wait_stream(self._stream)

    def record(self, step: Callable[..., Any], arguments: Arguments) -> Recording:
        """Record `step` without running it. Raises the step's exceptions, and CUDA's if the step cannot be recorded."""
        is_new = self._pool_is_spent or not self._alive
        if is_new:
            self._pool, self._pool_is_spent = torch.cuda.graph_pool_handle(), False
        static, graph = arguments.static(), torch.cuda.CUDAGraph()
        nbytes = self._give_back()
        with recorded_collectives() as collectives, _without_earlier_casts(), self._recorded(graph):
            if is_new:
                self._take_at_once(nbytes)
            returned = static.run(step)
        # Torch has queued writes of a random seed and offset on that stream. Replays must write theirs later.
        torch.cuda.current_stream(self._device).wait_stream(self._stream)
        self._alive += 1
        detached = tree_map(lambda each: each.detach() if isinstance(each, torch.Tensor) else each, returned)
        return Recording(static, collectives, graph, detached, self._dropped)

    def wait(self) -> None:
        """Wait for replays to end. Otherwise, dropping a recording could free memory that its last replay still uses.

        With `expandable_segments`, torch waits only for the stream that allocated the memory, not for replays.
        """
        torch.cuda.synchronize(self._device)

    def _dropped(self) -> None:
        self._alive -= 1

    def _give_back(self) -> int:
        """Free the memory that eager steps left cached, and return an upper bound of a step's peak memory."""
        torch.cuda.synchronize(self._device)
        reserved = torch.cuda.memory_reserved(self._device)
        torch.cuda.empty_cache()
        given_back = reserved - torch.cuda.memory_reserved(self._device)
        # The peak may be older than these steps, but they never used more memory than they left cached.
        peak = torch.cuda.max_memory_allocated(self._device) - torch.cuda.memory_allocated(self._device)
        return min(given_back, peak)

    def _take_at_once(self, nbytes: int) -> None:
        """Fill the empty pool with one block, which the step then splits.

        Otherwise the pool gets a block for each allocation that fits no free block, and the blocks that forward frees
        are too small for backward.
        """
        settings = os.environ.get("PYTORCH_ALLOC_CONF", "") + os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "")
        can_split = torch.cuda.get_allocator_backend() == "native" and "max_split_size_mb" not in settings
        if can_split and nbytes <= torch.cuda.mem_get_info(self._device)[0]:
            torch.empty(nbytes, dtype=torch.uint8, device=self._device)

    @contextmanager
    def _recorded(self, graph: torch.cuda.CUDAGraph) -> Iterator[None]:
        """Like `torch.cuda.graph`, but cleans up after a failed recording. torch would leave its own stream current."""
        try:
            with torch.cuda.stream(self._stream):
                # Other threads, such as data loaders, may use the device meanwhile.
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                try:
                    yield
                except BaseException:
                    with suppress(RuntimeError), warnings.catch_warnings():
                        warnings.simplefilter("ignore")  # "the graph is empty"; the exception says why
                        graph.capture_end()
                    raise
                graph.capture_end()
        except BaseException:
            graph.reset()
            self._failed.append(graph)
            end_failed_recording(self._device, self._pool, self._stream)
            self._pool_is_spent = True
            raise


@dataclass(eq=False)
class Recording:
    """A recorded step. Only `replay` runs the step; recording it does not."""

    _static: Arguments
    _collectives: Recorded
    _graph: torch.cuda.CUDAGraph
    _returned: Any
    _on_drop: Callable[[], None]
    gradients: Snapshots | None = None
    """Gradients after a replay. None if a replay leaves the same gradients as before the call."""
    written: list[ShardedGrad] = field(default_factory=list)
    """Gradients that a replay may write; the program must not hold any of them."""
    used: int = 0
    """Number of the last call that replayed this recording."""

    def __post_init__(self) -> None:
        self._returned, self._structure = tree_flatten(self._returned)

    def can_replay(self, trained: Trained) -> bool:
        """Return True if the memory of the gradients that a replay writes exists and is free to be written."""
        if self.gradients is not None and not trained.can_restore(self.gradients):
            return False
        return all(grad.attached or grad.idle for grad in self.written)

    def replay(self, tensors: Sequence[torch.Tensor]) -> Any:
        """Run the step with these arguments. The next replay overwrites the returned tensors."""
        check_replay(self._collectives)
        self._static.fill(tensors)
        self._graph.replay()
        return tree_unflatten(self._returned, self._structure)  # new containers: the program may change them

    def drop(self) -> None:
        """Free the recording's memory. Call this before destroying the process group, which waits for the graph."""
        self._graph.reset()
        self._returned = []
        self._on_drop()


def restorer(trained: Trained, gradients: Snapshots) -> Callable[[], None]:
    """Return a function that restores the host's view of gradients and optimizer state after a failed recording."""
    state = [entry for each in trained.optimizers for entry in each.state.values() if type(entry) is dict]
    dicts: list[tuple[dict[Any, Any], dict[Any, Any]]]
    dicts = [(each, dict(each)) for each in (*trained.tensor_dicts(), *state)]
    dicts += [(each.state, {**each.state}) for each in trained.optimizers]
    dicts += [(vars(each), dict(vars(each))) for each in trained.optimizers]

    def restore() -> None:
        """Undo the changes of a failed recording on the host. The recording has run nothing on the device."""
        for root in trained.roots():
            root.abandon()
        for each in trained.unmanaged:  # they had no gradients before
            each.grad = None
        for changed, before in dicts:
            changed.clear()
            changed.update(before)
        if trained.enabled_scaler is not None:
            forget_scaler_stages(trained.enabled_scaler)  # there were none before
        if not trained.can_restore(gradients):
            raise StateError(
                "Recording the step failed, and gradients that were accumulated before are lost. Call zero_grad() and "
                "restart the accumulation."
            )
        trained.restore(gradients)
        trained.release_memory()

    return restore


@contextmanager
def _without_earlier_casts() -> Iterator[None]:
    """Clear autocast's cache, because a recording must neither read earlier casts nor leave its own in the cache."""
    torch.clear_autocast_cache()
    try:
        yield
    finally:
        torch.clear_autocast_cache()
