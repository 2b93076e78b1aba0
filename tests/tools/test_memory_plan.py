"""The memory plan, beside figures computed by hand, real steps on the CPU, and peaks measured on a GPU."""

from __future__ import annotations

import json
import resource
import time
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from bed.memory_models import (
    VOCABULARY,
    Convolutions,
    Lstm,
    MixtureOfExperts,
    Stack,
    TiedTransformer,
    images,
    measured_peak,
    tokens,
)
from torch import nn
from torch.distributed.fsdp import fully_shard as torchs_fully_shard
from torch.utils.checkpoint import checkpoint

from benchmarks.models import Case
from unshard import (
    CPUOffloadPolicy,
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    ModuleWrapPolicy,
    fully_shard,
    optim,
)
from unshard.engine.api import observer
from unshard.errors import ArgumentError, StateError
from unshard.tools import plan
from unshard.tools.memory_run import WORKSPACES
from unshard.tools.program import Program, shard_blocks

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
MIB, GIB = 2**20, 2**30
STACK = Program(Stack, batch=tokens)
WORLD = 4


def rows(planned: Any, when: str = "at_peak") -> dict[str, int]:
    return {row["kind"]: row[when] for row in planned.to_dict()["rows"]}


# -- figures by hand ------------------------------------------------------------------------------------------


def test_rows_at_rest_are_the_shares_of_a_rank() -> None:
    """Parameters, gradients and the two numbers of AdamW: four bytes each, in shares."""
    share = 4 * (2 * VOCABULARY * 256 + 4 * 256 * 256) // WORLD
    found = rows(plan(STACK, world=WORLD, device="cpu", advise=False), "at_rest")
    assert (found["parameters"], found["gradients"]) == (pytest.approx(share, rel=1e-3), pytest.approx(share, rel=1e-3))
    assert found["optimizer state"] == pytest.approx(2 * share, rel=1e-3)
    assert found["all-gathers"] == found["reductions"] == found["activations"] == 0


def test_stages_hold_the_units_that_are_gathered() -> None:
    """In forward, a device holds the root, the unit that computes and the next one, in the compute dtype."""
    planned = plan(STACK, world=WORLD, policy=BF16, advise=False)
    gathered = {point["at"]: point["all-gathers"] for point in planned.to_dict()["timeline"]}
    root, unit = 2 * (2 * VOCABULARY * 256), 2 * 256 * 256
    assert gathered["forward blocks.1"] == root + 2 * unit
    assert gathered["default loss"] == root
    assert "The step (a line is the largest of " not in str(planned)
    halves = plan(Program(lambda: Stack(12, 8), batch=tokens), world=2, advise=False)
    assert "The step (a line is the largest of 2 stages):" in str(halves)
    stages = list(gathered)
    assert stages.index("backward blocks.3") < stages.index("backward blocks.0") < stages.index("optimizer")


def test_a_hybrid_mesh_has_larger_shares() -> None:
    one, two = (rows(plan(STACK, world=8, mesh=mesh, device="cpu", advise=False), "at_rest") for mesh in (None, (2, 4)))
    assert two["parameters"] == pytest.approx(2 * one["parameters"], rel=1e-3)


def test_offloaded_shards_are_on_the_host() -> None:
    numbers = 2 * VOCABULARY * 256 + 4 * 256 * 256
    program = replace(STACK, shard=partial(shard_blocks, offload_policy=CPUOffloadPolicy()))
    planned = plan(program, world=WORLD, advise=False)
    found = rows(planned)
    assert found["parameters"] == 0 and found["optimizer state"] < 20 * 512  # counters of AdamW
    host = planned.to_dict()["host"]["at_rest"]
    assert host == pytest.approx(16 * numbers / WORLD, rel=0.01)  # parameter, gradient and two numbers of AdamW


