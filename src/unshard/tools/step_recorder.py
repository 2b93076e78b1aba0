"""Records when units compute and when their collectives run, with events of the device or with the host's clock."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ..engine.api import (
    StreamEvent,
    Unit,
    WatchedWork,
    is_recording,
    observer,
    param_group_of,
    reduce_stream,
    timing_stream,
)
from ..names import optimizer_parameters
from ..torch_private import inside_backward

ALL_GATHER, REDUCE = "all-gather", "reduce"
_CALL, _BACKWARD = "call", "backward"

Mark = Any
"""A point in time: an event on a stream, or seconds of the host's clock."""


class HostClock:
    """Marks of a model on the CPU, where the host computes and waits."""

    computes = True
    """True if what the host does between two marks is computation, such as casts before an all-gather."""

    def mark(self) -> Mark:
        return time.perf_counter()

    def end_of(self, kind: str, work: Any) -> Mark | None:
        return None  # known only when the host has waited

    def since(self, begin: Mark, marks: list[Mark]) -> list[float]:
        """Return the milliseconds from `begin` to each of `marks`."""
        return [(mark - begin) * 1e3 for mark in marks]

    def has_passed(self, mark: Mark) -> bool:
        return True

    def reuse(self, marks: list[Mark]) -> None:
        pass

    def synchronize(self) -> None:
        pass


class DeviceClock:
    """Marks of a model on a device: events that are recorded on the current stream, without waiting."""

    computes = False

    def __init__(self, device: torch.device, waits_in_stream: bool):
        """`waits_in_stream` is True if another stream may wait for the works of process groups, too."""
        self._device, self._waits_in_stream = device, waits_in_stream
        self._free: list[StreamEvent] = []

    def mark(self) -> Mark:
        return (self._free.pop() if self._free else StreamEvent(self._device, timing=True)).record()

    def end_of(self, kind: str, work: Any) -> Mark | None:
        """Record an event behind `work`, so that no stream that runs kernels waits.

        Return None for works that may block the host, or that run code in their first wait.
        """
        if isinstance(work, StreamEvent) and (stream := reduce_stream(self._device)) is not None:
            with stream.inside():  # this stream has just been told to wait for the reduction
                return self.mark()
        if not (self._waits_in_stream and type(work) is dist.Work):
            return None
        with timing_stream(self._device, kind).inside():
            work.wait()
            return self.mark()

    def since(self, begin: Mark, marks: list[Mark]) -> list[float]:
        first = begin.event
        return [first.elapsed_time(mark.event) for mark in marks]

    def has_passed(self, mark: Mark) -> bool:
        return mark.event.query()

    def reuse(self, marks: list[Mark]) -> None:
        self._free += {id(each): each for each in marks}.values()

    def synchronize(self) -> None:
        torch.accelerator.synchronize(self._device)


Clock = HostClock | DeviceClock


class Transfer(NamedTuple):
    """A collective, or a wait for it if it is in `Step.cuts`."""

    unit: Unit
    kind: str
    issued: Mark
    ended: Mark


class Owner(NamedTuple):
    """What the compute stream does: `part` is forward or backward, or the kind of collective that it waits for."""

    unit: Unit
    part: str
    waits: bool = False


@dataclass
class Step:
    """The marks of one step."""

    begin: Mark
    cuts: list[tuple[Mark, Owner | None]] = field(default_factory=list)
    """Each mark begins a section of the compute stream, which ends at the next mark. The last one ends the step."""
    transfers: list[Transfer] = field(default_factory=list)
    ends: dict[Any, Mark] = field(default_factory=dict)
    """The last mark of each stream on which ends of collectives are recorded."""


@dataclass
class StepSpans:
    """The measured times of one step in milliseconds, relative to its begin."""

    begin: float
    """The begin of the step, relative to the begin of the recording."""
    duration: float
    computing: list[tuple[Owner | None, float, float]]
    transfers: list[tuple[Unit, str, float, float]]


