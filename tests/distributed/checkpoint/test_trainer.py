"""The trainer of `make demo`, stopped and resumed with another number of ranks, in processes that are there already.

`tests/test_examples.py` runs the program itself under torchrun and kills it; that takes longer.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from bed import pool

from unshard import tools

PROGRAM = Path(__file__).parents[3] / "examples" / "train_bytes.py"
STEPS = 8


def trainer() -> Any:
    """A fresh module: what a test replaces in it is of this test only."""
    spec = importlib.util.spec_from_file_location("train_bytes_of_a_test", PROGRAM)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where its dataclasses look for annotations
    spec.loader.exec_module(module)
    return module


def train(folder: str, stop_in: int, save_every: int, result: str) -> None:
    """Train on; rank 0 writes the step that was loaded and the losses of all steps. The last rank is sent SIGTERM."""
    module, losses = trainer(), {}
    sizes: dict[str, Any] = {"layers": 1, "dim": 32, "seq": 8, "batch": 12, "steps": STEPS, "lr": 3e-3, "seed": 0}
    args = argparse.Namespace(**sizes, dtype="fp32", folder=Path(folder), save_every=save_every)
    data = torch.randint(256, (4000,), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    draw_starts = module.draw_starts

    def draw_and_stop(data: Any, step: int, args: Any) -> Any:
        if step == stop_in and dist.get_rank() == dist.get_world_size() - 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return draw_starts(data, step, args)

    module.draw_starts = draw_and_stop
    module.Progress.update = lambda self, step, loss, *rest: losses.update({step: loss})
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        model, size = module.build_sharded(args, torch.device("cpu"))
        optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, foreach=True)
        checkpoints = module.Checkpoints(args, model, optimizer)
        done = checkpoints.load()
        with tools.record(Path(folder) / "report", model, optimizer) as recording:
            outcome = module.train(
                model, optimizer, checkpoints, done, data, args, torch.device("cpu"), recording, size
            )
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert outcome.last_step == max(losses) == (stop_in or STEPS)
    if dist.get_rank() == 0:
        torch.save((done, losses), result)


def job(ranks: int, folder: Path, stop_in: int = 0, save_every: int = 100) -> tuple[int, dict[int, float]]:
    result = folder.parent / "result.pt"
    arguments = {"folder": str(folder), "stop_in": stop_in, "save_every": save_every, "result": str(result)}
    pool.shared().run((train.__module__, train.__qualname__), ranks, arguments, filters=["ignore"])
    return torch.load(result, weights_only=False)


@pytest.mark.parametrize(("first", "second", "third"), [(2, 3, 1), (1, 2, 2)])
def test_the_trainer_goes_on_where_it_was(first: int, second: int, third: int, tmp_path: Path) -> None:
    _, straight = job(first, tmp_path / "straight")
    assert list(straight) == list(range(1, STEPS + 1))
    one = job(first, tmp_path / "run", stop_in=3)
    two = job(second, tmp_path / "run", stop_in=6, save_every=2)
    three = job(third, tmp_path / "run")
    assert [done for done, _ in (one, two, three)] == [0, 3, 6]
    assert one[1] == {step: straight[step] for step in (1, 2, 3)}  # the same arithmetic
    found = {**one[1], **two[1], **three[1]}
    assert list(found) == list(straight)
    assert list(found.values()) == pytest.approx(list(straight.values()), rel=1e-6)
