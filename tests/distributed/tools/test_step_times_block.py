"""`unshard.tools.timeline`: what its block leaves as it was, its reports, the events of a device, and real ranks."""

from __future__ import annotations

import gzip
import json
import time
from itertools import pairwise
from pathlib import Path
from typing import ClassVar

import pytest
import torch
import torch.distributed as dist
from bed import loopback, world
from bed.stack import Stack, loss_of, mesh, sharded
from bed.step_times import BLOCKS, DELAY, MS, Clock, figures, optimizer_of, row, slowed_stack, step, virtual_clock
from torch import nn

import unshard
from unshard.engine import observer, side_stream
from unshard.engine.observer import Observer
from unshard.errors import ArgumentError, StateError
from unshard.tools import step_recorder, step_times, timeline
from unshard.tools.step_recorder import DeviceClock
from unshard.tools.step_times import RankTimes, UnitTimes


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return virtual_clock(monkeypatch)


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
        assert times.steps == 2 and str(times).startswith("2 steps on") and [each.rank for each in times.ranks] == [0]
        assert times.slowest is None and "times of the other ranks are unknown" in str(times)
        step(model, optimizer)
        with pytest.raises(ZeroDivisionError), timeline(model) as times:
            for _ in range(3):
                step(model, optimizer)
            1 / 0  # noqa: B018
        assert times.steps == 3  # the last one is complete, too


def test_reading_inside_the_block() -> None:
    with loopback.job(2):
        model = sharded()
        optimizer = optimizer_of(model)
        with timeline(model) as times:
            for _ in range(3):
                step(model, optimizer)
                assert str(times) == "The block has not ended. Read the times after it."
                assert times.slowest is None and times.advice == [] and times.to_dict()["ranks"] == []
        assert times.slowest == 0


def test_misuse() -> None:
    with pytest.raises(ArgumentError, match="takes a sharded model, got int"):
        timeline(3)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="Linear has no sharded module"):
        timeline(nn.Linear(2, 2))
    with loopback.job(2):
        model = sharded()
        with pytest.raises(ArgumentError, match="trace must be a path, got int"):
            timeline(model, trace=3)
        with pytest.raises(ArgumentError, match="trace must be the path of a file, got ''"):
            timeline(model, trace="")
        with pytest.raises(ArgumentError, match=r"a folder that this rank can create: .*null"):
            timeline(model, trace="/dev/null/steps.json")
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
            assert len(recorder._step.cuts) == cuts
        assert (
            times.steps == 1
            and str(times).startswith("1 step on")
            and times.captured
            and "Captured steps are not measured" in str(times)
        )


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


def test_a_compressed_trace_and_one_that_cannot_be_written(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with loopback.job(2):
        model = sharded()
        optimizer = optimizer_of(model)
        with timeline(model, trace=tmp_path / "new" / "steps.json.gz"):
            step(model, optimizer)
        (file,) = (tmp_path / "new").iterdir()
        assert file.name == "steps.rank0.json.gz" and json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]
        (tmp_path / "steps.rank0.json").mkdir()
        with timeline(model, trace=tmp_path / "steps.json") as times:
            step(model, optimizer)
    assert times.steps == 1 and "timeline could not write its trace: [Errno 21]" in caplog.text


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
    times.rank = 1  # waits for rank 0, not for the network
    assert [each[:22] for each in times.advice] == ["Rank 0 is the slowest:"]
    times.rank = 0
    times.each_step, times.ranks = [RankTimes(0, 100.0, 9.0)], [RankTimes(0, 100.0, 9.0)]
    assert times.advice == []


class FakeEvent:
    """Stands for an event of a device. Its stream is the host, which is late by `lag`."""

    made: ClassVar[list[FakeEvent]] = []
    complete: ClassVar[bool] = True
    recorded: ClassVar[int] = 0

    def __init__(self, device: torch.device, timing: bool = False) -> None:
        assert timing
        FakeEvent.made.append(self)
        self.event, self.query = self, lambda: FakeEvent.complete

    def record(self) -> FakeEvent:
        FakeEvent.recorded += 1
        self.at = step_recorder.time.perf_counter()
        return self

    def elapsed_time(self, later: FakeEvent) -> float:
        assert FakeEvent.complete
        return (later.at - self.at) * MS


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
                FakeEvent.complete, before = number > 3, FakeEvent.recorded  # the device is late
                step(model, optimizer)
                # The issues of 11 collectives, both ends of their waits, and the ends of 4 forwards and of backward.
                assert 30 < FakeEvent.recorded - before <= 11 * 3 + 4 + 1
                assert times.steps == (0 if number < 4 else number - 1)
                if number == 4:
                    made = len(FakeEvent.made)
            assert len(FakeEvent.made) == made and len(synchronized) == 1
    assert times.steps == 8 and len(synchronized) == 2
    assert len({id(each) for each in clock._free}) == len(clock._free) == made - 1  # all but the first of all
    assert times.exposed_ms == times.step_ms == pytest.approx(22.0)  # 11 collectives
    assert row(times, "blocks.0").all_gather_exposed_ms == pytest.approx(4.0)


def test_a_host_that_is_blocked_between_two_all_gathers(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL may block the host in the second call. The device waits for the first all-gather meanwhile."""

    class Late(Observer):
        def issued(self, work: observer.WatchedWork) -> None:
            if work.kind == "all-gather" and work.params[0].name == "blocks.0.first.weight" and model.training:
                clock.sleep(0.0015)
                model.eval()  # once per step

    monkeypatch.setattr(step_recorder, "StreamEvent", FakeEvent)
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda device: None)
    monkeypatch.setattr(step_times, "_clock_for", lambda *unused: DeviceClock(torch.device("cpu"), True))
    with loopback.job(2, delay=0.002):
        model = sharded()
        step(model, optimizer_of(model))
        late = Late()
        observer.add(late)
        try:
            with timeline(model) as times:
                step(model.train(), optimizer_of(model))
        finally:
            observer.remove(late)
    assert row(times, "(root)").all_gather_exposed_ms == pytest.approx(2.0)
    assert times.exposed_ms == times.step_ms == pytest.approx(22.0)


def test_no_stream_waits_where_streams_share_queues(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stream that waits for an all-gather would hold up the kernels of other streams."""

    def waits(queues: str) -> bool:
        monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", queues)
        clock = step_times._clock_for(torch.device("cuda"), [])
        assert isinstance(clock, DeviceClock)
        return clock._waits_in_stream

    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path))
    assert [waits(each) for each in ("", "8", "32", "7", "1")] == [True, True, True, False, False]
    (tmp_path / "control").touch()  # the multi-process service runs
    assert [waits(each) for each in ("", "8", "32", "7", "1")] == [False, True, True, False, False]


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
