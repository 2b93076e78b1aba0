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

import unshard
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


@pytest.mark.skipif(
    torch.__version__ < "2.12",
    reason="torch 2.11: the first messages of this schedule end in Gloo's 'Pair is not connected'",
)
@world(4)
def test_schedule_that_splits_backward() -> None:
    """ZeroBubble, four stages kept after forward: gradients of parameters come later than those of inputs."""
    with dropin.stand_in():
        from torch.distributed.fsdp import fully_shard

        pipelining = importlib.import_module("torch.distributed.pipelining")
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
        number, replica = mesh["pp"].get_local_rank(), mesh["dp"].get_local_rank()
        torch.manual_seed(0)
        parts = [nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8)) for _ in range(4)]
        reference = nn.Sequential(*copy.deepcopy(parts))
        mine = [number, 3 - number]
        for each in mine:
            for module in (parts[each][0], parts[each]):
                fully_shard(module, mesh=mesh["dp"], reshard_after_forward=False)
        group, loss, targets = mesh["pp"].get_group(), nn.functional.mse_loss, torch.zeros(8, 8)
        stages = [pipelining.PipelineStage(parts[each], each, 4, torch.device("cpu"), group=group) for each in mine]
        runner = pipelining.ScheduleZBVZeroBubble(stages, n_microbatches=4, loss_fn=loss)
        batches = torch.randn(2, 8, 8, generator=torch.Generator().manual_seed(1))
        first_and_last = number == 0
        runner.step(*[batches[replica]] * first_and_last, **({"target": targets} if first_and_last else {}))
        for batch in batches:
            (loss(reference(batch), targets) / 2).backward()
        for each in mine:
            for own, theirs in zip(parts[each].parameters(), reference[each].parameters(), strict=True):
                assert own.grad is not None and theirs.grad is not None
                torch.testing.assert_close(own.grad.full_tensor(), theirs.grad, rtol=1e-4, atol=1e-6)
    dist.barrier()


@world(2)
def test_split_backward_of_resharded_units_is_refused() -> None:
    """The schedule looks for the parameters of the graph on the modules, which hold others."""
    backward = importlib.import_module("torch.distributed.pipelining._backward")
    for kept in (False, True):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        unshard.fully_shard(model[0], reshard_after_forward=not kept)
        unshard.fully_shard(model, reshard_after_forward=not kept)
        for told in (False, True):  # as a pipeline tells a stage that it knows to be sharded
            inputs = torch.randn(2, 4, requires_grad=True)
            (gradient,) = torch.autograd.grad(model(inputs).sum(), inputs)  # one for inputs only is not split
            assert gradient.shape == (2, 4)
            model.set_reshard_after_backward(not told)
            model.set_requires_gradient_sync(not told)
            output = model(inputs)
            if kept and told:
                _, groups = backward.stage_backward_input([output], None, [inputs], model.parameters())
                assert sum(len(group["params"]) for group in groups) == 4
            else:
                with pytest.raises(RuntimeError) as raised:
                    backward.stage_backward_input([output], None, [inputs], model.parameters())
                assert "reshard_after_forward=False" in str(
                    raised.value.__cause__ or raised.value
                )  # torch 2.11 adds none
            model.reset_iter_state()
            model.set_reshard_after_backward(True)
            model.set_requires_gradient_sync(True)
