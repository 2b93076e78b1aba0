"""How things are measured: clocks, peaks of memory, and quiet while a clock runs."""

from __future__ import annotations

import contextlib
import gc
import statistics
import time
from collections.abc import Callable, Iterator

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from .loopback import METER
from .places import Place
from .sides import Training
from .traces import Event, events_of

MS, MIB = 1e3, 2**20
_PEAK_STEPS = 3  # the first steps create optimizer state and learn the order; the last of them is looked at
_MARK = "benchmarks.last_step"


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """No garbage collection while clocks run, for any side; what exists now is not looked through afterwards either."""
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()


def release(place: Place) -> None:
    """Give back what the side before has left, so that the next one finds the place as that one did."""
    gc.collect()
    if place.on_gpu:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


class Clock:
    """Host time between marks, without what the simulated ranks spent."""

    def __init__(self) -> None:
        self._last = self._now()

    @staticmethod
    def _now() -> float:
        return time.perf_counter() - METER.seconds

    def lap(self) -> float:
        """Milliseconds since the last lap."""
        before, self._last = self._last, self._now()
        return (self._last - before) * MS


def timed_step(training: Training, place: Place) -> dict[str, float]:
    """One step in milliseconds. `wall` ends when the device has finished, on the slowest rank; the rest of the host's
    times do not wait, and are this rank's.

    `net` is the same without the host time of the simulated ranks, which stand for kernels that a real group launches
    at once. It says something only where the host is what a step waits for.
    """
    place.meet()
    if place.on_gpu:
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
    began, spent, clock, row = time.perf_counter(), METER.seconds, Clock(), {}
    loss = training.forward()
    row["forward"] = clock.lap()
    loss.backward()
    row["backward"] = clock.lap()
    if place.on_gpu:
        end.record()
        clock.lap()
    training.update()
    row["optimizer"] = clock.lap()
    place.synchronize()
    spent = METER.seconds - spent
    row["wall"] = place.slowest((time.perf_counter() - began) * MS)
    row["net"] = row["wall"] - spent * MS
    if place.on_gpu:
        row["device"] = begin.elapsed_time(end)
    return row


def medians(rows: list[dict[str, float]]) -> dict[str, float]:
    return {name: statistics.median(row[name] for row in rows) for name in rows[0]}


def peak(
    place: Place, start: Callable[[], Training], step: Callable[[Training], None] = Training.step
) -> dict[str, int]:
    """Bytes that a training holds at rest, and at most, during a step in its steady state; alone on the device."""
    release(place)
    found = _peak_on_gpu(start, step) if place.on_gpu else _peak_on_cpu(start, step)
    release(place)
    return found


def _peak_on_gpu(start: Callable[[], Training], step: Callable[[Training], None]) -> dict[str, int]:
    # The work spaces of the matrix products stay with the process, not with the side that came first.
    warm = torch.ones(64, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    (warm @ warm).sum().backward()
    del warm
    before, asked_before = torch.cuda.memory_allocated(), _asked("current")
    training = start()
    with training.observed():
        for _ in range(_PEAK_STEPS):
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            rest = torch.cuda.memory_allocated() - before
            step(training)
        torch.cuda.synchronize()
    most, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    return {"rest": rest, "peak": most - before, "asked": _asked("peak") - asked_before, "reserved": reserved}


def _asked(when: str) -> int:
    """Bytes that programs asked for. The allocator gives more: it does not split off what is less than a MiB."""
    return torch.cuda.memory_stats()[f"requested_bytes.all.{when}"]


def _peak_on_cpu(start: Callable[[], Training], step: Callable[[Training], None]) -> dict[str, int]:
    """From the profiler's record of every allocation: the CPU's allocator keeps no count, and pages are too coarse.

    The whole life of the side is recorded, for an allocation from before would be freed without a size. Only this
    thread is seen, hence `Place.for_memory`.
    """
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        training = start()
        with training.observed():
            for number in range(_PEAK_STEPS):
                with record_function(_MARK) if number == _PEAK_STEPS - 1 else contextlib.nullcontext():
                    step(training)
    return _replayed(events_of(record))


def _replayed(events: list[Event]) -> dict[str, int]:
    mark = next(event for event in events if event.get("name") == _MARK)
    begin, end = mark["ts"], mark["ts"] + mark["dur"]
    held = rest = most = 0
    for event in sorted((each for each in events if each.get("name") == "[memory]"), key=lambda each: each["ts"]):
        if event["ts"] > end:
            break
        held += event["args"]["Bytes"]
        if event["ts"] < begin:
            rest = most = held
        most = max(most, held)
    return {"rest": rest, "peak": most}
