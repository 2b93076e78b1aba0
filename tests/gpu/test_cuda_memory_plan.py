"""The memory plan beside the allocator of a CUDA device."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from bed.loopback import job

from benchmarks.models import Case
from unshard import CPUOffloadPolicy, MixedPrecisionPolicy
from unshard.tools import ledger, plan
from unshard.tools.program import Program, shard_blocks

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "kept": {"reshard_after_forward": False},
    "offload": {"offload_policy": CPUOffloadPolicy()},
}


def _program(options: dict[str, Any]) -> Program:
    case, device = Case.parse("100m:1x512"), torch.device("cuda", 0)
    return Program(
        lambda: case.build(device),
        batch=lambda rank, step: case.batch(device, rank),
        shard=lambda model: shard_blocks(model, mp_policy=BF16, **options),
        loss=case.loss,
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), fused=True),
    )


@pytest.mark.gpu
@pytest.mark.parametrize("name", OPTIONS)
def test_the_peak_is_that_of_the_allocator(name: str) -> None:
    program = _program(OPTIONS[name])
    planned = plan(program, world=8, advise=False)
    gc.collect()  # models of earlier tests count in the allocator's peak
    torch.cuda.empty_cache()
    with job(8, device="cuda"):
        model = program.sharded(program.model())
        optimizer = program.optimizer(model)
        for step in range(3):
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            program.loss(model, program.batch_of(0, step)).backward()
            optimizer.step()
            optimizer.zero_grad()
        torch.cuda.synchronize()
        most = torch.cuda.max_memory_allocated()
        found = ledger(model, optimizer)
    assert planned.peak == pytest.approx(most, rel=0.05)
    rows = {row["kind"]: row["at_rest"] for row in found.rows}
    for row in planned.rows:
        if row["kind"] in ("parameters", "gradients", "optimizer state"):
            # The plan counts what the allocator takes, up to 1 MiB more for a large tensor; the ledger counts bytes.
            assert rows[row["kind"]] <= row["at_rest"] <= 1.02 * rows[row["kind"]], row
    assert found.allocator["peak"] == most and "Allocator" in str(found)
