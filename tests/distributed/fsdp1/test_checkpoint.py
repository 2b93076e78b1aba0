"""Checkpoints of wrapped models and their optimizers on disk, resumed by a fresh optimizer at any number of ranks."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from bed import models, pool, world
from bed.models import CASES
from bed.wrapped import full_parameters, wrap, wrap_case
from torch import nn

from unshard import FullyShardedDataParallel as FSDP
from unshard import ShardingStrategy, StateDictType
from unshard.composable import fully_shard as legacy

CASE = CASES[1]
SHARDED = StateDictType.SHARDED_STATE_DICT
OPTIMIZERS = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, 1e-2),
    "adamw_amsgrad": lambda parameters: torch.optim.AdamW(parameters, 1e-2, amsgrad=True, foreach=False),
    "sgd": lambda parameters: torch.optim.SGD(parameters, 1e-2, momentum=0.9),
    "plain_sgd": lambda parameters: torch.optim.SGD(parameters, 1e-2),
    "adagrad": lambda parameters: torch.optim.Adagrad(parameters, 1e-2),
}
kinds = pytest.mark.parametrize("kind", ["flat", "originals", "legacy"])
# The state dict API is deprecated, and planning a save warns about things that only matter to those who wrote it.
noise = ["ignore::FutureWarning", "ignore::DeprecationWarning", "ignore:.*NO_SHARD", "ignore::UserWarning:torch.*"]
quiet = pytest.mark.filterwarnings(*noise)


def build(kind: str) -> nn.Module:
    if kind != "legacy":
        return wrap_case(CASE, use_orig_params=kind == "originals")
    model = CASE.build()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # one rank
        for unit in CASE.units(model):
            legacy(unit)
        return model


def run(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        batch = models.shard(CASE.batch(step), dist.get_rank(), dist.get_world_size())
        CASE.loss(model, batch).backward()
        optimizer.step()
        optimizer.zero_grad()


def local(optimizer: torch.optim.Optimizer) -> dict[Any, dict[str, Any]]:
    """This rank's state as it is, copied."""
    states = optimizer.state_dict()["state"]
    return {key: {name: torch.as_tensor(each).clone() for name, each in state.items()} for key, state in states.items()}


def same(found: dict[Any, dict[str, Any]], expected: dict[Any, dict[str, Any]]) -> None:
    for key, state in expected.items():
        assert found[key].keys() == state.keys()
        for name, value in state.items():
            assert torch.equal(found[key][name], value), (key, name)


def save(folder: str, kind: str, name: str) -> None:
    model = build(kind)
    optimizer = OPTIMIZERS[name](model.parameters())
    run(model, optimizer, range(2))
    whole = {"state": FSDP.optim_state_dict(model, optimizer)["state"], "model": full_parameters(model)}
    if dist.get_rank() == 0:
        torch.save(whole, f"{folder}/whole.pt")
    with FSDP.state_dict_type(model, SHARDED):
        state = {"model": model.state_dict(), "optimizer": FSDP.optim_state_dict(model, optimizer)}
        dcp.save(state, checkpoint_id=f"{folder}/checkpoint")


def load(folder: str, kind: str, name: str) -> None:
    """Into a fresh optimizer: bit by bit what was saved."""
    model = build(kind)
    optimizer = OPTIMIZERS[name](model.parameters())
    before = local(optimizer)
    with FSDP.state_dict_type(model, SHARDED):
        template = FSDP.optim_state_dict(model, optimizer, for_loading=True)
        state = {"model": model.state_dict(), "optimizer": template}
        same(local(optimizer), before)
        dcp.load(state, checkpoint_id=f"{folder}/checkpoint")
        model.load_state_dict(state["model"])
        found = FSDP.optim_state_dict_to_load(model, optimizer, state["optimizer"])
        optimizer.load_state_dict(found)
    whole = torch.load(f"{folder}/whole.pt")
    assert bool(whole["state"]) == (name != "plain_sgd")
    states = FSDP.optim_state_dict(model, optimizer)["state"]
    assert states.keys() == whole["state"].keys()
    same(states, whole["state"])
    for key, value in full_parameters(model).items():
        assert torch.equal(value, whole["model"][key]), key
    run(model, optimizer, range(2, 3))
    if "adam" in name:
        assert {state["step"].item() for state in FSDP.optim_state_dict(model, optimizer)["state"].values()} == {3}


@quiet
@kinds
@pytest.mark.parametrize(("saved", "loaded"), [(1, 1), (2, 2), (3, 3), (4, 4), (2, 3), (4, 1), (1, 2)])
def test_resumed_with_a_fresh_optimizer(kind: str, saved: int, loaded: int, tmp_path: Path) -> None:
    for size, job in ((saved, save), (loaded, load)):
        pool.shared().run(
            job, size, {"folder": str(tmp_path), "kind": kind, "name": "adamw"}, filters=["error", *noise]
        )


