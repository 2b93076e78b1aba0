"""Keep an exponential moving average (EMA) of the weights, evaluate it, and save it.

torchrun --nproc-per-node=2 examples/recipes/ema.py
"""

import copy
import os

import torch
import torch.distributed as dist
from torch import nn

from unshard import checkpoint, fully_shard

device = torch.device("cpu")
if torch.cuda.is_available():
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
dist.init_process_group()

torch.manual_seed(0)  # the same weights on every rank
blocks = [nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64)) for _ in range(2)]
model = nn.Sequential(nn.Embedding(32, 64), *blocks, nn.Linear(64, 32))
for block in blocks:
    fully_shard(block)
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
average = copy.deepcopy(model).requires_grad_(False)  # has the same shards, so averaging needs no communication


@torch.no_grad()
def update_average(decay):
    for mine, theirs in zip(average.parameters(), model.parameters(), strict=True):
        mine.lerp_(theirs, 1 - decay)
    for mine, theirs in zip(average.buffers(), model.buffers(), strict=True):  # this model has none
        mine.copy_(theirs)


def noisy_batch():
    """Each token is followed by the next one, but a third of the targets are random."""
    tokens = torch.randint(32, (64,))
    noise = torch.rand(64) < 1 / 3
    return tokens.to(device), torch.where(noise, torch.randint(32, (64,)), (tokens + 1) % 32).to(device)


@torch.no_grad()
def loss_without_noise(model):
    tokens = torch.arange(32, device=device)
    return nn.functional.cross_entropy(model(tokens), (tokens + 1) % 32).item()


torch.manual_seed(1 + dist.get_rank())  # different data on every rank
for step in range(1, 61):
    tokens, targets = noisy_batch()
    nn.functional.cross_entropy(model(tokens), targets).backward()
    optimizer.step()
    optimizer.zero_grad()
    update_average(decay=0.9)  # after the step, while both models are sharded
    if step % 20 == 0:
        of_model, of_average = loss_without_noise(model), loss_without_noise(average)  # on all ranks
        if dist.get_rank() == 0:
            print(f"step {step}  loss without noise: model {of_model:.3f}, average {of_average:.3f}", flush=True)

state = checkpoint.full_state_dict(average)  # on all ranks; the weights are on rank 0
if dist.get_rank() == 0:
    torch.save(state, "average.pt")
dist.destroy_process_group()
