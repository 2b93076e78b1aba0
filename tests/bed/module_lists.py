"""A model whose norm, head and extra layer are one unit: `fully_shard([a, b, c])`."""

from __future__ import annotations

import torch
from bed.stack import WIDTH, Stack
from torch import nn

from unshard import fully_shard


class Model(nn.Module):
    """An embedding-like first layer, blocks, a final norm and a head; norm and head form one unit."""

    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = Stack(2)
        self.body.head = nn.Identity()
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.extra = nn.Linear(WIDTH, WIDTH)
        if tied:
            self.extra.weight = self.head.weight
        self.use_head = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.extra(self.body(x)))
        return self.head(x) if self.use_head else x


def sharded(model: Model, **options: object) -> Model:
    for block in model.body.blocks:
        fully_shard(block, **options)
    group = [model.norm, model.head, model.extra]
    assert fully_shard(group, **options) is group
    return fully_shard(model, **options)
