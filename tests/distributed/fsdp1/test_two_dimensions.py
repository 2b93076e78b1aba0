"""The wrapper with a mesh of two dimensions; checkpoints between it and `fully_shard` with tensor parallelism."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from bed import world
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from unshard import FullyShardedDataParallel as FSDP
from unshard import StateDictType, fully_shard
from unshard.wrap import always_wrap_policy

PLAN = {"first": ColwiseParallel(), "second": RowwiseParallel()}
quiet = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore:device_mesh has two dimensions")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.last = nn.Linear(6, 8), nn.Linear(8, 5), nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.second(torch.tanh(self.first(x))))


def global_mesh(names: tuple[str, str] | None = ("dp", "tp")) -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=names)


def train(model: nn.Module, optimizer: Any, steps: range, part: int, parts: int) -> None:
    """On part of a batch, the same on all ranks that do not average."""
    for step in steps:
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(step)).chunk(parts)[part]
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def wrapped(mesh: DeviceMesh, tensor_parallel: bool, originals: bool = True) -> Any:
    model = Net()
    if tensor_parallel:
        parallelize_module(model, mesh["tp"], PLAN)
    policy = None if tensor_parallel else always_wrap_policy
    return FSDP(model, device_mesh=mesh, use_orig_params=originals, auto_wrap_policy=policy)


def sharded(mesh: DeviceMesh) -> Any:
    return fully_shard(parallelize_module(Net(), mesh["tp"], PLAN), mesh=mesh["dp"])


def full(value: Any) -> Any:
    return value.full_tensor() if isinstance(value, DTensor) else value


def parameters(model: Any) -> dict[str, torch.Tensor]:
    if isinstance(model, FSDP):
        with FSDP.summon_full_params(model):
            return {name: full(each.detach()).clone() for name, each in model.named_parameters()}
    return {name: full(each.detach()).clone() for name, each in model.named_parameters()}


def assert_same(model: Any, reference: nn.Module) -> None:
    found = parameters(model)
    assert found.keys() == dict(reference.named_parameters()).keys()
    for name, parameter in reference.named_parameters():
        torch.testing.assert_close(found[name], parameter.detach(), msg=name)


def state_of(model: Any, optimizer: Any) -> dict[str, Any]:
    if not isinstance(model, FSDP):
        return {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer)}
    with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        state = FSDP.optim_state_dict(model, optimizer, for_loading=True)
        return {"model": model.state_dict(), "optimizer": state}


def load(model: Any, optimizer: Any, state: dict[str, Any]) -> None:
    if not isinstance(model, FSDP):
        model.load_state_dict(state["model"])
        set_optimizer_state_dict(model, optimizer, state["optimizer"])
        return
    with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(FSDP.optim_state_dict_to_load(model, optimizer, state["optimizer"]))


@pytest.mark.parametrize("names", [("dp", "tp"), None])
@pytest.mark.parametrize("originals", [True, False])
@quiet
@world(4)
def test_the_first_dimension_shards(originals: bool, names: tuple[str, str] | None) -> None:
    """As in PyTorch, also without tensor-parallel parameters; each column of the mesh trains by itself."""
    mesh = global_mesh(names)
    model, reference = wrapped(mesh, False, originals), Net()
    assert model.process_group.size() == 2
    row = mesh.get_local_rank(0)
    train(model, adam(model), range(3), row, 2)
    train(reference, adam(reference), range(3), 0, 1)
    assert_same(model, reference)


@world(4)
def test_a_dimension_over_which_nothing_is_averaged_is_named() -> None:
    with pytest.warns(UserWarning, match=r"nothing is averaged over 'tp'.*HYBRID_SHARD") as caught:
        FSDP(nn.Linear(4, 4), device_mesh=global_mesh())
    assert [each.filename for each in caught] == [__file__]
    wrapped(global_mesh(), tensor_parallel=True)  # silent


@pytest.mark.parametrize("tensor_parallel", [False, True])
@pytest.mark.parametrize("to", ["fully_shard", "wrapper"])
@quiet
@world(4)
def test_checkpoints_between_the_front_ends(to: str, tensor_parallel: bool, tmp_path: Path) -> None:
    """`tensor_parallel`: of the wrapper's parameters; those of `fully_shard` always are."""
    mesh = global_mesh()
    row = mesh.get_local_rank("dp")
    models = [wrapped(mesh, tensor_parallel), sharded(mesh)]
    source, target = models if to == "fully_shard" else models[::-1]
    optimizer, loaded, reference = adam(source), adam(target), Net()
    by_hand = adam(reference)
    train(source, optimizer, range(2), row, 2)
    dcp.save(state_of(source, optimizer), checkpoint_id=tmp_path / "saved")
    dist.barrier()
    state = state_of(target, loaded)
    dcp.load(state, checkpoint_id=tmp_path / "saved")
    load(target, loaded, copy.copy(state))
    train(target, loaded, range(2, 4), row, 2)
    train(reference, by_hand, range(4), 0, 1)
    assert_same(target, reference)
