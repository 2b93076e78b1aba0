"""Recordings without a GPU: "record" runs a step and undoes its effect on tensors, "replay" runs the step again.

So tests on a CPU see when steps are recorded, replayed and dropped, and which gradients replays leave. A replay
forgets what Python did in it, as a CUDA graph would.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import torch
from torch.distributed.tensor import DTensor

from unshard.captured_step import step as captured
from unshard.captured_step.recording import Recording
from unshard.captured_step.signature import Arguments
from unshard.comm.order.check import recorded_collectives
from unshard.engine.api import recording_step
from unshard.engine.gradients import GroupGradients


@contextmanager
def simulated_recorder() -> Iterator[list[str]]:
    """Captured steps are recorded and replayed on the CPU. Yields what happens, in order."""
    happened: list[str] = []

    def record(self: Any, signature: Any, arguments: Arguments) -> Any:
        self._recorder = SimulatedRecorder(self, happened)
        return original(self, signature, arguments)

    original = captured.CapturedStep._record
    with (
        patch.object(captured, "can_record", lambda device: True),
        patch.object(captured, "Recorder", lambda device: SimulatedRecorder(None, happened)),
        patch.object(captured.CapturedStep, "_record", record),
    ):
        yield happened


class SimulatedRecorder:
    def __init__(self, step: Any, happened: list[str]):
        self._captured, self._happened = step, happened

    def running(self) -> Any:
        self._happened.append("run")
        return nullcontext()

    def wait(self) -> None:
        pass

    def record(self, step: Callable[..., Any], arguments: Arguments) -> Recording:
        self._happened.append("record")
        _refuse_ordinary_memory(self._captured._trained)
        static, gradients = arguments.static(), self._captured._trained.gradients()
        tensors = _tensors(self._captured._trained)
        before = [tensor.clone() for tensor in tensors]
        with recorded_collectives() as collectives:
            result = static.run(step)
            returned = tuple(each.detach().clone() for each in _listed(result))
        with torch.no_grad():
            for tensor, value in zip(tensors, before, strict=True):
                tensor.copy_(value)
        graph: Any = SimulatedGraph(self._captured, lambda: static.run(step), returned, gradients, self._happened)
        return Recording(static, collectives, graph, returned if len(returned) != 1 else returned[0], lambda: None)


class SimulatedGraph:
    def __init__(
        self, step: Any, run: Callable[[], Any], returned: Sequence[torch.Tensor], gradients: Any, happened: list[str]
    ):
        """`gradients`: those before the step."""
        self._captured, self._run, self._returned = step, run, returned
        self._gradients, self._happened = gradients, happened

    def replay(self) -> None:
        self._happened.append("replay")
        trained = self._captured._trained
        trained.restore(self._gradients)
        with (
            self._captured._learning_rates(),
            recording_step(),  # as the recording: the device repeats what it did
            patch.object(GroupGradients, "release_idle", lambda gradients: None),  # on the host nothing runs
        ):
            for mine, new in zip(self._returned, _listed(self._run()), strict=True):
                mine.copy_(new.detach())
        trained.restore(self._gradients)

    def reset(self) -> None:
        self._happened.append("drop")


def _refuse_ordinary_memory(trained: Any) -> None:
    """No gradient or all-gather may own such memory: a graph would write there after others got it."""
    for group in (group for unit in trained.units for group in unit.param_groups):
        for unsharded in group._by_precision.values():
            assert not unsharded.plan.staging.held, group.unit_name
            assert unsharded.buffer.stays or not unsharded.buffer.held, group.unit_name
        for grad in (grad for reduction in group.gradients.reductions.values() for grad in reduction.grads):
            assert not (grad.idle and grad.buffer.held and not grad.buffer.stays), group.unit_name


def _listed(returned: Any) -> list[torch.Tensor]:
    found = list(returned) if isinstance(returned, tuple | list) else [returned]
    return [each for each in found if isinstance(each, torch.Tensor)]


def _tensors(trained: Any) -> list[torch.Tensor]:
    """All that a step may write."""
    parameters = trained.parameters
    entries = [entry for each in trained.optimizers for entry in each.state.values() if isinstance(entry, dict)]
    state = [value for entry in entries for value in entry.values()]
    gradients = [each.grad for each in parameters if each.grad is not None]
    sums = [
        view
        for unit in trained.units
        for group in unit.param_groups
        if group.gradients.unreduced is not None
        for view in group.gradients.unreduced.sums().values()
    ]
    partial = [
        flat
        for unit in trained.units
        for group in unit.param_groups
        for reduction in group.gradients.reductions.values()
        if reduction.has_partial
        for flat in reduction.partial.flats
    ]
    used = trained.scaler is not None and trained.scaler._scale is not None
    scaler = [trained.scaler._scale, trained.scaler._growth_tracker] if used else []
    buffers = [each for module in trained._modules for each in module.buffers(recurse=False)]
    found = [*parameters, *buffers, *state, *gradients, *sums, *partial, *scaler]
    tensors = [each for each in found if isinstance(each, torch.Tensor)]
    return [each._local_tensor if isinstance(each, DTensor) else each for each in tensors]
