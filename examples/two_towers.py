"""Train a text model with a vision tower on uneven data, fully sharded.

    torchrun --standalone --nproc-per-node=2 examples/two_towers.py

Texts have different lengths, and only some have an image. In each step, every rank draws its own micro-batches: some
ranks have more than others, some have none, and some never run the vision tower. `unshard.step` computes the mean over
all tokens of all ranks. It uses one GPU per process if there are enough, else the CPU.
"""

import os
import random
from collections.abc import Iterator

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import unshard

VOCABULARY, WIDTH, PATCHES, BUDGET, STEPS = 32, 64, 4, 256, 40  # BUDGET: tokens of a micro-batch, at most


class Block(nn.Module):
    """Mixes each position with the mean of all positions up to it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.expand = nn.Linear(2 * WIDTH, 4 * WIDTH)
        self.contract = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm(x)
        means = normed.cumsum(1) / torch.arange(1, x.shape[1] + 1, device=x.device).unsqueeze(1)
        return x + self.contract(F.relu(self.expand(torch.cat([normed, means], dim=2))))


class TwoTowers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.vision = nn.Sequential(Block(), Block())
        self.text = nn.Sequential(Block(), Block(), Block())
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor, images: Tensor | None) -> Tensor:
        x = self.embed(tokens)
        if images is not None:  # no dummy images: ranks without images skip the tower
            x = x + self.vision(images).mean(1, keepdim=True)
        return self.head(self.text(x))


def micro_batches(seed: str, most: int, device: torch.device) -> Iterator[tuple[Tensor, Tensor | None]]:
    """Yield up to `most` pairs of texts and images. Texts count in steps of 1, or of the number that an image shows."""
    chance = random.Random(seed)
    for _ in range(chance.randint(0, most)):
        length = min(2 + int(chance.lognormvariate(3, 0.8)), BUDGET)
        rows = BUDGET // length
        generator = torch.Generator().manual_seed(chance.randrange(2**31))
        increments, images = torch.ones(rows, 1, dtype=torch.int64), None
        if chance.random() < 0.4:
            increments = torch.randint(2, 5, (rows, 1), generator=generator)
            noise = torch.randn(rows, PATCHES, WIDTH, generator=generator)
            images = (noise + 4 * F.one_hot(increments, WIDTH)).to(device)
        first = torch.randint(VOCABULARY, (rows, 1), generator=generator)
        yield ((first + increments * torch.arange(length)) % VOCABULARY).to(device), images


def loss_sum(model: nn.Module, texts: Tensor, images: Tensor | None) -> tuple[Tensor, int]:
    """Return the sum of the losses of all tokens, and the number of tokens."""
    logits, targets = model(texts[:, :-1], images), texts[:, 1:]
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum"), targets.numel()


def main() -> None:
    use_cuda = torch.cuda.is_available() and torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if use_cuda else torch.device("cpu")
    if use_cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if use_cuda else "gloo")
    rank, mesh = dist.get_rank(), init_device_mesh(device.type, (dist.get_world_size(),))
    torch.manual_seed(0)  # the same weights on every rank
    model = TwoTowers()
    for block in [*model.vision, *model.text]:
        unshard.fully_shard(block, mesh=mesh)
    unshard.fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for number in range(1, STEPS + 1):
        with unshard.step(model) as step:
            for texts, images in micro_batches(f"train {rank} {number}", 3, device):
                loss, tokens = loss_sum(model, texts, images)
                step.backward(loss, weight=tokens)
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0:
            print(f"step {number}  loss {step.loss.item():.4f}  tokens {step.weight.item():.0f}", flush=True)
    sums = torch.zeros(2, device=device)
    with unshard.inference(model):
        for texts, images in micro_batches(f"evaluate {rank}", 16, device):
            sums += torch.stack([torch.as_tensor(each, device=device) for each in loss_sum(model, texts, images)])
    dist.all_reduce(sums)
    if rank == 0:
        print(f"evaluation loss {sums[0] / sums[1]:.4f}  tokens {sums[1]:.0f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
