"""`unshard.tools.timeline`: times that the tests plant appear as those of the right unit, collective and step."""

from __future__ import annotations

import pytest
import torch
from bed import loopback
from bed.stack import batch, loss_of, mesh, sharded
from bed.step_times import (
    BLOCKS,
    DELAY,
    LONG,
    MS,
    NOTHING,
    Clock,
    Towers,
    figures,
    of_kind,
    optimizer_of,
    row,
    slow_collective,
    slowed_stack,
    step,
    virtual_clock,
)
from torch import nn
from torch.utils.checkpoint import checkpoint

from unshard import fully_shard
from unshard.tools import timeline


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return virtual_clock(monkeypatch)


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


def test_computation_between_an_all_gather_and_its_wait(clock: Clock) -> None:
    """The program gathers a unit itself, and computes before it waits."""
    with loopback.job(2):
        model = sharded()
        optimizer = optimizer_of(model)
        step(model, optimizer)
        with timeline(model) as times:
            loss = loss_of(model)
            handle = model.blocks[0].unshard(async_op=True)
            clock.sleep(DELAY)
            handle.wait()
            loss.backward()
            optimizer.step()
    assert times.exposed_ms == NOTHING and times.other_ms == times.step_ms == LONG


def test_planted_time_between_units(clock: Clock) -> None:
    with loopback.job(2):
        model = sharded()
        optimizer = optimizer_of(model)
        step(model, optimizer)
        with timeline(model) as times:
            for _ in range(2):
                loss = loss_of(model)
                clock.sleep(DELAY)
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
            for _ in range(4):
                for _ in range(2):
                    step(model, None)
                    other.step()
                optimizer.step()
                optimizer.step()
        assert (times.steps, times.warm_up_steps) == (2, 2) and "left out: 2" in str(times)
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
