"""Checkpoints of runs on a GPU: between numbers of ranks, in the background, and between replays of captured steps."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from bed import pool, world
from bed.captured_steps import adamw, assert_equal, locals_of, plain
from bed.runs import Run, assert_same
from bed.stack import Stack, batch, sharded
from torch import nn

from unshard import capture, checkpoint
from unshard.checkpoint import Saver
from unshard.checkpoint.host_buffers import HostBuffer

quiet = pytest.mark.filterwarnings("ignore")
KINDS = [
    *("fully_shard", "fully_shard mixed,flat", "fully_shard offload", "fully_shard host,flat", "fully_shard tp"),
    *("fully_shard hybrid", "flat mixed", "originals", "flat offload"),
]


def draws() -> tuple[list[float], list[float], float]:
    return torch.rand(3).tolist(), torch.rand(3, device="cuda").tolist(), random.random()


def save(kind: str, folder: str) -> None:
    run = Run(kind)
    run.train(range(3))
    torch.manual_seed(100 + dist.get_rank())
    checkpoint.save(Path(folder, "run"), step=3, **run.parts())
    drawn: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(drawn, draws())
    expected = {"state": run.state(), "losses": run.train(range(3, 5)), "draws": drawn, "size": dist.get_world_size()}
    if dist.get_rank() == 0:
        torch.save(expected, Path(folder, "expected.pt"))


def resume(kind: str, folder: str) -> None:
    expected = torch.load(Path(folder, "expected.pt"), weights_only=False, map_location="cpu")
    run = Run(kind, lr=0.7)
    torch.manual_seed(7)
    assert checkpoint.load(Path(folder, "run"), **run.parts()) == 3
    if dist.get_rank() < expected["size"]:
        assert draws()[:2] == expected["draws"][dist.get_rank()][:2]
    assert_same(on_host(run.state()), on_host(expected["state"]))
    losses = run.train(range(3, 5))
    if dist.get_world_size() == expected["size"]:
        assert losses == expected["losses"]
    else:
        assert losses == pytest.approx(expected["losses"], rel=1e-5 if "mixed" not in kind else 0.05)


def on_host(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: on_host(each) for key, each in value.items()}
    return value.cpu() if isinstance(value, torch.Tensor) else value


@pytest.mark.nccl_ranks
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("before", "after"), [(2, 2), (2, 4), (4, 1)])
def test_resumed_state_is_that_of_the_run_that_went_on(kind: str, before: int, after: int, tmp_path: Path) -> None:
    for body, ranks in ((save, before), (resume, after)):
        place = (body.__module__, body.__qualname__)
        pool.shared().run(place, ranks, {"kind": kind, "folder": str(tmp_path)}, "nccl", filters=["ignore"])


@quiet
@pytest.mark.parametrize("host_bytes", [None, 1000])
@pytest.mark.parametrize("kind", KINDS)
@world(1, 2, backend="nccl")
def test_a_saver_saves_what_was_there(kind: str, host_bytes: int | None, tmp_path: Path) -> None:
    """The host goes on at once; the device still computes then, and what follows must not reach the checkpoint."""
    run = Run(kind)
    run.train(range(2))
    saver = Saver(tmp_path / "saver", host_bytes=host_bytes)
    if "offload" in kind:
        saver.prepare(**run.parts())
    for step in (2, 4):
        checkpoint.save(tmp_path / "save", step=step, **run.parts())
        busy = torch.randn(2048, 2048, device="cuda")
        for _ in range(50):
            busy = busy @ busy
        saver.save(step=step, **run.parts())
        run.train(range(step, step + 2))
        saver.wait()
        for each in sorted((tmp_path / "save" / f"step_{step:08d}").glob("*.bin")):
            assert (tmp_path / "saver" / f"step_{step:08d}" / each.name).read_bytes() == each.read_bytes(), each.name
    if kind == "fully_shard":
        assert all(each.pinned for each in saver._buffers.buffers)


@world(1, backend="nccl")
def test_host_memory_is_pinned_as_it_is_asked_for() -> None:
    """And given back: torch's own pinned memory has a power of two of bytes, and stays."""
    for _ in range(3):
        buffer = HostBuffer(3 * 2**30 // 2 + 4096)
        buffer.pin()
        assert buffer.pinned and buffer.tensor.is_pinned()
        source = torch.arange(2**20, device="cuda", dtype=torch.float32)
        buffer.tensor[64 : 64 + 2**22].view(torch.float32).copy_(source, non_blocking=True)
        torch.cuda.synchronize()
        assert torch.equal(buffer.tensor[64 : 64 + 2**22].view(torch.float32), source.cpu())
        del buffer


class Dropping(Stack):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = nn.functional.dropout(self.run(block, x), 0.2, self.training)
        return self.head(x)


@world(1, 2, backend="nccl")
def test_between_replays_of_a_captured_step(tmp_path: Path) -> None:
    """Saved between two replays, and loaded into a run that replays, too: the same losses, with their dropout."""

    def start() -> tuple[nn.Module, torch.optim.Optimizer, Any]:
        model = sharded(Dropping().cuda())
        optimizer = adamw(model)
        return model, optimizer, capture(plain(model, optimizer), model, optimizer)

    def train(step: Any, numbers: range) -> list[torch.Tensor]:
        return [step(batch(10 * number + dist.get_rank()).cuda()).clone() for number in numbers]

    torch.manual_seed(dist.get_rank())
    model, optimizer, step = start()
    train(step, range(6))
    with Saver(tmp_path) as saver:
        saver.save(step=6, model=model, optimizer=optimizer)
        expected = train(step, range(6, 12)) + locals_of(model)
    assert step.recordings == 1
    other, its_optimizer, its_step = start()
    train(its_step, range(20, 26))
    assert its_step.recordings == 1
    assert checkpoint.load(tmp_path, model=other, optimizer=its_optimizer) == 6
    assert_equal(expected, train(its_step, range(6, 12)) + locals_of(other))
    for each in (step, its_step):
        each.forget()
