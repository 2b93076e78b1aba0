"""Listings of the guides train like the unsharded model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from bed import world
from bed.pages import listings
from bed.recorders import Collectives
from bed.stack import Stack, assert_gradients, loss_of, sharded
from bed.user_collectives import ignore_old_names
from torch import nn

from unshard import FSDPModule, fully_shard


def run(code: str, **names: Any) -> dict[str, Any]:
    exec(compile(code, "listing", "exec"), names)
    return names


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.inner(x))


class Blocks(nn.Module):
    """The model of the page, without checkpoints."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


@pytest.mark.parametrize("edited", [True, False])
@world(2)
def test_activation_checkpointing(edited: bool) -> None:
    page = "docs/activation_checkpointing.md"
    [in_the_model], [outside] = listings(page), listings(page, "A model that you do not want to edit")
    torch.manual_seed(0)
    if edited:
        model = run(in_the_model, nn=nn, Block=Block, fully_shard=fully_shard)["model"]
    else:
        model = Blocks()
        run(outside, model=model, fully_shard=fully_shard, checkpoint=torch.utils.checkpoint.checkpoint)
    torch.manual_seed(0)
    reference = Blocks()
    forwards = []
    model.blocks[0].inner.register_forward_hook(lambda *_: forwards.append(1))
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(1))
    for each in (model, reference):
        each(x).square().mean().backward()
    assert len(forwards) == 2 and all(isinstance(block, FSDPModule) for block in model.blocks)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad.full_tensor(), reference.get_parameter(name).grad, msg=name)


@ignore_old_names
@world(2)
def test_custom_collectives() -> None:
    model, reference = sharded(), Stack()
    gather = run(*listings("docs/custom_collectives.md"), model=model)["gather"]
    with Collectives() as sent:
        loss_of(model).backward()
    loss_of(reference).backward()
    numel = sum(parameter.numel() for parameter in reference.blocks.parameters())
    assert gather.received == 2 * 4 * numel // 2  # two all-gathers of fp32, half of each is received
    assert [each.inputs[0][0] for each in sent.of("reduce_scatter")].count(torch.bfloat16) == 3
    assert_gradients(model, reference, rtol=0.02, atol=1e-4)


# -- migrating ---------------------------------------------------------------------------------------------


def migrated(code: str, **names: Any) -> dict[str, Any]:
    """Run a listing of the page on two batches of this rank. Ranks build different weights, except with one seed."""
    torch.manual_seed(names.pop("seed", 0))
    draw = torch.Generator().manual_seed(dist.get_rank())
    batches = [(torch.randn(3, 64, generator=draw), torch.randn(3, 64, generator=draw)) for _ in range(2)]
    return run(code, torch=torch, Transformer=Blocks, loss_function=nn.functional.mse_loss, batches=batches, **names)


def assert_states_equal(mine: dict[str, Any], theirs: dict[str, Any]) -> None:
    assert mine.keys() == theirs.keys() and len(mine) == 10
    for name, value in mine.items():
        torch.testing.assert_close(value, theirs[name], rtol=1e-4, atol=1e-6, msg=name)


@world(2)
def test_from_ddp(tmp_path: Path) -> None:
    """The listings before and after train the same weights, and so does the loop without Accelerate."""
    before, after = (
        migrated(code, seed=dist.get_rank())["state"] for code in listings("docs/migrating.md", "From DDP")
    )
    _, plain = listings("docs/migrating.md", "From Accelerate")
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.chdir(tmp_path)
        model = migrated(plain)["model"]
    assert (tmp_path / "checkpoints" / "step_00000001").is_dir()
    if dist.get_rank() == 0:
        assert_states_equal(after, before)
    full = {name: each.full_tensor() for name, each in model.state_dict().items()}
    if dist.get_rank() == 0:
        assert_states_equal(full, before)


@world(2)
def test_the_way_back(tmp_path: Path) -> None:
    """A run of PyTorch's FSDP2 goes on with the weights and the optimizer state."""
    save, load = listings("docs/migrating.md", "The way back")
    ours = migrated(listings("docs/migrating.md", "From DDP")[1])
    run(save, model=ours["model"], optimizer=ours["optimizer"], folder=tmp_path)
    theirs = migrated(load, folder=tmp_path)
    for names in (ours, theirs):
        model, optimizer = names["model"], names["optimizer"]
        model(torch.ones(2, 64)).sum().backward()
        optimizer.step()
    assert_states_equal(
        *({name: each.full_tensor() for name, each in names["model"].state_dict().items()} for names in (ours, theirs))
    )
    assert type(theirs["model"]).__mro__[1].__module__.startswith("torch.distributed")
