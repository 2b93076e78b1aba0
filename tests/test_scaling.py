"""The formulas of docs/scaling.md, beside what one rank of a simulated job counts. No count grows with the job."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from bed import loopback
from bed.world import mostly_slow

from benchmarks import scaling
from benchmarks.formulas import Job
from benchmarks.loopback import Call
from benchmarks.places import Place, run
from unshard.tools import ledger

ALIGNMENT = 256
"""Regions of a buffer begin at multiples of so many bytes."""


def job_of(kind: str, world: int) -> Job | None:
    """The kind in a job of few ranks, with as few replicas or slices as possible. None if the world is prime."""
    divisor = next(each for each in range(2, world + 1) if world % each == 0)
    if kind != "plain" and kind != "wrapper" and divisor == world:
        return None
    replicas = divisor if "hybrid" in kind else 1
    compute = 2 if world == 6 and not kind.startswith("wrapper") else 4  # bf16, reduced in fp32
    return Job(world, replicas, divisor if kind == "sliced" else 0, kind.startswith("wrapper"), compute)


CASES = [
    pytest.param(kind, job, id=f"{kind}-{world}ranks")
    for kind in ("plain", "hybrid", "sliced", "wrapper", "wrapper-hybrid")
    for world in range(2, 9)
    if (job := job_of(kind, world)) is not None
]


@pytest.mark.parametrize(("kind", "job"), CASES)
def test_collectives_bytes_and_memory(kind: str, job: Job) -> None:
    units, root = scaling.Model().shapes()
    with loopback.job(job.world) as group:
        model = scaling.sharded(kind, job)
        optimizer = torch.optim.Adam(model.parameters(), foreach=True)
        for _ in range(3):
            loss = model(torch.ones(2, scaling.WIDTH)).sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        group.log.clear()
        with ledger(model, optimizer) as seen:
            model(torch.ones(2, scaling.WIDTH)).sum().backward()
        whole = {"gather": "bytes_out", "reduce_scatter": "bytes_in", "all_reduce": "bytes_in"}
        calls = [Call(each.kind, getattr(each, whole[each.kind]), each.ranks) for each in group.log]
        assert Counter(calls) == Counter(job.collectives(units, root))
        most = {row["kind"]: max(at[row["kind"]] for at in seen.timeline) for row in seen.rows}
    tolerance = ALIGNMENT * 3 * (len(units) + 1)
    at_rest = job.at_rest(units, root)
    assert at_rest <= seen.now["parameters"] < at_rest + tolerance
    assert at_rest <= seen.now["gradients"] < at_rest + tolerance
    assert 2 * at_rest * 0.99 < seen.now["optimizer state"] < 2 * at_rest + 2 * tolerance
    gathered = job.gathered(units, root)
    # Staging memory of packed parameters comes on top.
    assert gathered <= most["all-gathers"] < gathered + 2 * job.world * ALIGNMENT + tolerance
    assert job.reduced(units, root) <= most["reductions"] < job.reduced(units, root) + tolerance


@pytest.mark.parametrize("kind", mostly_slow(scaling.KINDS, ["columns", "wrapper-hybrid", "step-follow"]))
def test_no_count_of_a_step_grows_with_the_job(kind: str) -> None:
    """Bytecodes of unshard, operators and the tensors that they take, at 8 and at 1,024 ranks."""
    small, large = (run(Place("simulated", world, "cpu"), scaling.count_step, kind) for world in (8, 1024))
    assert small["bytecodes"] > 10_000 and small["operators"] > 100
    for figure in ("bytecodes", "operators", "tensors", "gathers", "reductions"):
        assert large[figure] < 1.05 * small[figure], figure
    assert {small.get("formula"), large.get("formula")} <= {"equal", None}


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
@pytest.mark.parametrize("kind", mostly_slow(scaling.KINDS, ["hybrid", "step-follow"]))
def test_no_rank_makes_more_requests_in_a_larger_job(kind: str, backend: str) -> None:
    small, large = (scaling.start_row(kind, world, backend) for world in (8, 1024))
    assert small["first"] > 10
    assert {**large, "world": 8} == small
    assert small["later"] <= 6  # the order is known
