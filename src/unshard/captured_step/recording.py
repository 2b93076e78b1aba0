"""Records a step as a CUDA graph and replays it.

The ranks agree on whether to record. If any rank fails, all of them undo the recording.
"""

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
from hashlib import sha256
from itertools import count
from typing import Any

import torch
import torch.distributed as dist

from ..comm.order.announcing import keys_of_job
from ..comm.order.check import Recorded, check_replay, recorded_collectives
from ..engine.api import ShardedGrad
from ..errors import StateError
from ..torch_private import end_failed_recording, forget_scaler_stages, tree_flatten, tree_map, tree_unflatten
from .signature import Arguments
from .trained import Snapshots, Trained

PATIENCE = 60.0  # seconds that a rank waits for other ranks, for which the step itself would also wait
KEPT = 64  # number of calls whose keys stay in the store; ranks are never that many calls apart

_numbers: weakref.WeakKeyDictionary[Any, Iterator[int]] = weakref.WeakKeyDictionary()
"""Maps each default process group to a counter that numbers captured steps."""
_numbers_without_group = count(-1, -1)


# -- agreement ----------------------------------------------------------------------------------------------


class Answer(Enum):
    YES = "yes"
    NO = "no"
    """At least one rank does not want to record this call."""
    REFUSED = "refused"
    """At least one rank cannot record this call, now or later."""
    LATE = "late"
    """At least one rank did not answer in time."""


def next_number() -> int:
    """Return a number for a new captured step. The ranks agree on recordings of steps with equal numbers."""
    grouped = dist.is_initialized()
    return next(_numbers.setdefault(dist.group.WORLD, count(1)) if grouped else _numbers_without_group)


class Agreement:
    """Lets ranks agree, through the job's store, on whether to record a call of one captured step."""

    def __init__(self, ranks: Sequence[int], number: int):
        """Let `ranks` agree on the captured step `number`. If `ranks` is empty, this process decides alone."""
        self._size, self._cleans = len(ranks), bool(ranks) and dist.get_rank() == ranks[0]
        self._store: dist.Store | None = None
        if self._size > 1:
            # Every request contains this name, so it must not grow with the number of ranks.
            members = sha256(str(list(ranks)).encode()).hexdigest()[:16]
            self._store = dist.PrefixStore(f"capture {number} {members}", keys_of_job())

    def decide(self, call: int, about: str, wanted: bool, patience: float | None = None) -> Answer:
        """Return the decision of all ranks about `call`, after waiting at most `patience` seconds for other ranks.

        `wanted` is this rank's vote. `about` names the decision, because a call may need several decisions.
        """
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
        """Tell the other ranks that this rank cannot record `call`, so that they do not wait for this rank."""
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
    """Return the stream that all captured steps share, because cuBLAS allocates 32 MiB per stream and thread."""
    # High priority: casts and copies on side streams run in the gaps of compute.
    stream = torch.cuda.Stream(device, priority=-1)
    # Let cuBLAS allocate now. In a step, it would get part of a larger block, which could then never be freed.
    with suppress(RuntimeError), torch.cuda.stream(stream), torch.inference_mode(False), torch.enable_grad():
        matrix = torch.ones(16, 16, device=device, requires_grad=True)
        (matrix @ matrix).sum().backward()
    return stream


