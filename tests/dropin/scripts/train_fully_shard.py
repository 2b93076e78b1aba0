"""A training program as people write it for `fully_shard` of PyTorch. Writes what came out to a folder.

One file, as users' scripts are: tests run edited copies of it elsewhere, so it can share nothing with its neighbour.
"""

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard

# -- the program --


class Block(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 3 * width), nn.GELU(), nn.Linear(3 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.mlp(self.norm(x))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(31, 17)
        self.blocks = nn.ModuleList(Block(17) for _ in range(3))
        self.head = nn.Linear(17, 31)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def build(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = Model()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, output_dtype=torch.float32)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=MixedPrecisionPolicy(), offload_policy=CPUOffloadPolicy(pin_memory=False))
    assert all(isinstance(each, FSDPModule) for each in (model, *model.blocks))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
    losses = []
    for step in steps:
        for micro in range(2):
            model.set_requires_gradient_sync(micro == 1)
            generator = torch.Generator().manual_seed(100 * step + 10 * micro + dist.get_rank())
            tokens = torch.randint(31, (4, 9), generator=generator)
            logits = model(tokens[:, :-1])
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()) / 2
            loss.backward()
            losses.append(loss.item())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return losses


def main(out: Path) -> None:
    dist.init_process_group("gloo")
    model, optimizer = build(seed=0)
    losses = train(model, optimizer, range(3))
    states = dict(zip(("model", "optim"), get_state_dict(model, optimizer), strict=True))
    dcp.save(states, checkpoint_id=out / "checkpoint")
    model, optimizer = build(seed=1)
    states = dict(zip(("model", "optim"), get_state_dict(model, optimizer), strict=True))
    dcp.load(states, checkpoint_id=out / "checkpoint")
    set_state_dict(model, optimizer, model_state_dict=states["model"], optim_state_dict=states["optim"])
    losses += train(model, optimizer, range(3, 5))

    from torch.distributed.checkpoint.state_dict import StateDictOptions

    full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    every = [None] * dist.get_world_size()
    dist.all_gather_object(every, losses)
    if dist.get_rank() == 0:
        torch.save(full, out / "full.pt")
        (out / "losses.json").write_text(json.dumps({"engine": FSDPModule.__module__, "losses": every}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
