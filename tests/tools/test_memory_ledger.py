"""The ledger of a run, beside figures computed by hand and the plan."""

from __future__ import annotations

import gc
import json
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from bed.loopback import job
from bed.memory_models import VOCABULARY, Stack, tokens
from torch import nn

from unshard.engine.api import observer
from unshard.errors import ArgumentError
from unshard.tools import ledger, plan
from unshard.tools.memory_rows import size
from unshard.tools.program import Program, default_loss, shard_blocks

WORLD = 4
SHARE = 4 * (2 * VOCABULARY * 256 + 4 * 256 * 256) // WORLD


@contextmanager
def training() -> Iterator[tuple[nn.Module, Any]]:
    with job(WORLD):
        model = shard_blocks(Stack())
        yield model, torch.optim.AdamW(model.parameters())


def step(model: nn.Module, optimizer: Any) -> None:
    default_loss(model, tokens(0, 0)).backward()
    optimizer.step()


def now(model: nn.Module, optimizer: Any = None) -> dict[str, int]:
    return {row["kind"]: row["at_rest"] for row in ledger(model, optimizer).rows}


def plan_of_stack() -> Any:
    return plan(Program(Stack, batch=tokens), world=WORLD, device="cpu", advise=False)


def test_rows_are_what_the_rank_holds() -> None:
    with training() as (model, optimizer):
        assert now(model, optimizer)["parameters"] == pytest.approx(SHARE, rel=1e-3)
        assert now(model, optimizer)["gradients"] == now(model, optimizer)["optimizer state"] == 0
        step(model, optimizer)
        found = now(model, optimizer)
        assert found["gradients"] == pytest.approx(SHARE, rel=1e-3)
        assert found["optimizer state"] == pytest.approx(2 * SHARE, rel=1e-3)
        assert found["all-gathers"] == found["reductions"] == 0
        model(tokens(0, 0))  # the root stays unsharded until backward
        assert now(model)["all-gathers"] == 4 * 2 * VOCABULARY * 256


def test_rows_at_rest_are_those_of_the_plan() -> None:
    planned = plan_of_stack()
    with training() as (model, optimizer):
        step(model, optimizer)
        for row in planned.rows:
            if row["kind"] not in ("activations", "other"):
                assert now(model, optimizer)[row["kind"]] == pytest.approx(row["at_rest"], rel=1e-3)
        text = ledger(model, optimizer).beside(planned)
        assert "at rest" in text and text.count("1.00") == 4  # parameters, gradients, state and total


def test_a_recorded_step_has_a_timeline() -> None:
    planned = plan_of_stack()
    with training() as (model, optimizer):
        assert str(ledger(model, optimizer)).startswith("Memory of this rank: 0.7 MiB now.\n")
        for _ in range(2):  # in the first step, units get their names in the block
            with ledger(model, optimizer) as recorded:
                step(model, optimizer)
            assert "reduce blocks.0" in [point["at"] for point in recorded.timeline]
            optimizer.zero_grad()
        assert observer.current is None
        assert recorded.peak_at.startswith("backward of ") and f", in {recorded.peak_at}." in str(recorded)
        stages = [point["at"] for point in recorded.timeline]
        assert stages[0] == "begin" and stages[-1] == "end"
        assert stages.index("forward blocks.0") < stages.index("backward blocks.0") < stages.index("reduce blocks.0")
        points = {point["at"]: point for point in recorded.timeline}
        root, unit = 4 * 2 * VOCABULARY * 256, 4 * 256 * 256
        assert points["forward blocks.1"]["all-gathers"] == root + 2 * unit
        assert points["reduce blocks.0"]["reductions"] >= unit
        found = json.loads(json.dumps(recorded.to_dict()))
        assert found["kind"] == "ledger" and found["world"] == WORLD and found["peak"] == recorded.peak
        assert "most in the step" in recorded.beside(planned)


def test_a_recorded_step_is_the_same_step() -> None:
    def weights(records: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        with training() as (model, optimizer):
            for _ in range(2):
                if records:
                    with ledger(model, optimizer):
                        step(model, optimizer)
                else:
                    step(model, optimizer)
            return [parameter.to_local().clone() for parameter in model.parameters()]

    assert all(map(torch.equal, weights(True), weights(False)))


def test_the_ledger_keeps_no_memory() -> None:
    with job(WORLD):
        model = shard_blocks(Stack(1, 32))
        with ledger(model, torch.optim.AdamW(model.parameters())) as recorded:
            default_loss(model, tokens(0, 0)).backward()
        owner = weakref.ref(model)
        del recorded, model
        gc.collect()
        assert owner() is None


def test_wrong_arguments() -> None:
    for model in (Stack(), None):
        with pytest.raises(ArgumentError, match="contains no sharded module"):
            ledger(model)  # type: ignore[arg-type]
    with training() as (model, optimizer):
        with pytest.raises(ArgumentError, match=r"optimizer must be .*, got str"):
            ledger(model, "adam")
        with pytest.raises(ArgumentError, match=r"needs a result of unshard\.tools\.plan, got str"):
            ledger(model, optimizer).beside("plan")  # type: ignore[arg-type]


def test_sizes() -> None:
    texts = [size(nbytes) for nbytes in (0, 1500, 2**17, 2**20, 2**30)]
    assert texts == ["0.0 MiB", "1.5 KiB", "0.1 MiB", "1.0 MiB", "1.00 GiB"]
