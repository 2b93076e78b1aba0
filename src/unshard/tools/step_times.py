"""Shows where the time of real steps goes: computation, collectives, and waits for collectives, by unit and rank."""

from __future__ import annotations

import gzip
import json
import logging
import os
import statistics
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from .. import __version__
from ..comm.agreement import gathered
from ..engine.api import FSDPState, Unit, has_spare_queues, state_of
from ..errors import ArgumentError, StateError
from .precision_report import table
from .step_recorder import ALL_GATHER, REDUCE, Clock, DeviceClock, HostClock, Owner, StepRecorder, StepSpans

_log = logging.getLogger("unshard")

ROOT = "(root)"
_NOTABLE = 0.1  # share of a step
_WARM_UP = 2  # steps in which memory is allocated, and in which ranks compare the order of all collectives
_CALL = "gather the times at the end of unshard.tools.timeline, whose block all ranks must enter and leave"
_HEAD = ("unit", "forward", "backward", ALL_GATHER, "exposed", REDUCE, "exposed")
_THREADS = {"compute": 0, ALL_GATHER: 1, REDUCE: 2}
_EXPLANATION = (
    "Milliseconds per step. Exposed: the computation waited for the collective to its left. (other): loss, optimizer, "
    "input data."
)
_CAPTURED = "Captured steps are not measured: call the step itself, not what unshard.capture returned."
_FOR_GATHERS = (
    "Try reshard_after_forward=False if memory allows (one all-gather less), set_modules_to_forward_prefetch and "
    "set_modules_to_backward_prefetch to start all-gathers earlier, a 16-bit param_dtype, or larger batches. If the "
    "unit computes for a short time only, make units larger."
)
_FOR_REDUCTIONS = (
    "Try a 16-bit reduce_dtype or wire_dtype, gradient accumulation without synchronization, larger batches, or, if "
    "the unit computes for a short time only, larger units."
)


@dataclass(frozen=True)
class UnitTimes:
    """Milliseconds per step. `exposed`: the computation waited for the collective meanwhile."""

    name: str
    forward_ms: float = 0.0
    backward_ms: float = 0.0
    all_gather_ms: float = 0.0
    all_gather_exposed_ms: float = 0.0
    reduce_ms: float = 0.0
    reduce_exposed_ms: float = 0.0

    @property
    def exposed_ms(self) -> float:
        return self.all_gather_exposed_ms + self.reduce_exposed_ms


@dataclass(frozen=True)
class RankTimes:
    """Milliseconds per step on one rank."""

    rank: int
    step_ms: float
    exposed_ms: float

    @property
    def busy_ms(self) -> float:
        """The part of the step in which the rank did not wait for collectives."""
        return self.step_ms - self.exposed_ms


