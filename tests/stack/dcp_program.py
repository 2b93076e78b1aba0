"""torch.distributed.checkpoint: `save`, `async_save` and `load` of model and optimizer, also as one full state dict."""

import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from outcome import Model, batches, loss_of, write
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

version = int(sys.argv[2])
mesh = init_device_mesh("cpu", (2,))


def build(seed: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model: torch.nn.Module = Model()
    if version == 1:
        model = FullyShardedDataParallel(
            model,
            auto_wrap_policy=ModuleWrapPolicy({type(model.blocks[0])}),
            mixed_precision=MixedPrecision(torch.bfloat16, torch.float32),
            device_mesh=mesh,
            device_id=torch.device("cpu"),
            use_orig_params=True,
        )
    else:
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
        for block in model.blocks:
            fully_shard(block, mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh, mp_policy=policy)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: list[torch.Tensor]) -> list[float]:
    losses = []
    for tokens in steps:
        loss = loss_of(model, tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


data = batches(dist.get_rank(), 8)
model, optimizer = build(0)
losses = train(model, optimizer, data[:4])
states = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
dcp.save(states, checkpoint_id=f"{sys.argv[1]}/saved")
dcp.async_save(states, checkpoint_id=f"{sys.argv[1]}/async", process_group=dist.new_group()).result()
straight = train(model, optimizer, data[4:])
resumed = []
for folder in ("saved", "async"):
    again, its_optimizer = build(1)
    into = dict(zip(("model", "optimizer"), get_state_dict(again, its_optimizer), strict=True))
    dcp.load(into, checkpoint_id=f"{sys.argv[1]}/{folder}")
    set_state_dict(again, its_optimizer, model_state_dict=into["model"], optim_state_dict=into["optimizer"])
    resumed.append(train(again, its_optimizer, data[4:]))
write("torch", model, losses + straight, resumed=resumed == [straight, straight])
dist.destroy_process_group()
