"""A run that is resumed from a checkpoint, with any number of ranks, has bitwise the state of the run that went on."""

from __future__ import annotations

import random
from pathlib import Path

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


def resume(kind: str, folder: str) -> None:
    expected = torch.load(Path(folder, "expected.pt"), weights_only=False)
    rank, size = dist.get_rank(), dist.get_world_size()
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
        losses = run.train(range(3, 5))
        if size == expected["size"]:
            assert losses == expected["losses"]
        else:
            assert losses == pytest.approx(expected["losses"], rel=1e-5 if "mixed" not in kind else 0.05)


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
