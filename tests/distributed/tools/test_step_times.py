"""`unshard.tools.timeline`: times that the tests plant appear as those of the right unit, collective and rank."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from bed import loopback, loopback_stream, world
from bed.loopback_stream import CpuStream
from bed.stack import WIDTH, Stack, batch, loss_of, mesh, sharded
from torch import nn
from torch.utils.checkpoint import checkpoint

import unshard
from unshard import fully_shard
from unshard.engine import observer, side_stream
from unshard.engine.observer import Observer
from unshard.errors import ArgumentError, StateError
from unshard.tools import step_recorder, step_times, timeline
from unshard.tools.step_recorder import DeviceClock
from unshard.tools.step_times import RankTimes, Timeline, UnitTimes

DELAY = 0.05
MS = 1e3
LONG = pytest.approx(DELAY * MS)
NOTHING = pytest.approx(0.0, abs=1e-3)
BLOCKS = ["blocks.0", "blocks.1", "blocks.2"]


class Clock:
    """Stands for the module `time`: only sleep takes time, and each reading of the clock takes `tick` seconds."""

    def __init__(self) -> None:
        self.now, self.tick = 1000.0, 0.0

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def monotonic(self) -> float:
        return self.now

    def perf_counter(self) -> float:
        self.now += self.tick
        return self.now


sleep = time.sleep


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The clock of the timeline, of the loop-back job and of `SlowLinear`."""
    clock = Clock()
    monkeypatch.setattr(step_recorder, "time", clock)
    monkeypatch.setattr(loopback_stream, "time", clock)
    monkeypatch.setattr(sys.modules[__name__], "sleep", clock.sleep)
    return clock


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.01)


def step(model: nn.Module, optimizer: torch.optim.Optimizer | None, micro_batches: int = 1) -> None:
    for _ in range(micro_batches):
        loss_of(model).backward()
    if optimizer is not None:
        optimizer.step()
        optimizer.zero_grad()


def row(times: Timeline, name: str) -> UnitTimes:
    return next(each for each in times.units if each.name == name)


def figures(times: Timeline, what: str) -> dict[str, float]:
    return {each.name: getattr(each, what) for each in times.units}


def of_kind(op: str) -> str:
    return "all-gather" if "gather" in op else "reduce"


@contextmanager
def slow_collective(monkeypatch: pytest.MonkeyPatch, numbers: dict[str, list[int]]) -> Iterator[None]:
    """Let the collectives with these numbers among those of their kind take `DELAY`, and others no time."""
    counts = {"all-gather": 0, "reduce": 0}
    issue = CpuStream.issue

    def slowed(self: CpuStream, transfer: Any) -> None:
        kind = of_kind(transfer.op)
        self._delay = DELAY if counts[kind] in numbers.get(kind, ()) else 0.0
        counts[kind] += 1
        issue(self, transfer)

    with monkeypatch.context() as patch:
        patch.setattr(CpuStream, "issue", slowed)
        yield


class SlowLinear(nn.Linear):
    """Takes `DELAY` in forward and twice as long in backward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        sleep(DELAY)
        output = super().forward(x)
        if output.requires_grad:
            output.register_hook(lambda gradient: sleep(2 * DELAY))
        return output


def slowed_stack(slow: int) -> Stack:
    model = Stack()
    model.blocks[slow].first.__class__ = SlowLinear
    return model


# --- planted times -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["all-gather", "reduce"])
def test_planted_collectives(kind: str, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each collective of a step in turn takes long: exactly one unit has an exposed wait, of this kind."""
    what = "all_gather_exposed_ms" if kind == "all-gather" else "reduce_exposed_ms"
    other = "reduce_exposed_ms" if kind == "all-gather" else "all_gather_exposed_ms"
    with loopback.job(2) as job:
        model = sharded()
        optimizer = optimizer_of(model)
        for _ in range(2):
            step(model, optimizer)
        before = len(job.log)
        step(model, optimizer)
        kinds = [of_kind(call.op) for call in job.log[before:]]
        assert kinds.count(kind) == (7 if kind == "all-gather" else 4)
        found = []
        for number in range(kinds.count(kind)):
            with slow_collective(monkeypatch, {kind: [number]}), timeline(model) as times:
                step(model, optimizer)
            exposed = figures(times, what)
            late = max(exposed, key=lambda name: exposed[name])
            assert times.step_ms == times.exposed_ms == exposed.pop(late) == LONG, (number, times)
            assert sum(exposed.values()) == sum(figures(times, other).values()) == times.other_ms == NOTHING
            assert row(times, late).all_gather_ms + row(times, late).reduce_ms == LONG
            assert f"Unit {late!r} has the largest exposed time" in str(times) and times.steps == 1
            found.append(late)
    gathers = ["(root)", *BLOCKS, "blocks.2", "blocks.1", "blocks.0"]
    assert found == (gathers if kind == "all-gather" else ["blocks.2", "blocks.1", "blocks.0", "(root)"])


