"""Steps of flat optimizers whose state or parameters are on the host.

`OptimizerOffloadPolicy` keeps the state on the host and the parameters on the device. A step copies the state to the
device and back, batch by batch:

    upload stream     | batch 0 | batch 1 | batch 2 | batch 3 |
    compute stream              | step 0  | step 1  | step 2  | step 3  |
    download stream                       | batch 0 | batch 1 | batch 2 | batch 3 |

The device therefore holds the state of at most three batches. The optimizer's own code steps each batch separately.

`CPUOffloadPolicy` keeps state and parameters on the host. A thread runs the step on all cores that this rank may
use. With `step_in_backward`, the thread steps each unit during backward, once the unit's gradients are on the host.
"""

from __future__ import annotations

import atexit
import copy
import os
import threading
import warnings
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from concurrent.futures import Future
from functools import cache
from queue import SimpleQueue
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor

from ..engine.api import CopyStreams, ShardedGrad, StreamEvent, listen, note_optimizer_step, roots_of
from ..errors import StateError
from ..names import optimizer_parameters
from .flat_spans import FlatGrads, FlatGroups, FlatSpan

BATCH_BYTES = 16 * 2**20
"""Maximum size of a batch with several spans. Copying this many bytes takes about as long as calling the optimizer."""

Groups = list[dict[str, Any]]
Target = Callable[[FlatSpan, str, torch.Tensor], torch.Tensor]
"""A function that takes a span, a state key and its value, and returns the memory to copy the value to."""


# -- state on the host, parameters on the device ------------------------------------------------------------------


class StateBatch:
    """Spans that are stepped together. Between steps, their state is on the host, in `state`."""

    def __init__(self, spans: Sequence[FlatSpan], state: MutableMapping[Any, Any]):
        self.spans = spans
        self.copy_streams = _copy_streams_of(spans[0])
        self._state = state
        self._on_device: defaultdict[Any, Any] | None = None
        self.stepping = False
        self._copies: list[StreamEvent] = []

    def upload(self) -> None:
        """Start copying the state to the device. Counters are not copied."""

        def target(span: FlatSpan, key: str, value: torch.Tensor) -> torch.Tensor:
            return _device_memory(value, span.flat.device)

        self._on_device = defaultdict(dict, self._copy(self._state, target, self.copy_streams.up))

    def begin_step(self, groups: Groups, others: dict[Any, Any]) -> tuple[Groups, defaultdict[Any, Any]]:
        """Wait for the upload, then return optimizer groups and state for the step.

        The groups are `groups` with the spans added. The state includes `others`, whose keys are not parameters.
        """
        self._wait_for_copies()
        assert self._on_device is not None
        self._on_device.update(others)
        for span in self.spans:
            groups[span.group]["params"].append(span.flat)
        self.stepping = True
        return groups, self._on_device

    def download(self) -> None:
        """Start copying the state to the host, including state that the step has created."""
        assert self._on_device is not None
        self.stepping = False

        def target(span: FlatSpan, key: str, value: torch.Tensor) -> torch.Tensor:
            old = self._state.get(span.flat, {}).get(key)
            reuse = span.is_per_element(old) and old.dtype == value.dtype
            return old if reuse else span.new_state(value.dtype)

        self._state.update(self._copy(self._on_device, target, self.copy_streams.down))

    def _copy(self, state: MutableMapping[Any, Any], target: Target, stream: Any) -> dict[Any, Any]:
        """Start copying per-element state on `stream` to memory that `target` returns. Return state with the copies."""
        copied: dict[Any, Any] = {}
        targets: list[torch.Tensor] = []
        sources: list[torch.Tensor] = []
        for span in self.spans:
            if span.flat in state:
                own = copied[span.flat] = dict(state[span.flat])
                for key, value in own.items():
                    if span.is_per_element(value):
                        own[key] = target(span, key, value)
                        targets.append(own[key])
                        sources.append(value)
        if targets:
            self._copies.append(stream.copy(targets, sources))
        return copied

    def release(self) -> None:
        """Free the state's device memory. The compute stream, which owns the memory, first waits for the copies."""
        self._wait_for_copies()
        self._on_device = None

    def _wait_for_copies(self) -> None:
        for event in self._copies:
            event.wait()
        self._copies.clear()


