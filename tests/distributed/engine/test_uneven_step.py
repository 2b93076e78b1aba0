"""`unshard.step`: ranks with different micro-batches get the gradients of one process with all samples."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from bed import world
from bed.meshes import biases_elsewhere
from bed.stack import loss_of, sharded
from bed.uneven import FEATURES, Setup, check_parity

import unshard
from unshard import MixedPrecisionPolicy

CPU = torch.device("cpu")

SETUPS = [
    Setup(),
    Setup(known=True),
    Setup(units="follow"),
    Setup(units="follow", known=True),
    Setup(units={"text.*": "keep", "vision.*": "follow"}),
    *[
        Setup(front, units, known)
        for front in ("wrapper", "originals", "legacy")
        for units, known in (("keep", False), ("keep", True), ("follow", False))
    ],
    *FEATURES,
    Setup("wrapper", "follow", offload=True),
    Setup("originals", "keep", tied=True, checkpoints=True),
]


@pytest.mark.parametrize("setup", SETUPS, ids=str)
@world(1, 2, 3, 4)
def test_parity(setup: Setup) -> None:
    check_parity(setup, CPU)


@pytest.mark.parametrize("units", ["keep", "follow"])
@pytest.mark.parametrize("known", [False, True])
@world(4)
def test_parity_with_replicas(units: str, known: bool) -> None:
    check_parity(Setup(units=units, known=known, replicas=2), CPU)


@pytest.mark.parametrize(
    "setup", [Setup(parallel=2), Setup(units="follow", parallel=2), Setup(known=True, parallel=2)], ids=str
)
@world(4)
def test_parity_with_tensor_parallelism(setup: Setup) -> None:
    check_parity(setup, CPU)


POLICIES = {
    "fp32": None,
    "bf16": MixedPrecisionPolicy(torch.bfloat16, torch.float32),
    "all bf16": MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16),
    "overrides": MixedPrecisionPolicy(torch.bfloat16, torch.float32, overrides={"second.*": torch.float32}),
    "fp64 sums": MixedPrecisionPolicy(reduce_dtype=torch.float64),
}


@pytest.mark.parametrize("units", ["keep", "follow"])
@pytest.mark.parametrize("meshes", [False, True], ids=["one mesh", "two meshes"])
@pytest.mark.parametrize("policy", POLICIES)
@world(2, 4)
def test_even_work_gives_the_gradients_of_a_plain_step(policy: str, meshes: bool, units: str) -> None:
    """One micro-batch on each rank: a plain step averages over the ranks, which is the mean of weights of 1."""
    options = {"mp_policy": POLICIES[policy]} if POLICIES[policy] else {}
    if meshes:
        options["shard_placement_fn"] = biases_elsewhere()
    model, plain = sharded(**options), sharded(**options)
    with unshard.step(model, units=units) as step:
        step.backward(loss_of(model, dist.get_rank()))
    loss_of(plain, dist.get_rank()).backward()
    low = policy == "all bf16"  # sums of bf16 are rounded before the division, means after it
    compared = 0
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert mine.grad.dtype == theirs.grad.dtype
        torch.testing.assert_close(
            mine.grad.full_tensor(), theirs.grad.full_tensor(), rtol=1e-2 if low else 1e-6, atol=1e-3 if low else 1e-7
        )
        compared += 1
    assert compared == 14
