"""What is trained: a Llama-shaped decoder in several sizes, and models of many small parameters."""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4).unbind()
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(-2))


class Block(nn.Module):
    """One unit: nine parameters would be usual, here query, key and value are one."""

    def __init__(self, width: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.before_attention, self.before_mlp = nn.RMSNorm(width), nn.RMSNorm(width)
        self.attention = Attention(width, heads)
        self.gate = nn.Linear(width, hidden, bias=False)
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.before_attention(x))
        normed = self.before_mlp(x)
        return x + self.down(F.silu(self.gate(normed)) * self.up(normed))


class Decoder(nn.Module):
    def __init__(self, vocabulary: int, width: int, layers: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width, heads, hidden) for _ in range(layers))
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Stack(nn.Module):
    """One unit of many small parameters. Weights are small, so that thousands of layers neither vanish nor overflow."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.003)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


class Many(nn.Module):
    """`parameters` weights and biases; units of forty, the last of fewer, and about fifty units at most."""

    WIDTH = 16

    def __init__(self, parameters: int) -> None:
        super().__init__()
        layers = parameters // 2
        each = min(layers, max(20, layers // 50))
        sizes = [min(each, layers - first) for first in range(0, layers, each)]
        self.blocks = nn.ModuleList(Stack(size, self.WIDTH) for size in sizes)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


DECODERS = {
    "tiny": {"vocabulary": 64, "width": 32, "layers": 2, "heads": 2, "hidden": 64},
    "10m": {"vocabulary": 4096, "width": 256, "layers": 8, "heads": 4, "hidden": 1024},
    "100m": {"vocabulary": 32000, "width": 768, "layers": 12, "heads": 12, "hidden": 2048},
    "1b": {"vocabulary": 32000, "width": 2048, "layers": 16, "heads": 16, "hidden": 5632},
    "7b": {"vocabulary": 32000, "width": 4096, "layers": 32, "heads": 32, "hidden": 11008},
}
SMALL = 2000
UNIT_CLASSES = (Block, Stack)


@dataclass(frozen=True)
class Case:
    """A model, what one rank feeds it in a step, and the dtype it computes in: `100m:1x512` or `10m:2x64:fp32`."""

    size: str
    samples: int
    length: int
    dtype_name: str = "bf16"

    @staticmethod
    def parse(text: str) -> Case:
        match = re.fullmatch(r"(\w+):(\d+)x(\d+)(?::(bf16|fp32))?", text)
        if match is None or not (match[1] in DECODERS or _many(match[1])):
            sizes = ", ".join([*DECODERS, "small", "<number>params"])
            raise ValueError(f"a case is SIZE:SAMPLESxLENGTH[:bf16|:fp32] with SIZE one of {sizes}; got {text!r}")
        return Case(match[1], int(match[2]), int(match[3]), match[4] or "bf16")

    def __str__(self) -> str:
        return f"{self.size}:{self.samples}x{self.length}:{self.dtype_name}"

    @property
    def dtype(self) -> torch.dtype:
        return DTYPES[self.dtype_name]

    def build(self, device: torch.device) -> nn.Module:
        """The same weights for every side."""
        torch.manual_seed(0)
        with device:
            return Many(_many(self.size)) if _many(self.size) else Decoder(**DECODERS[self.size])

    def batch(self, device: torch.device, rank: int) -> Tensor:
        dice = torch.Generator().manual_seed(1 + rank)
        if _many(self.size):
            made = torch.randn(self.samples, self.length, Many.WIDTH, generator=dice).to(self.dtype)
        else:
            made = torch.randint(DECODERS[self.size]["vocabulary"], (self.samples, self.length), generator=dice)
        return made.to(device)

    def loss(self, model: nn.Module, batch: Tensor) -> Tensor:
        output = model(batch)
        if batch.is_floating_point():
            return output.square().mean()
        return F.cross_entropy(output.flatten(0, 1), batch.flatten())


def units(model: nn.Module) -> list[nn.Module]:
    """The modules that become units of their own, before the model itself."""
    return [module for module in model.modules() if isinstance(module, UNIT_CLASSES)]


def unit_sizes(model: nn.Module) -> list[int]:
    """Elements per unit, of the unsharded model; the root's unit, which holds the rest, comes last."""
    sizes = [sum(parameter.numel() for parameter in unit.parameters()) for unit in units(model)]
    rest = sum(parameter.numel() for parameter in model.parameters()) - sum(sizes)
    return [*sizes, rest] if rest else sizes


def _many(size: str) -> int:
    """How many parameters a size of small ones has; 0 for a decoder."""
    match = re.fullmatch(r"(\d+)params", size)
    return SMALL if size == "small" else int(match[1]) if match else 0
