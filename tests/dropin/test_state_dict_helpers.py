"""PyTorch's helpers for checkpoints with the drop-in hand out and take full tensors, whatever shards the model."""

from __future__ import annotations

from pathlib import Path

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
    for broadcast in (False, True):  # a checkpoint that lacks something leaves it as it is
        partial = {name: torch.full_like(value, 3.0) for name, value in expected.items() if name != "1.0.weight"}
        now = model.state_dict()
        options = StateDictOptions(full_state_dict=True, strict=False, broadcast_from_rank0=broadcast)
        set_model_state_dict(model, partial if dist.get_rank() == 0 or not broadcast else {}, options=options)
        same(model.state_dict(), {**partial, "1.0.weight": now["1.0.weight"]})
        step(model, optimizer)
dist.destroy_process_group()
"""


def test_full_state_dicts_out_and_in(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    python(*TORCHRUN, *DROPIN, program)