def test_attention_keeps_no_matrix() -> None:
    """Four times the length takes four times the activations, not sixteen times."""

    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv = nn.Linear(64, 192)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            query, key, value = self.qkv(x).unflatten(-1, (3, 4, 16)).permute(2, 0, 3, 1, 4).unbind()
            return F.scaled_dot_product_attention(query, key, value, is_causal=True)

    short, long = (
        rows(plan(Program(Attention, batch=torch.randn(1, length, 64)), world=2, policy=BF16, advise=False))
        for length in (1024, 4096)
    )
    assert 3.5 < long["activations"] / short["activations"] < 4.5


# -- real steps on the CPU ------------------------------------------------------------------------------------


def recomputing() -> nn.Module:
    model = TiedTransformer()
    for block in model.blocks:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    return model


TIED = Program(TiedTransformer, batch=tokens)
WRAPPED = partial(
    FullyShardedDataParallel,
    auto_wrap_policy=ModuleWrapPolicy({nn.TransformerEncoderLayer}),
    mixed_precision=MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
    use_orig_params=True,
)
PROGRAMS = {
    "tied": TIED,
    "lstm": Program(Lstm, batch=tokens),
    "convolutions": Program(Convolutions, batch=images),
    "experts": Program(MixtureOfExperts, batch=tokens),
    "recomputed": replace(TIED, build=recomputing),
    "flat": replace(TIED, optimizer=lambda model: optim.flat(torch.optim.AdamW(model.parameters()))),
    "kept": replace(TIED, shard=partial(shard_blocks, reshard_after_forward=False)),
    "slices": replace(TIED, shard=partial(shard_blocks, reshard_after_forward=2)),
    "bf16": replace(TIED, shard=partial(shard_blocks, mp_policy=BF16)),
    "wrapper": replace(TIED, shard=WRAPPED),
}
QUICK = ("lstm", "experts", "recomputed")


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in PROGRAMS]
)
def test_the_peak_is_that_of_a_real_step(name: str) -> None:
    planned = plan(PROGRAMS[name], world=WORLD, device="cpu", advise=False)
    assert planned.peak == pytest.approx(measured_peak(PROGRAMS[name], WORLD), rel=0.02)


# -- peaks of a GPU -------------------------------------------------------------------------------------------

PEAKS = {"100m:1x512": 556, "1b:1x1024": 3352, "1b:4x2048": 12927}
"""MiB that the allocator of an H200 gave a step, without workspaces (docs/benchmarks.md)."""


@pytest.mark.parametrize(
    "name", ["100m:1x512", *(pytest.param(name, marks=pytest.mark.slow) for name in list(PEAKS)[1:])]
)
def test_the_peak_is_that_of_a_gpu(name: str) -> None:
    case = Case.parse(name)
    host = torch.device("cpu")
    program = Program(
        lambda: case.build(host),
        batch=case.batch(host, 0),
        loss=case.loss,
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), fused=True),
    )
    planned = plan(program, world=8, policy=BF16, advise=False)
    assert (planned.peak - WORKSPACES) / MIB == pytest.approx(PEAKS[name], rel=0.005)


# -- large models and advice ----------------------------------------------------------------------------------


def tables_of_their_own(model: nn.Module, **options: Any) -> None:
    for table in (model.table, model.head):
        fully_shard(table, **options)
    shard_blocks(model, **options)


def test_two_tables_in_the_root_need_one_large_input() -> None:
    """Two untied tables of 248,320 x 5,120 make one contiguous reduce-scatter input of 9.47 GiB."""
    program = Program(lambda: Stack(1, 5120, 248320), batch=torch.zeros(1, 64, dtype=torch.int64))
    planned = plan(program, world=16, policy=BF16, device_memory=16 * GIB)
    largest = planned.to_dict()["largest"][0]
    assert largest == {
        "what": "reduce-scatter input of (root)",
        "kind": "reductions",
        "bytes": pytest.approx(9.47 * GIB, rel=0.01),
    }
    assert not planned.fits and planned.peak > 16 * GIB
    best = planned.advice[0]
    assert best.change == "give each large table a unit of its own (table and head)" and best.fits
    by_hand = plan(replace(program, shard=partial(tables_of_their_own, mp_policy=BF16)), world=16, advise=False)
    assert best.peak == pytest.approx(by_hand.peak, rel=1e-3)
    assert "Not counted: what the allocator reserves" in str(planned)
    assert "9.47 GiB" in str(planned) and best.change in str(planned)
    assert [each.peak for each in planned.advice] == sorted(each.peak for each in planned.advice)


