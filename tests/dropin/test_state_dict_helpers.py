"""PyTorch's helpers for checkpoints with the drop-in hand out and take full tensors, whatever shards the model."""

from __future__ import annotations

from pathlib import Path

import pytest
from bed.programs import DROPIN, TORCHRUN, python

PROGRAM = """
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable import fully_shard as call
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions, get_model_state_dict, get_state_dict, set_model_state_dict, set_state_dict
)
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

dist.init_process_group("gloo")
WHOLE = StateDictOptions(full_state_dict=True)


def build(seed):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 5), nn.Sequential(nn.Linear(5, 4)), nn.Linear(4, 2))
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    if KIND == "call":
        call(model[1])
        model = call(model)
    else:
        model[1] = FSDP(model[1], use_orig_params=KIND == "originals", device_id=torch.device("cpu"))
        model = FSDP(model, use_orig_params=KIND == "originals", device_id=torch.device("cpu"))
    return model, torch.optim.Adam(model.parameters(), 0.1), expected


def step(model, optimizer):
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def same(found, expected):
    assert sorted(found) == sorted(expected), (sorted(found), sorted(expected))
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


for KIND in ("call", "originals", "flat"):
    model, optimizer, expected = build(0)
    same(get_model_state_dict(model, options=WHOLE), expected)
    step(model, optimizer)
    weights, states = get_state_dict(model, optimizer, options=WHOLE)
    assert states["state"]["2.weight"]["exp_avg"].shape == (2, 4)
    other, others, _ = build(1)
    set_state_dict(other, others, model_state_dict=weights, optim_state_dict=states, options=WHOLE)
    step(model, optimizer)
    step(other, others)
    same(other.state_dict(), model.state_dict())
    for broadcast in (False, True):  # names that are missing in the checkpoint do not change
        partial = {name: torch.full_like(value, 3.0) for name, value in expected.items() if name != "1.0.weight"}
        now = model.state_dict()
        options = StateDictOptions(full_state_dict=True, strict=False, broadcast_from_rank0=broadcast)
        set_model_state_dict(model, partial if dist.get_rank() == 0 or not broadcast else {}, options=options)
        same(model.state_dict(), {**partial, "1.0.weight": now["1.0.weight"]})
        step(model, optimizer)
dist.destroy_process_group()
"""


@pytest.mark.slow  # test_run.py has a program that saves and loads with these helpers
def test_full_state_dicts_out_and_in(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    python(*TORCHRUN, *DROPIN, program)


PARALLEL = """
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions, get_state_dict, set_model_state_dict, set_state_dict
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp._common_utils import _get_module_fsdp_state
from torch.distributed.fsdp._fsdp_extensions import _set_fsdp_extensions
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.parallel.fsdp import DTensorExtensions

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
WHOLE = StateDictOptions(full_state_dict=True)


def build(seed, originals):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 6), nn.Linear(6, 5), nn.Linear(5, 3))
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    model = FSDP(model, device_mesh=mesh["dp"], use_orig_params=originals, device_id=torch.device("cpu"))
    return model, torch.optim.Adam(model.parameters(), 0.1), expected


def step(model, optimizer):
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def same(found, expected):
    assert sorted(found) == sorted(expected), (sorted(found), sorted(expected))
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


for originals in (True, False):
    model, optimizer, expected = build(0, originals)
    state = _get_module_fsdp_state(model)
    assert isinstance(state._fsdp_extension, DTensorExtensions)
    assert state._fsdp_extension is state._fsdp_extension
    step(model, optimizer)
    for options in (WHOLE, StateDictOptions()):
        weights, states = get_state_dict(model, optimizer, options=options)
        for value in (weights["0.weight"], states["state"]["0.weight"]["exp_avg"]):
            assert value.shape == (6, 3)
            assert (not isinstance(value, DTensor)) if options is WHOLE else value.placements == (Shard(0), Shard(0))
        other, others, _ = build(1, originals)
        set_state_dict(other, others, model_state_dict=weights, optim_state_dict=states, options=options)
        same(other.state_dict(), model.state_dict())
        step(model, optimizer)
        step(other, others)
        same(other.state_dict(), model.state_dict())
    set_model_state_dict(model, expected if dist.get_rank() == 0 else {}, options=StateDictOptions(
        full_state_dict=True, broadcast_from_rank0=True
    ))
    same(model.state_dict(), expected)
plain = FSDP(nn.Linear(2, 2), device_mesh=init_device_mesh("cpu", (4,)), device_id=torch.device("cpu"))
assert plain._fsdp_extension is None
_set_fsdp_extensions(DTensorExtensions(torch.cpu))
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_tensor_parallel_parameters_of_the_wrapper(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PARALLEL)
    python(*TORCHRUN, "--nproc-per-node=4", *DROPIN, program)
