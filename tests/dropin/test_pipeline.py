"""PyTorch's pipelines with stages that ours has sharded: they reach into the state of their stages."""

from __future__ import annotations

import copy
import importlib

import pytest
import torch
import torch.distributed as dist
from bed import world
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from unshard import dropin
from unshard.engine.hooks import state_of


@pytest.mark.parametrize("schedule", ["ScheduleGPipe", "Schedule1F1B"])
@world(4)
def test_stages_of_a_pipeline(schedule: str) -> None:
    """Two stages, each over two ranks, four micro-batches: the gradients of the model in one piece."""
    with dropin.stand_in():
        from torch.distributed.fsdp import fully_shard

        pipelining = importlib.import_module("torch.distributed.pipelining")
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
        number, replica = mesh["pp"].get_local_rank(), mesh["dp"].get_local_rank()
        torch.manual_seed(0)
        parts = [nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)) for _ in range(2)]
        reference = nn.Sequential(*copy.deepcopy(parts))
        part = parts[number]
        for layer in (part[0], part[2]):
            fully_shard(layer, mesh=mesh["dp"])
        fully_shard(part, mesh=mesh["dp"])
        group = mesh["pp"].get_group()
        stage = pipelining.PipelineStage(part, number, 2, torch.device("cpu"), group=group)
        loss = nn.functional.mse_loss
        runner = getattr(pipelining, schedule)(stage, n_microbatches=4, loss_fn=loss)
        for step in range(2):
            batches = torch.randn(2, 8, 8, generator=torch.Generator().manual_seed(step))
            targets = torch.zeros(8, 8)
            runner.step(*([batches[replica]] if number == 0 else []), **({} if number == 0 else {"target": targets}))
            for batch in batches:
                (loss(reference(batch), targets) / 2).backward()
            for mine, theirs in zip(part.parameters(), reference[number].parameters(), strict=True):
                assert mine.grad is not None and theirs.grad is not None
                torch.testing.assert_close(mine.grad.full_tensor(), theirs.grad, rtol=1e-4, atol=1e-6)
            for module in (part, part[0], part[2]):
                assert state_of(module).unit.param_state.name == "SHARDED"
            part.zero_grad()
            reference.zero_grad()
    dist.barrier()