class Timeline:
    """A context manager that measures the steps inside its block. `str()` returns a report."""

    def __init__(self, model: nn.Module, *, trace: Any = None):
        states = _states_in(model)
        devices = {state.unit.device for state in states}
        if len(devices) > 1:
            names = ", ".join(sorted(map(str, devices)))
            raise ArgumentError(f"timeline takes a model on one device, but its units are on {names}.")
        (device,) = devices
        self.device = device.type
        self.rank = dist.get_rank() if dist.is_initialized() else 0
        self.warm_up_steps = 0
        """How many steps are left out: the first two if the model had not run before, and more steps followed."""
        self.captured = False
        """True if a step was captured inside the block. Captured steps are not measured."""
        self.units: list[UnitTimes] = []
        """The times of each unit on this rank, per step."""
        self.ranks: list[RankTimes] = []
        """The times of all ranks, per step. Only those of this rank if an exception left the block. Empty before."""
        self.each_step: list[RankTimes] = []
        """The times of each step on this rank."""
        self._states = states
        self._is_cold = not all(state.is_initialized for state in states)
        self._trace = None if trace is None else _checked(trace)
        self._failed = False
        self._clock = _clock_for(device, states)
        self._recorder: StepRecorder | None = None
        self._sums: defaultdict[Any, float] = defaultdict(float)
        """Milliseconds by `Owner`, and by unit and kind of collective."""
        self._spans: list[tuple[str, Unit, str, float, float]] = []
        self._began = 0.0

    def __enter__(self) -> Timeline:
        if self._recorder is not None or not self._states:
            raise StateError("This timeline has been used. Create another one for each block.")
        self._clock.synchronize()
        self._recorder = StepRecorder(_ancestors(self._states), self._clock, self._add)
        self._began = time.time()
        self._recorder.start()
        return self

    def __exit__(self, kind: Any, *exception: Any) -> None:
        assert self._recorder is not None
        self._recorder.stop(failed=kind is not None)
        self.captured = self._recorder.saw_recording
        names = {state.unit: state.unit.name or ", ".join(paths) for state, paths in self._states.items()}
        for unit, name in names.items():
            figures = (self._sums[key] / max(1, self.steps) for key in _keys_of(unit))
            self.units.append(UnitTimes(name or ROOT, *figures))
        self.ranks = [RankTimes(self.rank, self.step_ms, self.exposed_ms)]
        if self._trace is not None:
            self._write_trace(self._trace, names)
        states, self._failed = self._states, True
        # The timeline keeps neither the units nor their parameters alive.
        self._states, self._sums, self._spans, self._recorder = {}, defaultdict(float), [], None
        self._clock = HostClock()
        if kind is None:
            self._gather(states)
            self._failed = False

    # -- figures --------------------------------------------------------------------------------------------

    @property
    def steps(self) -> int:
        return len(self.each_step)

    @property
    def step_ms(self) -> float:
        return _mean([each.step_ms for each in self.each_step])

    @property
    def exposed_ms(self) -> float:
        """Milliseconds per step in which this rank waited for collectives of units."""
        return _mean([each.exposed_ms for each in self.each_step])

    @property
    def other_ms(self) -> float:
        """Milliseconds per step outside the units: loss, optimizer, input data and everything else."""
        return self.step_ms - sum(each.forward_ms + each.backward_ms + each.exposed_ms for each in self.units)

    @property
    def slowest(self) -> int | None:
        """The rank that was busy longest. The other ranks waited for it. None if the other ranks are unknown."""
        if not self.steps or not self.ranks or self._failed:
            return None
        return max(self.ranks, key=lambda each: each.busy_ms).rank

    def _add(self, step: StepSpans) -> None:
        if self._is_cold and self.steps == 1 and self.warm_up_steps < _WARM_UP:
            self.warm_up_steps += 1
            self.each_step.clear()
            self._sums.clear()
        exposed, sums = 0.0, self._sums
        for owner, begin, end in step.computing:
            sums[owner] += end - begin
            if owner is not None and owner.waits:
                exposed += end - begin
        for unit, kind, begin, end in step.transfers:
            sums[unit, kind] += end - begin
        self.each_step.append(RankTimes(self.rank, step.duration, exposed))
        if self._trace is not None:
            self._spans += [
                ("compute", each.unit, "wait for " * each.waits + each.part, step.begin + begin, end - begin)
                for each, begin, end in step.computing
                if each is not None
            ]
            self._spans += [(kind, unit, kind, step.begin + at, end - at) for unit, kind, at, end in step.transfers]

    def _gather(self, states: Iterable[FSDPState]) -> None:
        """Get the times of the other ranks: one small all-gather, or two with replicas."""
        groups = [group for state in states for group in state.unit.param_groups]
        group = max(groups, key=lambda each: each.shards.world * each.replicas.world)
        transports = [each for each in (group.shards, group.replicas) if each.world > 1]
        if not all(each.traits.gathers for each in transports):
            return
        own = self.ranks[0]
        device = next(iter(states)).unit.device
        rows = torch.tensor([own.rank, own.step_ms, own.exposed_ms], device=device)
        for each in transports:
            if each.order is not None:
                each.order.meet(_CALL)
            each.announce(_CALL)
            rows = gathered(each, rows).flatten()
        found = {int(rank): RankTimes(int(rank), *times) for rank, *times in rows.view(-1, 3).tolist()}
        self.ranks = [found[rank] for rank in sorted(found)]

    # -- reports --------------------------------------------------------------------------------------------

    def to_dict(self) -> dict[str, Any]:
        return {
            "kind": "timeline",
            "unshard": __version__,
            "steps": self.steps,
            "device": self.device,
            "rank": self.rank,
            "step_ms": self.step_ms,
            "exposed_ms": self.exposed_ms,
            "other_ms": self.other_ms,
            "ranks": [asdict(each) for each in self.ranks],
            "slowest": self.slowest,
            "units": [asdict(each) for each in self.units],
            "each_step": [{"step_ms": each.step_ms, "exposed_ms": each.exposed_ms} for each in self.each_step],
            "advice": self.advice,
        }

    def __str__(self) -> str:
        if self._recorder is not None:
            return "The block has not ended. Read the times after it."
        if not self.steps:
            return f"No steps were measured. Run training steps inside the block. {_CAPTURED}"
        left_out = f" Warm-up steps that are left out: {self.warm_up_steps}." if self.warm_up_steps else ""
        left_out += f" {_CAPTURED}" if self.captured else ""
        head = (
            f"{self.steps} step{'s' * (self.steps > 1)} on rank {self.rank} ({self.device}), {self.step_ms:.2f} ms per "
            f"step. For {self.exposed_ms:.2f} ms ({self.exposed_ms / self.step_ms:.0%}), the computation waited for "
            f"communication.{left_out}"
        )
        rows = [[each.name, *(f"{figure:.2f}" for figure in _figures(each))] for each in self.units]
        rows.append(["(other)", f"{self.other_ms:.2f}", *[""] * 5])
        lines = [head, "", *table(_HEAD, rows, numbers=range(1, 7)), "", _EXPLANATION]
        if self._failed:
            lines += ["", "The times of the other ranks are unknown, because an exception left the block."]
        if len(self.ranks) > 1:
            times = [[str(e.rank), *(f"{t:.2f}" for t in (e.step_ms, e.busy_ms, e.exposed_ms))] for e in self.ranks]
            lines += ["", *table(("rank", "step", "busy", "exposed"), times, numbers=range(4))]
        return "\n".join([*lines, *([""] if self.advice else []), *(f"- {each}" for each in self.advice)])

    @property
    def advice(self) -> list[str]:
        """What to try, if a rank is slower than the others, or if waits take a notable part of a step."""
        if not self.steps or not self.ranks:
            return []
        found, threshold = [], _NOTABLE * self.step_ms
        slow = next((each for each in self.ranks if each.rank == self.slowest), self.ranks[0])
        usual = statistics.median([each.busy_ms for each in self.ranks if each is not slow] or [slow.busy_ms])
        if slow.busy_ms - usual > threshold:
            found.append(
                f"Rank {slow.rank} is the slowest: it is busy for {slow.busy_ms:.2f} ms per step, the others for "
                f"{usual:.2f} ms (median). The others wait for it. Compare its input data, batch sizes and device. "
                "Its own report shows which unit takes longer there."
            )
            if slow.rank != self.rank:
                return found  # this rank waits for that one, whatever its units send
        most = max(self.units, key=lambda each: each.exposed_ms)
        if self.exposed_ms > threshold:
            gathers = most.all_gather_exposed_ms >= most.reduce_exposed_ms
            found.append(
                f"Unit {most.name!r} has the largest exposed time: {most.all_gather_exposed_ms:.2f} ms for all-gathers "
                f"and {most.reduce_exposed_ms:.2f} ms for reductions, per step. "
                + (_FOR_GATHERS if gathers else _FOR_REDUCTIONS)
            )
        return found

    def _write_trace(self, path: Path, names: dict[Unit, str]) -> None:
        """Write the spans of all measured steps, the warm-up included, in the format of Chrome and Perfetto."""
        compressed = path.suffix == ".gz"
        path = path.with_suffix("") if compressed else path
        path = path.with_name(f"{path.stem}.rank{self.rank}{path.suffix or '.json'}{'.gz' * compressed}")
        named = [("process_name", 0, f"rank {self.rank}"), *(("thread_name", n, name) for name, n in _THREADS.items())]
        events: list[dict[str, Any]] = [
            {"ph": "M", "pid": self.rank, "tid": thread, "name": what, "args": {"name": name}}
            for what, thread, name in named
        ]
        for thread, unit, what, begin, duration in self._spans:
            place = {"pid": self.rank, "tid": _THREADS[thread], "ts": self._began * 1e6 + begin * 1e3}
            name = f"{what} {names[unit] or ROOT}"
            events.append({"ph": "X", "name": name, "cat": thread, "dur": duration * 1e3, **place})
        text = json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}).encode()
        try:
            path.write_bytes(gzip.compress(text) if compressed else text)
        except OSError as error:  # the times are not lost
            _log.warning("timeline could not write its trace: %s", error)