class StateStreamer:
    """Steps the spans whose state is on the host, as part of one step of the optimizer."""

    def __init__(self, spans: Sequence[FlatSpan], state: MutableMapping[Any, Any], groups: Groups):
        """Start copying the state of the first batch to the device.

        `state` contains the flat state of the spans and state whose keys are not parameters. `groups` are the optimizer
        groups.
        """
        self._batches = [StateBatch(each, state) for each in _batches_of(spans)]
        # The step of each batch gets copies of these. An optimizer that counts steps in them then counts only one.
        self._options: Groups = []
        self._others: dict[Any, Any] = {}
        if self._batches:
            self._options = [_copied({**group, "params": []}) for group in groups]
            self._others = _copied({key: each for key, each in state.items() if not isinstance(key, torch.Tensor)})
            self._batches[0].upload()

    def steps(self) -> Iterator[tuple[Groups, defaultdict[Any, Any]]]:
        """Yield optimizer groups and state for the step of each batch. Call `close` after the last step."""
        for number, batch in enumerate(self._batches):
            if number + 1 < len(self._batches):
                self._batches[number + 1].upload()
            yield batch.begin_step([_copied(group) for group in self._options], _copied(self._others))
            batch.download()
            if number:
                self._batches[number - 1].release()

    def close(self) -> None:
        """Wait until all state is on the host. Call this even if a step has raised an exception."""
        for batch in self._batches:
            if batch.stepping:
                batch.download()
            batch.release()
        for copy_streams in {batch.copy_streams for batch in self._batches}:
            copy_streams.down.synchronize()  # the host reads and writes state next


def _copy_streams_of(span: FlatSpan) -> CopyStreams:
    assert span.state_offload is not None and span.state_offload.copy_streams is not None
    return span.state_offload.copy_streams


def _batches_of(spans: Sequence[FlatSpan]) -> list[list[FlatSpan]]:
    found: list[list[FlatSpan]] = []
    left = 0
    for span in spans:
        left -= span.flat.nbytes
        if found and left >= 0 and _copy_streams_of(found[-1][-1]) == _copy_streams_of(span):
            found[-1].append(span)
        else:
            found.append([span])
            left = BATCH_BYTES - span.flat.nbytes
    return found


def _device_memory(on_host: torch.Tensor, device: torch.device) -> torch.Tensor:
    # The compute stream owns this memory. Before the upload stream writes, it waits for the compute stream.
    return torch.empty_like(on_host, device=device)


def _copied(values: dict[Any, Any]) -> dict[Any, Any]:
    kinds = (torch.Tensor, list, dict, set)
    return {key: copy.deepcopy(value) if isinstance(value, kinds) else value for key, value in values.items()}


# -- steps in backward --------------------------------------------------------------------------------------------


class EarlyStep(NamedTuple):
    """A step that backward started before the program called the optimizer's `step`."""

    sharded_grad: ShardedGrad
    spans: list[FlatSpan]
    options: Groups
    future: Future[Any]
    writes: int
    """Number of writes to the gradients before this step. If it differs later, the gradients were changed."""


