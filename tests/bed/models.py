"""Five small models that between them hold every kind of parameter that is awkward to shard.

Each is a `Case`: how to build it, what to feed it, what to minimise, and which submodules to shard. All of it is
seeded, so two builds are equal and every rank sees the same whole batch, of which it takes its slice.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

SAMPLES = 12  # divisible by 1, 2, 3 and 4 ranks

Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Case:
    """A model to train. `loss` is a mean over samples: the mean of the ranks' losses is the loss of the batch."""

    name: str
    build: Callable[[], nn.Module]
    batch: Callable[..., Batch]
    loss: Callable[[nn.Module, Batch], Tensor]
    units: Callable[[nn.Module], list[nn.Module]]

    def __str__(self) -> str:  # the test id
        return self.name

    def __reduce__(self) -> tuple[Callable[[str], Case], tuple[str]]:
        # The functions in here may be nameless; a rank looks the case up by name instead.
        return case, (self.name,)


def case(name: str) -> Case:
    return next(each for each in CASES if each.name == name)


def shard(batch: Batch, rank: int, size: int) -> Batch:
    """The slice of the batch that belongs to the rank."""
    samples = len(batch[0])
    if samples % size:
        raise ValueError(f"{samples} samples cannot be dealt evenly to {size} ranks")
    each = samples // size
    inputs, targets = (part[rank * each : (rank + 1) * each] for part in batch)
    return inputs, targets


def _seeded(make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1234)
            return make()

    return build


def _dice(step: int) -> torch.Generator:
    return torch.Generator().manual_seed(77_000 + step)


def _cross_entropy(model: nn.Module, batch: Batch) -> Tensor:
    """Every sample has equally many targets, so a mean over targets is a mean over samples."""
    inputs, targets = batch
    return F.cross_entropy(model(inputs).flatten(0, -2), targets.flatten())


def _squared_error(model: nn.Module, batch: Batch) -> Tensor:
    inputs, targets = batch
    outputs = model(inputs)
    dtype = torch.promote_types(outputs.dtype, targets.dtype)  # which mse_loss itself does since torch 2.13
    return F.mse_loss(outputs.to(dtype), targets.to(dtype))


# --- transformer: the usual shape, equal blocks as units -------------------------------------------------------

VOCABULARY, LENGTH, WIDTH, HEADS = 32, 8, 16, 2


def _tokens(vocabulary: int) -> Callable[..., Batch]:
    def batch(step: int, total: int = SAMPLES) -> Batch:
        tokens = torch.randint(vocabulary, (total, LENGTH + 1), generator=_dice(step))
        return tokens[:, :-1], tokens[:, 1:]

    return batch


class Attention(nn.Module):
    """No bias before the softmax: a key's bias has a gradient of exactly zero, and Adam would follow the noise."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(parts[0], parts[1], parts[2], is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(-2))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(WIDTH), Attention()
        self.norm2 = nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Transformer(nn.Module):
    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.places = nn.Parameter(0.1 * torch.randn(LENGTH, WIDTH))
        self.blocks = nn.ModuleList(Block() for _ in range(layers))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.places
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


# --- uneven: sizes that no number of ranks divides, and parameters too small to give every rank a row ----------


class Uneven(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(7, 13), nn.Linear(13, 5), nn.Linear(5, 3))
        self.out = nn.Linear(3, 1)  # a single row: all ranks but the first hold nothing of it
        self.gain = nn.Parameter(torch.tensor([[0.7, -0.4, 1.1]]))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.out(x * self.gain)


def _uneven_batch(step: int, total: int = SAMPLES) -> Batch:
    dice = _dice(step)
    return torch.randn(total, 7, generator=dice), torch.randn(total, 1, generator=dice)


# --- tied: one weight used twice, in the unit where both uses meet ---------------------------------------------


class Tied(nn.Module):
    ROWS = 29

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(self.ROWS, WIDTH)
        self.hidden = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.head = nn.Linear(WIDTH, self.ROWS)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens)
        for layer in self.hidden:
            x = x + torch.tanh(layer(x))
        return self.head(x)


# --- recurrent: a module that keeps its own list of its parameters ----------------------------------------------


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, 10)
        self.lstm = nn.LSTM(10, 11, num_layers=2, batch_first=True)
        self.head = nn.Linear(11, 5)

    def forward(self, tokens: Tensor) -> Tensor:
        states, _ = self.lstm(self.tokens(tokens))
        return self.head(states[:, -1])


def _classes_batch(step: int, total: int = SAMPLES) -> Batch:
    dice = _dice(step)
    tokens = torch.randint(VOCABULARY, (total, LENGTH), generator=dice)
    return tokens, torch.randint(5, (total,), generator=dice)


# --- convolution: four-dimensional parameters, and a unit that overwrites its input ----------------------------


class Stage(nn.Module):
    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        self.relu = nn.ReLU(inplace=True)  # first on purpose: it writes into the output of the unit before
        self.conv = nn.Conv2d(before, after, 3, padding=1)
        self.norm = nn.GroupNorm(2, after)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.conv(self.relu(x)))


class Convolution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 6, 3, padding=1)
        self.stages = nn.Sequential(Stage(6, 10), Stage(10, 6))
        self.head = nn.Linear(6, 5)

    def forward(self, images: Tensor) -> Tensor:
        x = self.stages(self.stem(images))
        return self.head(torch.tanh(x).mean((-2, -1)))


def _images_batch(step: int, total: int = SAMPLES) -> Batch:
    dice = _dice(step)
    return torch.randn(total, 3, 6, 6, generator=dice), torch.randint(5, (total,), generator=dice)


# `units` lists the modules to shard, innermost first and the root last.
CASES = (
    Case("transformer", _seeded(Transformer), _tokens(VOCABULARY), _cross_entropy, lambda m: [*m.blocks, m]),
    Case("uneven", _seeded(Uneven), _uneven_batch, _squared_error, lambda m: [*m.layers, m.out, m]),
    Case("tied", _seeded(Tied), _tokens(Tied.ROWS), _cross_entropy, lambda m: [*m.hidden, m]),
    Case("recurrent", _seeded(Recurrent), _classes_batch, _cross_entropy, lambda m: [m.lstm, m]),
    Case("convolution", _seeded(Convolution), _images_batch, _cross_entropy, lambda m: [m.stem, *m.stages, m]),
)
