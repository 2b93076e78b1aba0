"""Train with a vision tower that some ranks skip, and with a different amount of data on each rank.

torchrun --nproc-per-node=2 examples/recipes/skipped_towers.py
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


class TwoTowers(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(32, 64)
        self.text = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64))
        self.vision = nn.Sequential(nn.Linear(8, 256), nn.ReLU(), nn.Linear(256, 64))
        self.head = nn.Linear(64, 32)

    def forward(self, tokens, images=None):
        features = self.embed(tokens)
        if images is not None:  # no dummy images: ranks without images skip the tower
            features = features + self.vision(images)
        return self.head(self.text(features))


torch.manual_seed(0)  # the same weights on every rank
model = TwoTowers()
for tower in (model.text, model.vision):
    unshard.fully_shard(tower)
unshard.fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)


def micro_batches():
    """Yield up to three batches. The next token is the token plus 1, or plus the number that the image shows."""
    for _ in range(int(torch.randint(4, ()))):
        tokens, added, images = torch.randint(32, (64,)), torch.ones(64, dtype=torch.int64), None
        if torch.rand(()) < 0.5:
            added = torch.randint(1, 5, (64,))
            images = nn.functional.one_hot(added, 8).float().to(device)
        yield tokens.to(device), images, ((tokens + added) % 32).to(device)


torch.manual_seed(1 + dist.get_rank())  # different data on every rank
for number in range(1, 101):
    with unshard.step(model) as step:
        for tokens, images, targets in micro_batches():
            loss = nn.functional.cross_entropy(model(tokens, images), targets, reduction="sum")
            step.backward(loss, weight=len(tokens))
    optimizer.step()
    optimizer.zero_grad()
    if dist.get_rank() == 0 and number % 20 == 0:
        print(f"step {number}  loss {step.loss:.3f}, the mean over {step.weight:.0f} tokens", flush=True)
dist.destroy_process_group()