class StepInBackward:
    """Steps units of one flat optimizer during backward, with the spans of the last call of `step`.

    Backward takes no steps before the first `step`, or if parameters, groups or state changed after the last `step`.
    """

    def __init__(self, optimizer: Any):
        self._optimizer = weakref.ref(optimizer)
        self._last_step: list[tuple[weakref.ref[ShardedGrad], FlatGrads]] = []
        self._steps: list[EarlyStep] = []
        self._unchanged: bool | None = None
        """True if only DTensors have state and the spans are current. Computed when a backward first needs it."""
        self._warned_of_options = self._warned_of_steps = False
        self._second_backward = False
        """True if a second backward was refused because it had added to gradients that were already stepped."""
        listen(self)

    def remember(self, flat_groups: FlatGroups) -> None:
        """Remember the spans of each offloaded gradient for the next backward. `step` calls this at its end."""
        by_shard = flat_groups.flat_grads_by_shard
        self._last_step = [each for each in by_shard if (grad := each[0]()) is not None and grad.offloaded]

    def gradients_ready(self, sharded_grads: Sequence[ShardedGrad]) -> None:
        """Start steps with `sharded_grads`. The engine calls this method when these gradients are complete.

        The gradients may still be in flight to the host. Each step waits for its gradients.
        """
        optimizer = self._optimizer()
        ready = {id(each): each for each in sharded_grads}
        mine = [(ready[id(grad)], flat_grads) for ref, flat_grads in self._last_step if id(grad := ref()) in ready]
        if optimizer is None or not mine:
            return  # without reading anything that another rank, in another thread, may be changing
        if self._unchanged is None:
            only_dtensors = all(isinstance(key, DTensor) for key in optimizer.state)
            self._unchanged = only_dtensors and optimizer.flat_groups().is_current(optimizer)
        if not self._unchanged:
            return
        parameters = set(map(id, optimizer_parameters(optimizer)))
        for grad, flat_grads in mine:
            if grad.belongs_to(parameters):
                self._start(optimizer, grad, flat_grads)

    def _start(self, optimizer: Any, grad: ShardedGrad, flat_grads: FlatGrads) -> None:
        if grad.stepped:
            self._second_backward = True
            raise StateError(
                f"A second backward has added to the gradients of {grad.names()} before step(). With flat(..., "
                "step_in_backward=True), the first backward has already stepped them. Call step() after every backward "
                "that synchronizes gradients; to accumulate, call set_requires_gradient_sync(False) for all backwards "
                "but the last. After an exception in backward, or to discard a batch, call the optimizer's step() or "
                "zero_grad() to continue (the steps that backward took are kept)."
            )
        grad.stepper = weakref.ref(self)
        options = [_options(group) for group in optimizer.param_groups]
        groups: Groups = [{**each, "params": []} for each in options]
        for span, gradient in flat_grads:
            groups[span.group]["params"].append(span.flat)
            span.flat.grad = gradient
        stand_in = optimizer.stand_in(groups, optimizer.flat_groups().state)

        def step() -> None:
            grad.wait_for_copy()
            with torch.no_grad():
                optimizer.plain_step(stand_in)

        writes, spans = grad.writes(), [span for span, _ in flat_grads]
        self._steps.append(EarlyStep(grad, spans, options, submit(step), writes))

    def finish(self, optimizer: Any) -> list[FlatSpan]:
        """Wait for the steps that backward has started, and return the stepped spans."""
        steps, self._steps, self._unchanged, self._second_backward = self._steps, [], None, False
        if steps:
            note_optimizer_step(optimizer)  # even if `step` is never called
        stepped: set[int] = set()
        try:
            for step in steps:
                step.future.result()
                new = set(map(id, step.sharded_grad.parameters))
                stepped |= new
                for root in roots_of(step.sharded_grad.parameters):
                    root.upload_first_units(stepped, new)
        finally:
            for step in steps:
                step.future.exception()  # waits until all have ended, with or without an error
                step.sharded_grad.stepper = None
        if steps and not self._warned_of_options and _changed(steps[0].options, optimizer.param_groups):
            self._warned_of_options = True
            warnings.warn(
                "Options of optimizer groups were changed between backward and step(). With flat(..., "
                "step_in_backward=True), backward has already used the old options. Change options before backward.",
                stacklevel=4,
            )
        return [span for step in steps for span in step.spans]

    def refuse_changed_gradients(self) -> None:
        """Raise if the program has changed gradients that backward has already stepped. `step` calls this first."""
        changed = [step.sharded_grad for step in self._steps if step.sharded_grad.writes() != step.writes]
        if changed and not self._second_backward:
            raise StateError(
                f"The gradients of {changed[0].names()} were changed between backward and step(). With "
                "step_in_backward=True, backward has already stepped them. Change gradients in hooks "
                "(register_post_accumulate_grad_hook), or leave out step_in_backward=True. To continue, call the "
                "optimizer's zero_grad(); the steps that backward took are kept."
            )

    def warn_of_steps(self) -> None:
        """Warn once that backward has stepped parameters although `step` was not called. `zero_grad` calls this."""
        if not self._warned_of_steps:
            self._warned_of_steps = True
            warnings.warn(
                "zero_grad() was called without step() after a backward. With step_in_backward=True, backward has "
                "already stepped parameters: that counts as a step, and a batch cannot be skipped. If the backward was "
                "another optimizer's and only went through this model (a generator's through the discriminator), "
                "freeze this model's parameters for it, or leave out step_in_backward=True.",
                stacklevel=4,
            )

    def finish_steps(self) -> None:
        """Wait for the steps that backward has started. If a step has failed, `finish` raises its error later."""
        for step in self._steps:
            step.future.exception()


