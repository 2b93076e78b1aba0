"""A model with norms, an embedding and buffers, for reports about dtypes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import nn

from unshard import MixedPrecisionPolicy, fully_shard

F32, F16, B16, F64 = torch.float32, torch.float16, torch.bfloat16, torch.float64

QUIET = MixedPrecisionPolicy(B16, F32, output_dtype=F32)  # nothing to say about it


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self, blocks: int = 3) -> None:
        super().__init__()
        self.register_buffer("inv_freq", 1.0 / 10 ** torch.arange(8), persistent=False)
        self.register_buffer("scale", torch.tensor([0.3]))
        self.register_buffer("seen", torch.tensor(0))
        self.tokens = nn.Embedding(12, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.head = nn.Linear(8, 4)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) * self.inv_freq.to(self.tokens.weight.dtype)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def batch() -> torch.Tensor:
    return torch.randint(12, (3, 4), generator=torch.Generator().manual_seed(dist.get_rank()))


def sharded(policy: MixedPrecisionPolicy = QUIET, model: nn.Module | None = None, **options: object) -> Model:
    """Every block a unit; only the root casts what it returns."""
    model = Model() if model is None else model
    for block in model.blocks:
        fully_shard(block, mp_policy=replace(policy, output_dtype=None), **options)
    return fully_shard(model, mp_policy=policy, **options)


class Narrow(torch.optim.SGD):
    """Momentum in bf16."""

    def step(self, closure: Callable[[], float] | None = None) -> None:
        super().step(closure)
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            state["momentum_buffer"] = state["momentum_buffer"].to(B16)
