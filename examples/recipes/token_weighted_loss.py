"""Average a loss over all tokens of all ranks, when ranks and micro-batches have different numbers of tokens.

torchrun --nproc-per-node=2 examples/recipes/token_weighted_loss.py
"""

import os

import torch
import torch.distributed as dist
from torch import nn

import unshard

device = torch.device("cpu")
if torch.cuda.is_available():
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
dist.init_process_group()

torch.manual_seed(0)  # the same weights on every rank
blocks = [nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64)) for _ in range(2)]
model = nn.Sequential(nn.Embedding(32, 64), *blocks, nn.Linear(64, 32))
for block in blocks:
    unshard.fully_shard(block)
unshard.fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)


def padded_batch():
    """Four sequences that count up, of different lengths. Targets of the padding are -100."""
    lengths = torch.randint(2, 50, (4, 1))
    positions = torch.arange(int(lengths.max()))
    tokens = (torch.randint(32, (4, 1)) + positions) % 32
    targets = ((tokens + 1) % 32).masked_fill(positions >= lengths, -100)
    return tokens.to(device), targets.to(device)


torch.manual_seed(1 + dist.get_rank())  # different data on every rank
for number in range(1, 21):
    with unshard.step(model) as step:
        for _ in range(2):  # micro-batches; ranks may also have different numbers of them
            tokens, targets = padded_batch()
            logits = model(tokens).flatten(0, 1)
            loss = nn.functional.cross_entropy(logits, targets.flatten(), ignore_index=-100, reduction="sum")
            step.backward(loss, weight=(targets != -100).sum())
    optimizer.step()
    optimizer.zero_grad()
    if dist.get_rank() == 0 and number % 5 == 0:
        print(f"step {number}  loss {step.loss:.3f}, the mean over {step.weight:.0f} tokens", flush=True)
dist.destroy_process_group()