def test_combined_changes_are_advice_if_no_single_one_fits() -> None:
    program = Program(lambda: Stack(2, 64), batch=torch.zeros(64, 64, dtype=torch.int64))
    best = min(each.peak for each in plan(program, world=2).advice)
    planned = plan(program, world=2, device_memory=best - 1)
    assert " + " in planned.advice[0].change and planned.advice[0].peak < best
    assert plan(STACK, world=2, device_memory=best * 10).advice == []


@pytest.mark.slow
def test_a_70b_model_on_1024_ranks() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.before, self.after = nn.RMSNorm(8192), nn.RMSNorm(8192)
            self.q, self.kv = nn.Linear(8192, 8192, bias=False), nn.Linear(8192, 2048, bias=False)
            self.out, self.down = nn.Linear(8192, 8192, bias=False), nn.Linear(28672, 8192, bias=False)
            self.gate, self.up = nn.Linear(8192, 28672, bias=False), nn.Linear(8192, 28672, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            normed = self.before(x)
            query = self.q(normed).unflatten(-1, (64, 128)).transpose(1, 2)
            key, value = self.kv(normed).unflatten(-1, (2, 8, 128)).permute(2, 0, 3, 1, 4).unbind()
            mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
            x = x + self.out(mixed.transpose(1, 2).flatten(-2))
            normed = self.after(x)
            return x + self.down(F.silu(self.gate(normed)) * self.up(normed))

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.head = nn.Embedding(128256, 8192), nn.Linear(8192, 128256, bias=False)
            self.blocks = nn.ModuleList(Block() for _ in range(80))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.table(x)
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=False)
            return self.head(x)

    def build() -> nn.Module:
        with torch.device("meta"):
            return Model()

    began, before = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    planned = plan(Program(build), world=1024, batch="1x4096", policy=BF16, advise=False)
    assert time.process_time() - began < 60  # not the wall time, which depends on what else runs
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 < 4 * GIB
    assert sum(unit["elements"] for unit in planned.to_dict()["units"]) > 69e9
    assert rows(planned)["parameters"] == pytest.approx(4 * 70e9 / 1024, rel=0.03)
    assert any(point.at.startswith("recompute") for point in planned.run.timeline)


# -- results, errors, and what is left behind -----------------------------------------------------------------


def test_the_result_is_plain_data() -> None:
    planned = plan(STACK, world=WORLD, device="cpu", device_memory="1GiB")
    assert planned.device_memory == GIB
    found = json.loads(json.dumps(planned.to_dict()))
    assert list(found)[:2] == ["kind", "unshard"] and found["kind"] == "plan" and found["fits"] is True
    assert found["peak"] == sum(row["at_peak"] for row in found["rows"])
    assert found["peak"] == max(sum(v for k, v in point.items() if k != "at") for point in found["timeline"])
    assert [unit["name"] for unit in found["units"]][:2] == ["(root)", "blocks.0"]
    assert all(unit["shards"] == len(unit["bytes_per_shard"]) == WORLD for unit in found["units"])
    assert all(sum(unit["bytes_per_shard"]) == unit["bytes"] for unit in found["units"])
    assert "Not counted" not in str(planned)
    assert f"of one of {WORLD} ranks" in str(planned) and planned.peak_at in str(planned)


def test_gradients_have_the_names_of_their_parameters() -> None:
    program = Program(lambda: nn.Sequential(*(nn.Linear(512, 512) for _ in range(4))), batch=torch.ones(4, 512))
    shard = partial(FullyShardedDataParallel, auto_wrap_policy=ModuleWrapPolicy({nn.Linear}))
    for each in (
        replace(program, shard=lambda model: [fully_shard(part) for part in (*model, model)][-1]),
        replace(program, shard=shard),
    ):
        largest = [row["what"] for row in plan(each, world=2, advise=False).to_dict()["largest"]]
        assert "1.weight gradient" in largest