class Recorder:
    """Runs and records the steps of one `CapturedStep`. All recordings share one memory pool."""

    def __init__(self, device: torch.device):
        torch.cuda.empty_cache()  # free memory that other streams cached: the first steps need as much on this stream
        self._device, self._stream = device, _stream_of_steps(device)
        self._pool: Any = None
        self._alive = 0
        self._pool_is_spent = False
        """True after a failed recording. According to torch's sources, the pool can then no longer be used."""
        self._failed: list[torch.cuda.CUDAGraph] = []
        """Graphs of failed recordings. They must stay alive because torch's allocator may still refer to them."""

    @contextmanager
    def running(self) -> Iterator[None]:
        """A context that runs work on the recording stream, between earlier and later work of the current stream.

        Eager steps also use the recording stream, because autograd remembers the stream that first used a parameter. A
        recording must not depend on another stream.
        """
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        try:
            with torch.cuda.stream(self._stream):
                yield
        finally:
            current.wait_stream(self._stream)

    def record(self, step: Callable[..., Any], arguments: Arguments) -> Recording:
        """Record `step` without running it on the device.

        Raises the exceptions of the step, and CUDA's exceptions if the step cannot be recorded.
        """
        is_new = self._pool_is_spent or not self._alive
        if is_new:
            self._pool, self._pool_is_spent = torch.cuda.graph_pool_handle(), False
        static, graph = arguments.static(), torch.cuda.CUDAGraph()
        nbytes = self._give_back()
        with recorded_collectives() as collectives, _without_earlier_casts(), self._recorded(graph):
            if is_new:
                self._take_at_once(nbytes)
            returned = static.run(step)
        # Torch has queued writes of a random seed and offset on the recording stream. Replays must write theirs later.
        torch.cuda.current_stream(self._device).wait_stream(self._stream)
        self._alive += 1
        detached = tree_map(lambda each: each.detach() if isinstance(each, torch.Tensor) else each, returned)
        return Recording(static, collectives, graph, detached, self._dropped)

    def wait(self) -> None:
        """Wait until all replays have ended. Call this before dropping a recording.

        Otherwise, the drop could free memory that the last replay still uses. With `expandable_segments`, torch waits
        only for the stream that allocated the memory, not for replays.
        """
        torch.cuda.synchronize(self._device)

    def _dropped(self) -> None:
        self._alive -= 1

    def _give_back(self) -> int:
        """Free the memory that eager steps have left cached. Return an upper bound of a step's peak memory in bytes."""
        torch.cuda.synchronize(self._device)
        reserved = torch.cuda.memory_reserved(self._device)
        torch.cuda.empty_cache()
        given_back = reserved - torch.cuda.memory_reserved(self._device)
        # The peak may be older than these steps, but they never used more memory than they left cached.
        peak = torch.cuda.max_memory_allocated(self._device) - torch.cuda.memory_allocated(self._device)
        return min(given_back, peak)

    def _take_at_once(self, nbytes: int) -> None:
        """Allocate `nbytes` from the empty pool as one block and free the block, which the step then splits.

        Otherwise, the pool gets a new block for every allocation that fits no free block. The blocks that forward frees
        are then too small for backward.
        """
        settings = os.environ.get("PYTORCH_ALLOC_CONF", "") + os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "")
        can_split = torch.cuda.get_allocator_backend() == "native" and "max_split_size_mb" not in settings
        if can_split and nbytes <= torch.cuda.mem_get_info(self._device)[0]:
            torch.empty(nbytes, dtype=torch.uint8, device=self._device)

    @contextmanager
    def _recorded(self, graph: torch.cuda.CUDAGraph) -> Iterator[None]:
        """Record like `torch.cuda.graph`. Unlike that context, restore the current stream if the recording fails."""
        try:
            with torch.cuda.stream(self._stream):
                # Other threads, such as data loaders, may use the device meanwhile.
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                try:
                    yield
                except BaseException:
                    with suppress(RuntimeError), warnings.catch_warnings():
                        warnings.simplefilter("ignore")  # torch warns about an empty graph; the exception says why
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
    """A step that was recorded without running on the device. Each `replay` runs it."""

    _static: Arguments
    _collectives: Recorded
    _graph: torch.cuda.CUDAGraph
    _returned: Any
    _on_drop: Callable[[], None]
    gradients: Snapshots | None = None
    """Snapshots of the gradients after a replay. None if they equal the snapshots before the call."""
    written: list[ShardedGrad] = field(default_factory=list)
    """Gradients that a replay writes. Before a replay, only the `.grad` of parameters may refer to these tensors."""
    used: int = 0
    """Number of the last call that replayed this recording."""

    def __post_init__(self) -> None:
        self._returned, self._structure = tree_flatten(self._returned)

    def can_replay(self, trained: Trained) -> bool:
        """Return True if the memory of the gradients that a replay writes still exists and may be overwritten."""
        if self.gradients is not None and not trained.can_restore(self.gradients):
            return False
        return all(grad.attached or grad.idle for grad in self.written)

    def replay(self, tensors: Sequence[torch.Tensor]) -> Any:
        """Run the step with `tensors` as its tensor arguments. The next replay overwrites the returned tensors."""
        check_replay(self._collectives)
        self._static.fill(tensors)
        self._graph.replay()
        return tree_unflatten(self._returned, self._structure)  # new containers, because the program may change them

    def drop(self) -> None:
        """Free the recording's memory. Call this before the process group is destroyed, or NCCL waits forever."""
        self._graph.reset()
        self._returned = []
        self._on_drop()


def restorer(trained: Trained, gradients: Snapshots) -> Callable[[], None]:
    """Return a function that undoes the changes of a failed recording to models and optimizers on the host."""
    state = [entry for each in trained.optimizers for entry in each.state.values() if type(entry) is dict]
    dicts: list[tuple[dict[Any, Any], dict[Any, Any]]]
    dicts = [(each, dict(each)) for each in (*trained.tensor_dicts(), *state)]
    dicts += [(each.state, {**each.state}) for each in trained.optimizers]
    dicts += [(vars(each), dict(vars(each))) for each in trained.optimizers]

    def restore() -> None:
        # Only the host has changed, because a recording runs nothing on the device.
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
    """A context with an empty autocast cache. A recording must not read earlier casts or leave its own in the cache."""
    torch.clear_autocast_cache()
    try:
        yield
    finally:
        torch.clear_autocast_cache()