def _options(group: dict[str, Any]) -> dict[str, Any]:
    items = ((key, value) for key, value in group.items() if key != "params")
    # Copy tensors, such as a learning rate, because they may change.
    return {key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in items}


def _changed(before: Groups, groups: Groups) -> bool:
    for one, other in zip(before, groups, strict=False):
        for key, value in one.items():
            now = other.get(key)
            if isinstance(value, torch.Tensor):
                # Tensors on a device are not compared: the host would have to wait for them.
                if value.is_cpu and isinstance(now, torch.Tensor) and now.is_cpu and not torch.equal(value, now):
                    return True
            elif now is not value and now != value:
                return True
    return False


# -- the thread for steps on the host -----------------------------------------------------------------------------

Task = tuple[Callable[[], Any], Future[Any]]


def submit(step: Callable[[], Any]) -> Future[Any]:
    """Queue `step` for the thread that runs steps on the host. The thread runs queued steps one after the other."""
    future: Future[Any] = Future()
    _tasks().put((step, future))
    return future


@cache
def _tasks() -> SimpleQueue[Task | None]:
    """Return the queue of the thread for steps on the host. The first call starts the thread.

    An executor of `concurrent.futures` would refuse tasks after the main thread ends, while other threads still train.
    """
    tasks: SimpleQueue[Task | None] = SimpleQueue()
    thread = threading.Thread(target=_run_tasks, args=(tasks,), name="unshard-host-step", daemon=True)
    thread.start()
    atexit.register(_end, tasks, thread)
    return tasks


def _end(tasks: SimpleQueue[Task | None], thread: threading.Thread) -> None:
    tasks.put(None)  # a running step must end before the interpreter does
    thread.join()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_tasks.cache_clear)  # a child process does not have the thread


def _run_tasks(tasks: SimpleQueue[Task | None]) -> None:
    _use_all_cores()
    while (task := tasks.get()) is not None:
        step, future = task
        try:
            future.set_result(step())
        except BaseException as error:
            future.set_exception(error)
        del task, step, future  # their tensors must not live until the next task


def _use_all_cores() -> None:
    """Let torch use all cores of this rank in the current thread only.

    torchrun sets the number of torch threads to 1, which is too few for a step on the host. `torch.set_num_threads`
    sets the number for the current thread and for all threads that start later. A temporary thread therefore calls it
    with the previous number, which changes only the number for threads that start later.
    """
    others = torch.get_num_threads()
    torch.set_num_threads(cores_of_this_rank())
    restoring = threading.Thread(target=torch.set_num_threads, args=(others,))
    restoring.start()
    restoring.join()


def cores_of_this_rank() -> int:
    """Return this rank's share of the cores, minus one core that stays free to launch kernels. At least 1."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    share = cores // max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    return max(1, share - 1)
