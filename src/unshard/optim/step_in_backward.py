"""Steps of offloaded units during backward, each as soon as its gradients are on the host.

They run in a thread of their own, which also runs ordinary steps on the host, with all cores that this rank may use.
"""

from __future__ import annotations

import atexit
import os
import threading
import warnings
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import cache
from queue import SimpleQueue
from typing import Any

import torch

from ..engine.api import ShardedGrad, listen, note_optimizer_step, roots_of
from ..errors import StateError
from ..names import optimizer_parameters
from .flat_groups import FlatGrads, FlatGroups
from .flat_segments import FlatSegment


@dataclass(frozen=True)
class EarlyStep:
    """A step that was taken, or is being taken, before the optimizer's `step` was called."""

    shard: ShardedGrad
    segments: list[FlatSegment]
    options: list[dict[str, Any]]
    future: Future[Any]
    writes: int
    """The number of writes to the gradients before the step."""


class StepInBackward:
    """Belongs to one flat optimizer. Repeats what its last step did with a sharded gradient, when that is ready again.

    So the first step of the optimizer is an ordinary one, and so is the step of every unit that the last one did not
    find as it is now.
    """

    def __init__(self, optimizer: Any):
        self._optimizer = weakref.ref(optimizer)
        self._last_step: list[tuple[weakref.ref[ShardedGrad], FlatGrads]] = []
        self._steps: list[EarlyStep] = []
        self._unchanged: bool | None = None
        """Whether the optimizer is as its last step left it; found once per backward."""
        self._warned_of_options = self._warned_of_steps = False
        self._second_backward = False
        """Whether a second backward has added to gradients, and was refused."""
        listen(self)

    def remember(self, flat_groups: FlatGroups) -> None:
        """After a step: which segments the offloaded gradients were for."""
        by_shard = flat_groups.flat_grads_by_shard()
        self._last_step = [(weakref.ref(shard), flat_grads) for shard, flat_grads in by_shard if shard.offloaded]

    def gradients_ready(self, shards: Sequence[ShardedGrad]) -> None:
        """The engine calls this when gradients are complete. They may still be on their way to the host."""
        optimizer = self._optimizer()
        ready = {id(shard): shard for shard in shards}
        mine = [(ready[id(shard)], grads) for known, grads in self._last_step if id(shard := known()) in ready]
        if optimizer is None or not mine:
            return  # nothing is looked at that another rank, in another thread, may be changing
        if self._unchanged is None:
            self._unchanged = optimizer.flat_groups().is_unchanged(optimizer)
        if not self._unchanged:
            return
        parameters = set(map(id, optimizer_parameters(optimizer)))
        for shard, flat_grads in mine:
            if shard.belongs_to(parameters):
                self._start(optimizer, shard, flat_grads)

    def _start(self, optimizer: Any, shard: ShardedGrad, flat_grads: FlatGrads) -> None:
        if shard.stepped:
            self._second_backward = True
            raise StateError(
                f"A second backward has added to the gradients of {shard.names()} before step(), and with flat(..., "
                "step_in_backward=True) the first one has stepped them already. Call step() after every backward that "
                "synchronises gradients; accumulate with set_requires_gradient_sync(False) in all of them but the "
                "last. After an exception in backward, or for a batch you do not want, call the optimizer's step() or "
                "zero_grad() to go on (the steps that backward took are kept)."
            )
        shard.stepper = weakref.ref(self)
        options = [_options(group) for group in optimizer.param_groups]
        groups = [{**each, "params": []} for each in options]
        for segment, gradient in flat_grads:
            groups[segment.group]["params"].append(segment.flat)
            segment.flat.grad = gradient
        stand_in = optimizer.stand_in(groups, optimizer.flat_groups().state)

        def step() -> None:
            shard.wait_for_copy()
            with torch.no_grad():
                optimizer.plain_step(stand_in)

        writes = shard.writes()
        segments = [segment for segment, _ in flat_grads]
        self._steps.append(EarlyStep(shard, segments, options, submit(step), writes))

    def finish(self, optimizer: Any) -> list[FlatSegment]:
        """Wait for the steps of this backward; returns the segments that were stepped."""
        steps, self._steps, self._unchanged, self._second_backward = self._steps, [], None, False
        if steps:
            note_optimizer_step(optimizer)  # even if `step` is never called
        stepped: set[int] = set()
        try:
            for step in steps:
                step.future.result()
                new = set(map(id, step.shard.parameters()))
                stepped |= new
                for root in roots_of(step.shard.parameters()):
                    root.upload_first_units(stepped, new)
        finally:
            for step in steps:
                step.future.exception()  # waits: all of them have ended, with or without an error
                step.shard.stepper = None
        if steps and not self._warned_of_options and _changed(steps[0].options, optimizer.param_groups):
            self._warned_of_options = True
            warnings.warn(
                "Options of parameter groups were changed between backward and step(). With flat(..., "
                "step_in_backward=True) backward steps units with the options of that time: change them before "
                "backward.",
                stacklevel=4,
            )
        return [segment for step in steps for segment in step.segments]

    def refuse_changed_gradients(self) -> None:
        """Before `step`: gradients that were changed after backward has stepped them."""
        changed = [step.shard for step in self._steps if step.shard.writes() != step.writes]
        if changed and not self._second_backward:
            raise StateError(
                f"The gradients of {changed[0].names()} were changed between backward and step(), and with "
                "step_in_backward=True backward has stepped them as they were. Change them in hooks "
                "(register_post_accumulate_grad_hook), or leave out step_in_backward=True. To go on, call the "
                "optimizer's zero_grad(); the steps that backward took are kept."
            )

    def warn_of_steps(self) -> None:
        """In `zero_grad`, if backward has stepped parameters and `step` was not called."""
        if not self._warned_of_steps:
            self._warned_of_steps = True
            warnings.warn(
                "zero_grad() was called without step() after a backward, and with step_in_backward=True backward has "
                "stepped parameters already: that counts as a step. A batch cannot be left out. If the backward was "
                "another optimizer's and only went through this model (as a generator's does through the "
                "discriminator), freeze this model's parameters for it, or leave out step_in_backward=True.",
                stacklevel=4,
            )

    def finish_steps(self) -> None:
        """Wait for the steps, because parameters are about to be read. `step` raises what has failed."""
        for step in self._steps:
            step.future.exception()