def timeline(model: nn.Module, *, trace: Any = None) -> Timeline:
    """Return a context manager that measures where the time of training steps goes, without a profiler.

    All ranks of the model must enter and leave the block. If no exception leaves the block, its end issues one small
    all-gather (two with replicas) and blocks the host until the device has completed the steps. If `trace` is a path,
    each rank writes a trace for Chrome or Perfetto, with the rank in the name: `trace.json` becomes `trace.rank0.json`,
    and `trace.json.gz`, which is compressed, `trace.rank0.json.gz`.

    Example::

        with timeline(model) as times:
            train(model)
        print(times)
    """
    return Timeline(model, trace=trace)


# -- helpers ------------------------------------------------------------------------------------------------


def _states_in(model: nn.Module) -> dict[FSDPState, list[str]]:
    if not isinstance(model, nn.Module):
        raise ArgumentError(f"timeline takes a sharded model, got {type(model).__name__}.")
    found: dict[FSDPState, list[str]] = {}
    for name, module in model.named_modules():
        if state := state_of(module):
            found.setdefault(state, []).append(name)
    if not found:
        raise ArgumentError(f"{type(model).__name__} has no sharded module. Apply fully_shard before timeline.")
    return found


def _ancestors(states: dict[FSDPState, list[str]]) -> dict[Unit, set[Unit]]:
    """Return the units, each with the units whose modules contain it."""

    def is_inside(name: str, outer: str) -> bool:
        return not outer or name.startswith(f"{outer}.")

    return {
        state.unit: {
            other.unit
            for other, outer in states.items()
            if other is not state and any(is_inside(name, each) for name in names for each in outer)
        }
        for state, names in states.items()
    }


