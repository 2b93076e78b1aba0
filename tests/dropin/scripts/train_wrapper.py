"""A training program as people write it for `FullyShardedDataParallel` of PyTorch. Writes what came out to a folder.

One file, as users' scripts are: tests run edited copies of it elsewhere, so it can share nothing with its neighbour.
"""

import contextlib
import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    BackwardPrefetch,
    FullOptimStateDictConfig,
    FullStateDictConfig,
    MixedPrecision,
    ShardingStrategy,
    StateDictType,
)
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

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


def build(seed: int) -> tuple[FSDP, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = FSDP(
        Model(),
        device_mesh=init_device_mesh("cpu", (dist.get_world_size(),)),
        sharding_strategy=ShardingStrategy.FULL_SHARD,
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        backward_prefetch=BackwardPrefetch.BACKWARD_PRE,
        mixed_precision=MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
        device_id=torch.device("cpu"),
        use_orig_params=True,
    )
    assert len(FSDP.fsdp_modules(model)) == 4 and isinstance(model.module, Model)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def train(model: FSDP, optimizer: torch.optim.Optimizer, steps: range) -> list[float]:
    losses = []
    for step in steps:
        for micro in range(2):
            generator = torch.Generator().manual_seed(100 * step + 10 * micro + dist.get_rank())
            tokens = torch.randint(31, (4, 9), generator=generator)
            with model.no_sync() if micro == 0 else contextlib.nullcontext():
                logits = model(tokens[:, :-1]).float()
                loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()) / 2
                loss.backward()
            losses.append(loss.item())
        model.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
    return losses


def states_of(model: FSDP, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return dict(zip(("model", "optim"), get_state_dict(model, optimizer), strict=True))


def restore(model: FSDP, optimizer: torch.optim.Optimizer, states: dict[str, Any]) -> None:
    set_state_dict(model, optimizer, model_state_dict=states["model"], optim_state_dict=states["optim"])


def main(out: Path) -> None:
    dist.init_process_group("gloo")
    model, optimizer = build(seed=0)
    losses = train(model, optimizer, range(3))
    dcp.save(states_of(model, optimizer), checkpoint_id=out / "checkpoint")
    model, optimizer = build(seed=1)
    states = states_of(model, optimizer)
    dcp.load(states, checkpoint_id=out / "checkpoint")
    restore(model, optimizer, states)
    losses += train(model, optimizer, range(3, 5))

    configs = FullStateDictConfig(rank0_only=True), FullOptimStateDictConfig(offload_to_cpu=False, rank0_only=True)
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, *configs):
        full = model.state_dict()
        full_optim = FSDP.optim_state_dict(model, optimizer)
    every = [None] * dist.get_world_size()
    dist.all_gather_object(every, losses)
    if dist.get_rank() == 0:
        full |= {f"{name}/{key}": value for name, kept in full_optim["state"].items() for key, value in kept.items()}
        torch.save(full, out / "full.pt")
        (out / "losses.json").write_text(json.dumps({"engine": FSDP.__module__, "losses": every}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