class StepRecorder(observer.Observer):
    """Cuts the time of the compute stream into sections, each of which belongs to one unit.

    Sections of a unit inside another one belong to the inner unit only. A step begins with the first forward after an
    optimizer step.
    """

    on_compute_stream = False

    def __init__(self, ancestors: Mapping[Unit, set[Unit]], clock: Clock, settled: Callable[[StepSpans], None]):
        """`ancestors` has the units to watch, each with the units around it. Steps are given to `settled` later."""
        self._ancestors, self._clock, self._settled = ancestors, clock, settled
        self._owners: dict[Any, Unit | None] = {}
        self._step: Step | None = None
        self._ended: deque[Step] = deque()
        self._stepped: Mark | None = None
        """The end of the last optimizer step, or None if none has ended in this step."""
        self._stack: list[tuple[str, Owner]] = []
        self.saw_recording = False
        """True if a step was recorded as a CUDA graph. Events inside a recording would measure nothing."""
        self._entered: Owner | None = None
        """Whose section begins at the next mark: a stage that has just begun has not used the compute stream."""
        self._stages = 0  # one can be part of another
        self._fresh: Mark | None = None
        """The earliest mark since which nothing was queued on the compute stream but casts. None outside of stages."""

    def start(self) -> None:
        self._origin = self._clock.mark()
        observer.add(self)

    def stop(self, failed: bool) -> None:
        """End the last step and measure all steps. If `failed`, skip steps that the device has not completed."""
        observer.remove(self)
        if self._step is not None and (not failed or self._stepped is not None):
            self._end_step(self._clock.mark() if self._stepped is None else self._stepped)
        if not failed:
            self._clock.synchronize()
        while self._ended and (not failed or self._has_passed(self._ended[0])):
            self._settle(self._ended.popleft())
        self._step = None
        self._owners.clear()

    # -- steps ----------------------------------------------------------------------------------------------

    def stepped(self, optimizer: Any) -> None:
        if is_recording():
            return
        if self._step is not None and any(self._is_ours(each) for each in optimizer_parameters(optimizer)):
            if self._stepped is not None:
                self._clock.reuse([self._stepped])
            self._stepped = self._clock.mark()

    def _is_ours(self, parameter: Any) -> bool:
        group = param_group_of(parameter)
        return group is not None and group.unit() in self._ancestors

    def _begin_step(self) -> None:
        if self._step is not None:
            if self._stepped is None:
                return  # another micro-batch
            self._end_step(self._clock.mark())
            self._clock.reuse([self._stepped])
            self._stepped = None
        # The last step may still run on the device.
        while len(self._ended) > 1 and self._has_passed(self._ended[0]):
            self._settle(self._ended.popleft())
        begin = self._clock.mark()
        self._step = Step(begin, [(begin, None)])
        self._stack.clear()

    def _end_step(self, mark: Mark) -> None:
        assert self._step is not None
        self._step.cuts.append((mark, None))
        self._ended.append(self._step)

    def _has_passed(self, step: Step) -> bool:
        return all(map(self._clock.has_passed, [step.cuts[-1][0], *step.ends.values()]))

    def _settle(self, step: Step) -> None:
        cuts, owners = zip(*step.cuts, strict=True)
        marks = {id(mark): mark for mark in cuts}
        for _, _, issued, ended in step.transfers:
            marks[id(issued)], marks[id(ended)] = issued, ended
        at = dict(zip(marks, self._clock.since(step.begin, list(marks.values())), strict=True))
        moments = [at[id(mark)] for mark in cuts]
        computing = [each for each in zip(owners, moments, moments[1:], strict=False) if each[2] > each[1]]
        free, transfers = {ALL_GATHER: float("-inf"), REDUCE: float("-inf")}, []
        for unit, kind, issued, ended in step.transfers:
            begin, end = max(at[id(issued)], free[kind]), at[id(ended)]  # one at a time, in order
            free[kind] = max(end, free[kind])
            transfers.append((unit, kind, begin, max(begin, end)))
        (begin,) = self._clock.since(self._origin, [step.begin])
        self._settled(StepSpans(begin, moments[-1], computing, transfers))
        self._clock.reuse(list(marks.values()))

    def _cut(self, owner: Owner | None, mark: Mark | None = None) -> Mark | None:
        if self._step is None:
            return None
        mark = self._clock.mark() if mark is None else mark
        self._step.cuts.append((mark, owner))
        self._entered = self._fresh = None
        return mark

    @property
    def _owner(self) -> Owner | None:
        return self._stack[-1][1] if self._stack else None

    # -- stages of units ------------------------------------------------------------------------------------

    def entering(self, stage: str, unit: Unit) -> None:
        if unit not in self._ancestors:
            return
        if is_recording():
            self.saw_recording = True
            return
        self._stages, self._fresh = self._stages + 1, None
        if stage == "pre_forward":
            backward = inside_backward()  # a checkpoint recomputes the unit
            if not self._stack and not backward:
                self._begin_step()
            self._push(_CALL, Owner(unit, "backward" if backward else "forward"))
        elif stage == "pre_backward" and not any(kind == _BACKWARD and each.unit is unit for kind, each in self._stack):
            # A unit whose inputs need no gradient has no post-backward hook. The next unit's backward ends it.
            while self._stack and self._stack[-1][0] == _BACKWARD and not self._is_around(self._stack[-1][1], unit):
                self._stack.pop()
            self._push(_BACKWARD, Owner(unit, "backward"))
        elif stage == "root_post_backward":
            self._end_backward()
            self._push(_BACKWARD, Owner(unit, "backward"))

    def leaving(self, stage: str, unit: Unit) -> None:
        if unit in self._ancestors and not is_recording():
            if stage == "post_forward":
                self._pop(_CALL, unit)
            elif stage == "post_backward":
                self._pop(_BACKWARD, unit)
            elif stage == "root_post_backward":
                self._end_backward()
                self._cut(self._owner)
            elif self._entered is not None:
                self._cut(self._entered)
            self._stages, self._fresh = self._stages - 1, None

    def _is_around(self, outer: Owner, unit: Unit) -> bool:
        return outer.unit in self._ancestors[unit]

    def _push(self, kind: str, owner: Owner) -> None:
        self._stack.append((kind, owner))
        self._entered = owner

    def _pop(self, kind: str, unit: Unit) -> None:
        for number in reversed(range(len(self._stack))):
            if self._stack[number][0] == kind and self._stack[number][1].unit is unit:
                del self._stack[number:]
                self._cut(self._owner, self._fresh)
                return

    def _end_backward(self) -> None:
        self._stack = [each for each in self._stack if each[0] == _CALL]

    # -- collectives ----------------------------------------------------------------------------------------

    def issued(self, work: WatchedWork) -> None:
        unit = self._unit_of(work.params)
        if unit is not None and self._step is not None and not is_recording():
            kind, issued = ALL_GATHER if work.kind == ALL_GATHER else REDUCE, self._clock.mark()
            ended = self._clock.end_of(kind, work.work)
            if ended is not None:
                self._step.transfers.append(Transfer(unit, kind, issued, ended))
                self._step.ends[kind, type(work.work)] = ended
            work.notes[self] = unit, kind, issued, ended is not None
            if self._entered is not None:
                self._cut(self._entered, issued)
            if self._fresh is None or self._clock.computes:  # otherwise only the host was busy since that mark
                self._fresh = issued if self._stages else None

    def waiting(self, work: WatchedWork) -> None:
        if (noted := work.notes.get(self)) is not None:
            unit, kind, *_ = noted
            self._cut(Owner(unit, kind, waits=True), self._fresh)

    def waited(self, work: WatchedWork) -> None:
        if (noted := work.notes.pop(self, None)) is not None:
            unit, kind, issued, is_known = noted
            ended = self._cut(self._owner)
            if not is_known and self._step is not None:
                self._step.transfers.append(Transfer(unit, kind, issued, ended))

    def _unit_of(self, params: Any) -> Unit | None:
        if params[0] not in self._owners:
            self._owners = {param: unit for unit in self._ancestors for param in unit.params}
            self._owners.setdefault(params[0], None)  # of another model
        return self._owners[params[0]]