def _options(group: dict[str, Any]) -> dict[str, Any]:
    """The options of a group, with copies of tensors (a learning rate may be one): they may change during the step."""
    items = ((key, value) for key, value in group.items() if key != "params")
    return {key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in items}


def _changed(before: list[dict[str, Any]], groups: list[dict[str, Any]]) -> bool:
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
    """Run a step in the thread, after those submitted before."""
    future: Future[Any] = Future()
    _tasks().put((step, future))
    return future


@cache
def _tasks() -> SimpleQueue[Task | None]:
    """The queue of the thread, which starts with the first call.

    Not an executor of `concurrent.futures`: that refuses tasks once the main thread has ended, and other threads may
    still train.
    """
    tasks: SimpleQueue[Task | None] = SimpleQueue()
    thread = threading.Thread(target=_run_tasks, args=(tasks,), name="unshard-host-step", daemon=True)
    thread.start()
    atexit.register(_end, tasks, thread)
    return tasks


def _end(tasks: SimpleQueue[Task | None], thread: threading.Thread) -> None:
    """At the end of the program, after all its threads: a running step must end before the interpreter does."""
    tasks.put(None)
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
    """Set the number of torch's threads for this thread, and leave it as it is for others.

    Each thread has a number of its own, and torch gives the last one set to threads that start later. Programs under
    torchrun have one, which is enough for computation on a device and too few for a step on the host.
    """
    others = torch.get_num_threads()
    torch.set_num_threads(cores_of_this_rank())
    restoring = threading.Thread(target=torch.set_num_threads, args=(others,))
    restoring.start()
    restoring.join()


def cores_of_this_rank() -> int:
    """This rank's share of the cores, without the one that launches kernels on the device."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    share = cores // max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    return max(1, share - 1)
