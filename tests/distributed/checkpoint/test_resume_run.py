"""A run that is resumed from a checkpoint, with any number of ranks, has bitwise the state of the run that went on."""

from __future__ import annotations

import json
import random
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
from bed import pool
from bed.runs import Run, assert_same

from unshard import checkpoint


def draws() -> tuple[list[float], float, float]:
    return torch.rand(3).tolist(), random.random(), float(np.random.rand())


def seed(number: int) -> None:
    torch.manual_seed(number)
    random.seed(number)
    np.random.seed(number)


def save(kind: str, folder: str) -> None:
    run = Run(kind)
    run.train(range(3))
    seed(100 + dist.get_rank())
    checkpoint.save(Path(folder, "run"), step=3, **run.parts())
    drawn: list = [None] * dist.get_world_size()
    dist.all_gather_object(drawn, draws())
    state = run.state()
    expected = {"state": state, "losses": run.train(range(3, 5)), "draws": drawn, "size": dist.get_world_size()}
    if dist.get_rank() == 0:
        torch.save(expected, Path(folder, "expected.pt"))


def assert_close(losses: list[float], expected: list[float], kind: str) -> None:
    """Losses at another number of ranks, after bitwise equal states. Sums over ranks have another order.

    In fp32 all losses are within 1e-6 (measured: 2.1e-7 over five steps). In bf16 that holds for the first loss only:
    after a step, fp32 parameters that differ in their last bits may be rounded to different bf16 values. The other
    losses are within the rounding of bf16 (measured: 4.8e-4).
    """
    rounding = torch.finfo(torch.bfloat16).eps / 2
    assert losses[0] == pytest.approx(expected[0], rel=1e-6)
    assert losses == pytest.approx(expected, rel=rounding if "mixed" in kind else 1e-6)


def resume(kind: str, folder: str) -> None:
    expected = torch.load(Path(folder, "expected.pt"), weights_only=False)
    rank, size = dist.get_rank(), dist.get_world_size()
    each_time = []
    for stepped in (False, True):
        run = Run(kind, lr=0.7)
        if stepped:
            run.train(range(5, 6))
        seed(7)
        assert checkpoint.load(Path(folder, "run"), **run.parts()) == 3
        if rank < expected["size"]:
            assert draws() == expected["draws"][rank]
        if size == expected["size"]:
            assert torch.equal(run.data.order, torch.arange(3000) + rank)
        else:
            orders = [state["order"] for state in run.data.states]
            assert_same(orders, [torch.arange(3000) + each for each in range(expected["size"])])
        assert_same(run.state(), expected["state"])
        if stepped:
            checkpoint.save(Path(folder, "back"), step=3, **run.parts())
        each_time.append(run.train(range(3, 5)))
    assert each_time[0] == each_time[1]
    if size == expected["size"]:
        assert each_time[0] == expected["losses"]
    else:
        assert_close(each_time[0], expected["losses"], kind)


def go_back(kind: str, folder: str) -> None:
    """With the first number of ranks again, the arithmetic is the same: what another number saved changes nothing."""
    expected = torch.load(Path(folder, "expected.pt"), weights_only=False)
    run = Run(kind, lr=0.7)
    assert checkpoint.load(Path(folder, "back"), **run.parts()) == 3
    assert_same(run.state(), expected["state"])
    assert run.train(range(3, 5)) == expected["losses"]


def job(body: object, ranks: int, **arguments: object) -> None:
    pool.shared().run((body.__module__, body.__qualname__), ranks, arguments, filters=["ignore"])  # type: ignore[attr-defined]


QUICK = {
    ("fully_shard", 4, 3),
    ("fully_shard,flat", 2, 3),
    ("flat mixed", 2, 3),
    ("originals", 3, 2),
    ("fully_shard tp", 4, 4),
    ("fully_shard hybrid", 4, 2),
    ("fully_shard tied,sgd", 2, 1),
}
KINDS = [
    *("fully_shard", "fully_shard mixed", "fully_shard hybrid", "fully_shard tp", "fully_shard offload"),
    *("fully_shard tied,sgd", "fully_shard columns convolution", "fully_shard,flat", "fully_shard offload,flat"),
    *("fully_shard mixed,flat sgd", "flat", "flat mixed", "flat hybrid", "flat offload", "flat tied", "flat,sgd"),
    *("originals", "originals mixed", "originals hybrid", "originals tied", "originals offload", "originals,sgd"),
    *("originals channels convolution", "flat channels convolution", "originals tp"),
]
ROWS = [
    pytest.param(kind, before, after, marks=() if (kind, before, after) in QUICK else pytest.mark.slow)
    for kind in KINDS
    for before, after in ((4, 4), (4, 3), (4, 2), (4, 1), (2, 4), (2, 3), (3, 2), (1, 4), (2, 1))
    if "tp" not in kind or 3 not in (before, after)
]


@pytest.mark.parametrize(("kind", "before", "after"), ROWS)
def test_resumed_state_is_that_of_the_run_that_went_on(kind: str, before: int, after: int, tmp_path: Path) -> None:
    job(save, before, kind=kind, folder=str(tmp_path))
    assert checkpoint.verify(tmp_path / "run") == tmp_path / "run" / "step_00000003"
    assert [each.name for each in (tmp_path / "run").iterdir()] == ["step_00000003"]
    job(resume, after, kind=kind, folder=str(tmp_path))
    job(go_back, before, kind=kind, folder=str(tmp_path))


def save_as_large_job(kind: str, folder: str) -> None:
    """As in a job of more than 64 ranks: shared lists of boxes, and random numbers in the files of the ranks."""
    with patch("unshard.checkpoint.manifest.MOST_INLINE", 0), patch("unshard.checkpoint.values.MANY_RANKS", 0):
        save(kind, folder)


@pytest.mark.parametrize("kind", ["fully_shard", pytest.param("originals hybrid", marks=pytest.mark.slow), "flat"])
def test_the_format_of_large_jobs(kind: str, tmp_path: Path) -> None:
    ranks = 4 if "hybrid" in kind else 3
    job(save_as_large_job, ranks, kind=kind, folder=str(tmp_path))
    folder = checkpoint.verify(tmp_path / "run")
    content = json.loads((folder / "manifest.json").read_text())["manifest"]
    assert content["version"] == 2 and len(content["splits"]) < len(content["tensors"])
    assert [each["rng"] for each in content["values"]["ranks"]] == [
        {"$": "json", "name": f"rng/{rank}"} for rank in range(ranks)
    ]
    job(resume, 2 if kind == "flat" else ranks, kind=kind, folder=str(tmp_path))