def test_the_process_is_left_as_it_was() -> None:
    state, before = torch.get_rng_state(), (observer._prefix, observer._second_log)
    plan(STACK, world=2, advise=False)
    assert torch.equal(torch.get_rng_state(), state) and not dist.is_initialized()
    assert (observer._prefix, observer._second_log) == before
    storage = torch.zeros(8).untyped_storage()
    storage.resize_(64)
    assert storage.nbytes() == 64 and (torch.ones(2) + 1).tolist() == [2, 2]


def test_a_job_of_this_process_is_refused() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(StateError, match="Call plan"):
            plan(STACK, world=2)
    finally:
        dist.destroy_process_group()


WRONG: dict[str, tuple[Any, dict[str, Any], str]] = {
    "no ranks": (STACK, {"world": 0}, "positive number of ranks"),
    "mesh": (STACK, {"world": 8, "mesh": (3, 2)}, "has 6 ranks, but world is 8"),
    "model": (Stack(), {"world": 2, "batch": "1x4"}, "a function that builds"),
    "nothing": (lambda: None, {"world": 2, "batch": "1x4"}, "returned NoneType"),
    "no batch": (Stack, {"world": 2}, "needs a batch"),
    "text": (Stack, {"world": 2, "batch": "many"}, "such as 4x2048"),
    "batch": (replace(STACK, batch=lambda: 3), {"world": 2}, r"batch\(rank, step\) raised TypeError"),
    "names": (
        replace(STACK, batch={"ids": torch.ones(2)}),
        {"world": 2},
        "entries are passed as keyword arguments: TypeError: .*'ids'",
    ),
    "token": (
        replace(STACK, batch=torch.full((1, 4), VOCABULARY)),
        {"world": 2},
        f"IndexError: token {VOCABULARY} in a table of {VOCABULARY} rows",
    ),
    "file": ("train.py", {"world": 2}, "Expected FILE:FUNCTION"),
    "memory": (STACK, {"world": 2, "device_memory": "80GX"}, "expected a size such as 80GiB"),
    "negative memory": (STACK, {"world": 2, "device_memory": -5}, "expected a size such as 80GiB"),
    "frozen": (replace(STACK, build=lambda: Stack().requires_grad_(False)), {"world": 2}, "parameters are frozen"),
    "no optimizer": (STACK, {"world": 2, "optimizer": lambda model: None}, "returned NoneType. Return the optimizer"),
    "class": (STACK, {"world": 2, "optimizer": torch.optim.SGD}, r"optimizer\(model\) raised TypeError: .* It gets"),
    "PyTorch's": (replace(STACK, shard=torchs_fully_shard), {"world": 2}, "calls PyTorch's own FSDP, not unshard's"),
    "shape": (
        Program(lambda: nn.Linear(4, 4), batch=torch.ones(2, 3)),
        {"world": 2},
        r"model fails on this batch: .*\. Pass a batch that fits the model, or define functions batch",
    ),
    "device": (STACK, {"world": 2, "device": "mps"}, "'cuda' and 'cpu'"),
    "unsharded": (replace(STACK, shard=lambda model: model), {"world": 2}, "sharded no module"),
    "loss": (replace(STACK, loss=lambda model, batch: model(batch)), {"world": 2}, "one element"),
    "mesh of shard": (replace(STACK, shard=lambda model: None), {"world": 4, "mesh": (2, 2)}, "no argument mesh"),
}


def test_a_shape_means_floats_without_embeddings() -> None:
    planned = plan(lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU()), world=2, batch="64x3x32x32", advise=False)
    assert planned.peak >= 64 * 8 * 30 * 30 * 4  # the output of the convolution


@pytest.mark.parametrize("name", WRONG)
def test_wrong_input(name: str) -> None:
    program, options, text = WRONG[name]
    with pytest.raises(ArgumentError, match=text) as raised:
        plan(program, **options)
    assert "\n" not in str(raised.value) and not dist.is_initialized()
