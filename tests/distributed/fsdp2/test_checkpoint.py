"""Checkpoints on disk with `torch.distributed.checkpoint`, as the README shows."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from bed import pool, world
from bed.checkpoints import quiet
from bed.stack import Stack, assert_gradients, loss_of, sharded
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict


def steps(model: torch.nn.Module, count: int) -> torch.nn.Module:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for seed in range(count):
        loss_of(model, seed).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def save(folder: str) -> None:
    dcp.save({"model": steps(sharded(), 2).state_dict()}, checkpoint_id=folder)


def load(folder: str) -> None:
    model, reference = sharded(), steps(Stack(), 2)
    state = {"model": model.state_dict()}
    dcp.load(state, checkpoint_id=folder)
    model.load_state_dict(state["model"])
    loss_of(model).backward()
    loss_of(reference).backward()
    for mine, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(mine.detach().full_tensor(), theirs.detach(), rtol=1e-5, atol=1e-7)
    assert_gradients(model, reference)


@quiet
@pytest.mark.parametrize(("saved", "loaded"), [(2, 1), (2, 3), (3, 4), (4, 2)])
def test_saved_and_loaded_at_other_numbers_of_ranks(saved: int, loaded: int, tmp_path: Path) -> None:
    ignored = ["ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning"]
    for size, job in ((saved, save), (loaded, load)):
        pool.shared().run(job, size, {"folder": str(tmp_path)}, filters=ignored)


@quiet
@world(2, 3)
def test_an_ordinary_checkpoint(tmp_path: Path) -> None:
    """Rank 0 has the unsharded model's state; all ranks get their shards. And back."""
    reference = steps(Stack(), 1)
    file = tmp_path / "model.pt"
    if dist.get_rank() == 0:
        torch.save(reference.state_dict(), file)
    model = sharded()
    full = torch.load(file) if dist.get_rank() == 0 else {}
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, full, options=options)
    for mine, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(mine.detach().full_tensor(), theirs.detach(), rtol=0, atol=0)
    back = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    for name, value in back.items():
        assert torch.equal(value, reference.state_dict()[name])