def test_an_overlapped_collective_is_not_exposed(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first block computes for as long as the all-gather of the second takes."""
    with loopback.job(2):
        model = sharded(slowed_stack(0))
        optimizer = optimizer_of(model)
        for _ in range(2):
            step(model, optimizer)
        with slow_collective(monkeypatch, {"all-gather": [2]}), timeline(model) as times:
            step(model, optimizer)
    assert times.exposed_ms == NOTHING and row(times, "blocks.1").all_gather_ms == LONG
    assert not times.advice


@pytest.mark.parametrize("recompute", [False, True])
def test_planted_computation(recompute: bool, clock: Clock) -> None:
    """Nested units: time of a block is not time of the root. A recomputation is a part of backward."""
    with loopback.job(2):
        model = sharded(slowed_stack(1))
        if recompute:
            model.run = lambda block, x: checkpoint(block, x, use_reentrant=False)
        optimizer = optimizer_of(model)
        step(model, optimizer)
        with timeline(model) as times:
            for _ in range(2):
                step(model, optimizer)
    forward, backward = figures(times, "forward_ms"), figures(times, "backward_ms")
    assert forward.pop("blocks.1") == LONG
    assert backward.pop("blocks.1") == pytest.approx((3 if recompute else 2) * DELAY * MS)
    assert sum(forward.values()) == sum(backward.values()) == times.other_ms == NOTHING


class Towers(nn.Module):
    """The second tower's inputs need no gradient, so nothing tells when its backward ends."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = SlowLinear(WIDTH, WIDTH)
        self.first, self.second = nn.Linear(WIDTH, 2), nn.Linear(WIDTH, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.first(self.stem(x)) + self.second(x)


def test_a_unit_without_an_end(clock: Clock) -> None:
    """The backward of the root goes on after those of the towers, and does not count as the second tower's."""
    with loopback.job(2):
        model = Towers()
        for each in (model.first, model.second, model):
            fully_shard(each)
        optimizer = optimizer_of(model)
        step(model, optimizer)
        with timeline(model) as times:
            step(model, optimizer)
    assert figures(times, "backward_ms") == {
        "(root)": pytest.approx(2 * DELAY * MS),
        "first": NOTHING,
        "second": NOTHING,
    }


def test_all_reduces_are_reductions(clock: Clock) -> None:
    with loopback.job(4, delay=0.001):
        model = sharded(mesh=mesh(2))
        optimizer = optimizer_of(model)
        step(model, optimizer)
        with timeline(model) as times:
            step(model, optimizer)
    assert times.exposed_ms == times.step_ms == pytest.approx(12.0)  # all-reduces overlap with the other collectives
    assert times.other_ms == NOTHING and len(times.ranks) == 1


def test_planted_time_between_units(clock: Clock) -> None:
    with loopback.job(2):
        model = sharded()
        optimizer = optimizer_of(model)
        step(model, optimizer)
        with timeline(model) as times:
            for _ in range(2):
                loss = loss_of(model)
                sleep(DELAY)
                loss.backward()
                optimizer.step()
    assert times.other_ms == times.step_ms == LONG


# --- steps -------------------------------------------------------------------------------------------------------


def test_what_a_step_is() -> None:
    """From a forward after an optimizer step to the next such forward: micro-batches and other optimizers count in."""
    with loopback.job(2):
        model = sharded()
        optimizer, other = optimizer_of(model), torch.optim.SGD([torch.ones(1, requires_grad=True)], lr=1.0)
        with timeline(model) as times:
            for _ in range(3):
                for _ in range(2):
                    step(model, None)
                    other.step()
                optimizer.step()
                optimizer.step()
        assert (times.steps, times.warm_up_steps) == (2, 1) and "a warm-up, is left out" in str(times)
        with timeline(model) as times:
            step(model, optimizer)
        assert (times.steps, times.warm_up_steps) == (1, 0)
        with timeline(model) as times:
            step(model, None, micro_batches=3)
        assert times.steps == 1
        gathers = row(times, "blocks.0").all_gather_ms
        with timeline(model) as times:
            optimizer.step()
        assert times.steps == 0 and times.slowest is None and "No steps were measured" in str(times)
    assert gathers > 0


def test_parts_add_up_to_the_step(clock: Clock) -> None:
    clock.tick = 1e-5
    with loopback.job(2, delay=0.001):
        model = sharded()
        optimizer = optimizer_of(model)
        step(model, optimizer)
        with timeline(model) as times:
            began = clock.now
            for _ in range(3):
                step(model, optimizer)
            wall = (clock.now - began) * MS
    assert sum(each.step_ms for each in times.each_step) == pytest.approx(wall, abs=0.1) and len(times.each_step) == 3
    assert times.exposed_ms == pytest.approx(sum(each.exposed_ms for each in times.units))
    assert 10.0 < times.exposed_ms < 11.5  # 11 collectives of 1 ms
    assert all(each.forward_ms > 0 and each.backward_ms > 0 for each in times.units) and times.other_ms > 0


def test_other_models_are_left_out(clock: Clock) -> None:
    with loopback.job(2, delay=0.01):
        model, other = sharded(), fully_shard(nn.Linear(132, 2))
        optimizer = optimizer_of(model)
        step(model, optimizer)
        with timeline(model) as times:
            loss = loss_of(model)
            other(batch()).sum().backward()
            loss.backward()
            optimizer.step()
    assert times.steps == 1 and times.exposed_ms == pytest.approx(110.0)
    assert times.other_ms == pytest.approx(20.0)  # the root of the other model is not gathered again in backward


# --- the block ---------------------------------------------------------------------------------------------------


def test_results_and_state_are_those_without_it() -> None:
    with loopback.job(2) as job:
        states, logs = [], []
        for timed in (False, True):
            model, start = sharded(), len(job.log)
            optimizer, keys = optimizer_of(model), set(vars(model.blocks[0]))
            if timed:
                with timeline(model) as times:
                    for _ in range(2):
                        step(model, optimizer)
                kept = [each for each in vars(times).values() if isinstance(each, torch.Tensor | nn.Module)]
                assert not kept and not times._states and set(vars(model.blocks[0])) == keys
                assert job.log[-1].op == "loopback._allgather_base"  # the times of the ranks
            else:
                for _ in range(2):
                    step(model, optimizer)
            logs.append([call.op for call in job.log[start:]])
            states.append({name: each.to_local().clone() for name, each in model.named_parameters()})
    assert all(torch.equal(each, states[1][name]) for name, each in states[0].items())
    assert logs[1][:-1] == logs[0]
    assert observer.current is None and observer._watches_stages is None


def test_an_exception_in_the_block() -> None:
    """No collective follows: other ranks may not come to it. Complete steps are there."""
    with loopback.job(2) as job:
        model = sharded()
        optimizer = optimizer_of(model)
        step(model, optimizer)
        with pytest.raises(ZeroDivisionError), timeline(model) as times:
            for _ in range(2):
                step(model, optimizer)
            loss_of(model)
            issued = len(job.log)
            1 / 0  # noqa: B018
        assert len(job.log) == issued and observer.current is None
        assert times.steps == 2 and [each.rank for each in times.ranks] == [0]
        step(model, optimizer)


def test_misuse() -> None:
    with pytest.raises(ArgumentError, match="takes a sharded model, got int"):
        timeline(3)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="Linear has no sharded module"):
        timeline(nn.Linear(2, 2))
    with loopback.job(2):
        model = sharded()
        with timeline(model) as times:
            with pytest.raises(StateError, match="has been used"), times:
                pass
        with pytest.raises(StateError, match="has been used"), times:
            pass


def test_captured_steps_are_left_out() -> None:
    with loopback.job(2):
        model = sharded()
        optimizer = optimizer_of(model)
        step(model, optimizer)
        with timeline(model) as times:
            step(model, optimizer)
            recorder = times._recorder
            assert recorder is not None and recorder._step is not None
            cuts = len(recorder._step.cuts)
            with side_stream.recording_step():
                step(model, optimizer)
            assert len(recorder._step.cuts) == cuts and not recorder._open
        assert times.steps == 1 and times.captured and "Captured steps are not measured" in str(times)


def test_observers_of_tensors_keep_reductions_on_the_compute_stream() -> None:
    with loopback.job(2):
        model, reader = sharded(), Observer()
        with timeline(model):
            assert observer.current is not None and not observer.on_compute_stream
            observer.add(reader)
            assert observer.on_compute_stream
            observer.remove(reader)
            assert not observer.on_compute_stream


def test_trace(tmp_path: Path, clock: Clock) -> None:
    clock.tick = 1e-5
    with loopback.job(2, delay=0.002):
        model = sharded()
        optimizer = optimizer_of(model)
        with timeline(model, trace=tmp_path / "steps.json") as times:
            for _ in range(2):
                step(model, optimizer)
    (file,) = tmp_path.iterdir()
    assert file.name == "steps.rank0.json"
    events = json.loads(file.read_text())["traceEvents"]
    assert [each["args"]["name"] for each in events if each["ph"] == "M"] == [
        "rank 0",
        "compute",
        "all-gather",
        "reduce",
    ]
    spans = [each for each in events if each["ph"] == "X"]
    names = {each["name"] for each in spans}
    for unit in ["(root)", *BLOCKS]:
        for what in ("forward", "backward", "all-gather", "reduce", "wait for all-gather", "wait for reduce"):
            assert f"{what} {unit}" in names
    assert {each["pid"] for each in spans} == {0} and all(each["dur"] >= 0 for each in spans)
    assert abs(spans[0]["ts"] / 1e6 - time.time()) < 60
    for thread in range(3):  # in order, and never two at once
        mine = sorted((each["ts"], each["dur"]) for each in spans if each["tid"] == thread)
        assert all(begin + length <= later + 1 for (begin, length), (later, _) in pairwise(mine))
    gathers = [each["dur"] for each in spans if each["name"].startswith("all-gather blocks")]
    assert len(gathers) == 2 * 6 and min(gathers) > 0 and sum(gathers) > 12 * 1500
    assert json.loads(json.dumps(times.to_dict()))["kind"] == "timeline"


def test_advice() -> None:
    """It names the unit and the rank, and says nothing if there is nothing to gain."""
    with loopback.job(2):
        times = timeline(sharded())
    times.each_step = [RankTimes(0, 100.0, 30.0)]
    times.units = [UnitTimes("a", all_gather_exposed_ms=12.0), UnitTimes("b", reduce_exposed_ms=18.0)]
    times.ranks = [RankTimes(0, 100.0, 30.0), RankTimes(1, 100.0, 35.0)]
    (reductions,) = times.advice
    assert reductions.startswith("Unit 'b' has the largest exposed time: 0.00 ms") and "wire_dtype" in reductions
    times.units.append(UnitTimes("c", all_gather_exposed_ms=20.0))
    assert times.advice[0].startswith("Unit 'c'") and "reshard_after_forward=False" in times.advice[0]
    times.ranks[1] = RankTimes(1, 100.0, 50.0)
    assert len(times.advice) == 2 and times.advice[0].startswith("Rank 0 is the slowest: it is busy for 70.00 ms")
    times.each_step, times.ranks = [RankTimes(0, 100.0, 9.0)], [RankTimes(0, 100.0, 9.0)]
    assert times.advice == []


class FakeEvent:
    """Stands for an event of a device. Its stream is the host, which is late by `lag`."""

    made: ClassVar[list[FakeEvent]] = []
    complete: ClassVar[bool] = True

    def __init__(self, device: torch.device, timing: bool = False) -> None:
        assert timing
        FakeEvent.made.append(self)
        self.event, self.query = self, lambda: FakeEvent.complete

    def record(self) -> FakeEvent:
        self.at = step_recorder.time.perf_counter()
        return self

    def elapsed_since(self, earlier: FakeEvent) -> float:
        assert FakeEvent.complete
        return (self.at - earlier.at) * MS


def test_events_of_a_device(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps are measured late, without synchronization, and their events are used again, each once."""
    synchronized: list[torch.device] = []

    def synchronize(device: torch.device) -> None:
        FakeEvent.complete = True
        synchronized.append(device)

    monkeypatch.setattr(step_recorder, "StreamEvent", FakeEvent)
    monkeypatch.setattr(torch.accelerator, "synchronize", synchronize)
    clock = DeviceClock(torch.device("cpu"), waits_in_stream=True)
    monkeypatch.setattr(step_times, "_clock_for", lambda *unused: clock)
    with loopback.job(2, delay=0.002):
        model = sharded()
        optimizer = optimizer_of(model)
        step(model, optimizer)
        with timeline(model) as times:
            for number in range(8):
                FakeEvent.complete = number > 3  # the device is late
                step(model, optimizer)
                assert times.steps == (0 if number < 4 else number - 1)
                if number == 4:
                    made = len(FakeEvent.made)
            assert len(FakeEvent.made) == made and len(synchronized) == 1
    assert times.steps == 8 and len(synchronized) == 2
    assert len({id(each) for each in clock._free}) == len(clock._free) == made - 1  # all but the first of all
    assert times.exposed_ms == times.step_ms == pytest.approx(22.0)  # 11 collectives
    assert row(times, "blocks.0").all_gather_exposed_ms == pytest.approx(4.0)


# --- real ranks --------------------------------------------------------------------------------------------------


@world(3)
def test_the_slowest_rank() -> None:
    """One rank sleeps in its forward; the others wait for it, and all of them know."""
    rank = dist.get_rank()
    model = sharded(slowed_stack(1) if rank == 1 else Stack())
    optimizer = optimizer_of(model)
    step(model, optimizer)
    with unshard.tools.timeline(model) as times:
        for _ in range(2):
            step(model, optimizer)
    assert times.slowest == 1 and [each.rank for each in times.ranks] == [0, 1, 2]
    assert times.ranks[rank].exposed_ms == pytest.approx(times.exposed_ms, rel=1e-4)
    assert "Rank 1 is the slowest" in str(times)
    found = times.to_dict()
    assert (found["kind"], found["steps"], found["device"], found["slowest"]) == ("timeline", 2, "cpu", 1)
    busy = {each.rank: each.busy_ms for each in times.ranks}
    assert busy[1] >= 3 * DELAY * MS and all(each.step_ms >= 3 * DELAY * MS for each in times.ranks)
    assert all(times.ranks[other].exposed_ms > DELAY * MS for other in (0, 2))


@world(4)
def test_replicas() -> None:
    """All ranks are in the report, and the all-reduce counts as a reduction."""
    model = sharded(mesh=mesh(2))
    optimizer = optimizer_of(model)
    step(model, optimizer)
    with timeline(model) as times:
        step(model, optimizer)
    assert [each.rank for each in times.ranks] == [0, 1, 2, 3]
    assert min(figures(times, "reduce_ms").values()) > 0