@quiet
@pytest.mark.parametrize("name", [name for name in OPTIMIZERS if name != "adamw"])
def test_optimizers(name: str, tmp_path: Path) -> None:
    for size, job, kind in ((2, save, "flat"), (3, load, "originals")):
        pool.shared().run(job, size, {"folder": str(tmp_path), "kind": kind, "name": name}, filters=["error", *noise])


@quiet
@kinds
@world(1, 2, 3)
def test_a_load_without_state_is_noticed(kind: str, tmp_path: Path) -> None:
    """The state dict of an optimizer that has taken no step has no room for what the checkpoint has."""
    model = build(kind)
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    run(model, optimizer, range(1))
    fresh = OPTIMIZERS["adamw"](model.parameters())
    with FSDP.state_dict_type(model, SHARDED):
        dcp.save({"optimizer": FSDP.optim_state_dict(model, optimizer)}, checkpoint_id=str(tmp_path))
        state = {"optimizer": FSDP.optim_state_dict(model, fresh)}
        dcp.load(state, checkpoint_id=str(tmp_path))
        with pytest.warns(UserWarning) as seen:
            FSDP.optim_state_dict_to_load(model, fresh, state["optimizer"], load_directly=True)
    (found,) = (str(each.message) for each in seen if each.category is UserWarning)
    for part in ("no state for ", " parameters of this AdamW", "torch.distributed.checkpoint.load", "for_loading=True"):
        assert part in found
    with pytest.warns(UserWarning, match="no state for"):  # names of another model
        other = FSDP.optim_state_dict(model, optimizer)
        other["state"] = {f"other.{name}": state for name, state in other["state"].items()}
        FSDP.optim_state_dict_to_load(model, fresh, other)


class Some(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.rare, self.frozen = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3)
        self.frozen.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.used(self.frozen(x))


@quiet
@world(1, 2)
def test_some_parameters_without_state() -> None:
    """They are named, unless a step gives them none."""
    model = wrap(Some(), [], use_orig_params=True)
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    state = FSDP.optim_state_dict(model, optimizer)
    assert sorted(state["state"]) == ["used.bias", "used.weight"]
    complete = FSDP.optim_state_dict(model, optimizer, for_loading=True)
    assert sorted(complete["state"]) == ["rare.bias", "rare.weight", "used.bias", "used.weight"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        FSDP.optim_state_dict_to_load(model, optimizer, complete)
        plain = OPTIMIZERS["plain_sgd"](model.parameters())
        FSDP.optim_state_dict_to_load(model, plain, FSDP.optim_state_dict(model, plain))
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        FSDP.optim_state_dict_to_load(model, optimizer, state)
    held = [
        name for name in ("rare.weight", "rare.bias") if model.get_parameter(f"_fsdp_wrapped_module.{name}").numel()
    ]
    assert len(seen) == bool(held)
    for each in seen:
        assert str(each.message).startswith(f"The optimizer state to load has no state for {len(held)} parameters")
        assert all(repr(name) in str(each.message) for name in held) and "used" not in str(each.message)
        assert each.filename == __file__


class Counting(torch.optim.SGD):
    """Keeps something in its groups, and reacts to steps."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1
        return super().step(closure)


@quiet
@world(2)
def test_nothing_changes_and_no_hook_is_called() -> None:
    model = wrap_case(CASE, sharding_strategy=ShardingStrategy.FULL_SHARD)
    optimizer = Counting(model.parameters(), 1.0, momentum=0.9, weight_decay=1.0)
    called: list[Any] = []
    optimizer.register_step_pre_hook(lambda *unused: called.append("before"))
    optimizer.register_step_post_hook(lambda *unused: called.append("after"))
    torch.optim.lr_scheduler.ConstantLR(optimizer)
    called.clear()
    before = full_parameters(model)
    template = FSDP.optim_state_dict(model, optimizer, for_loading=True)
    assert sorted(template["state"]) == sorted(before)
    assert not called and not optimizer.state and "count" not in optimizer.param_groups[0]
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(torch.equal(value, before[name]) for name, value in full_parameters(model).items())


@quiet
@world(2)
def test_an_optimizer_that_steps_only_with_a_closure() -> None:
    model = wrap_case(CASE)
    optimizer = torch.optim.LBFGS(model.parameters())
    with pytest.raises(RuntimeError, match=r"LBFGS did not create its state.*Take a step"):
        FSDP.optim_state_dict(model, optimizer, for_loading=True)
    assert len(optimizer.param_groups[0]["params"]) == len(list(model.parameters()))
    with pytest.warns(UserWarning, match="of this LBFGS"):
        FSDP.optim_state_dict_to_load(model, optimizer, FSDP.optim_state_dict(model, optimizer))