def _checked(trace: Any) -> Path:
    if not isinstance(trace, str | os.PathLike):
        raise ArgumentError(f"trace must be a path, got {type(trace).__name__}.")
    path = Path(trace)
    if not path.name:
        raise ArgumentError(f"trace must be the path of a file, got {trace!r}.")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ArgumentError(f"trace must be in a folder that this rank can create: {error}.") from error
    return path


def _clock_for(device: torch.device, states: Iterable[FSDPState]) -> Clock:
    if device.type == "cpu":
        return HostClock()
    groups = [group for state in states for group in state.unit.param_groups]
    transports = [each for group in groups for each in (group.shards, group.replicas) if each.world > 1]
    blocks = os.environ.get("TORCH_NCCL_BLOCKING_WAIT", "0") not in ("", "0")
    waits = has_spare_queues() and not blocks
    return DeviceClock(device, waits and all(each.traits.waits_in_stream for each in transports))


def _keys_of(unit: Unit) -> list[Any]:
    """Return the keys of the sums of a unit, in the order of the fields of `UnitTimes`."""
    computing: list[Any] = [Owner(unit, "forward"), Owner(unit, "backward")]
    return [*computing, (unit, ALL_GATHER), Owner(unit, ALL_GATHER, True), (unit, REDUCE), Owner(unit, REDUCE, True)]


def _mean(figures: Sequence[float]) -> float:
    return sum(figures) / len(figures) if figures else 0.0


def _figures(unit: UnitTimes) -> list[float]:
    return [figure for figure in asdict(unit).values() if not isinstance(figure, str)]
