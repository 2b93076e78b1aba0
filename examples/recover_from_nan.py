"""Captured steps, checkpoints and a watch in one loop: if the loss is not finite, find the batch and train without it.

    torchrun --standalone --nproc-per-node=2 examples/recover_from_nan.py checkpoints

On GPUs, steps are replayed as CUDA graphs (`unshard.capture`). On CPUs, the same steps run eagerly. Every 10 steps, the
program reads the loss. If the loss is finite, the run is saved. Otherwise the program loads the last checkpoint and
repeats the steps since then under `unshard.tools.watch`, which names the rank and the place of the first NaN.
"""

import math
import os
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import unshard
from unshard import checkpoint
from unshard.tools import watch

STEPS, EVERY = 60, 10


class Data:
    """Inputs and targets. One input of batch 34 on the last rank is infinite."""

    def __init__(self) -> None:
        self.position, self.skipped = 0, []

    def next(self) -> tuple[Tensor, Tensor]:
        self.position += 1
        while self.position in self.skipped:  # on all ranks
            self.position += 1
        draw = torch.Generator().manual_seed(self.position * dist.get_world_size() + dist.get_rank())
        inputs = torch.randn(64, 8, generator=draw)
        targets = inputs.sum(1, keepdim=True).sin()
        if self.position == 34 and dist.get_rank() == dist.get_world_size() - 1:
            inputs[5, 3] = torch.inf
        return inputs.to(device), targets.to(device)

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position, "skipped": self.skipped}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position, self.skipped = state["position"], state["skipped"]


def train_step(inputs: Tensor, targets: Tensor) -> Tensor:
    loss = nn.functional.mse_loss(model(inputs), targets)
    loss.backward()
    unshard.optim.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def train(steps: int) -> float:
    """Train, and return the last loss, averaged over ranks. The host waits for the device only once, at the end."""
    for _ in range(steps):
        loss = captured_step(*data.next())
    mean = loss / dist.get_world_size()
    dist.all_reduce(mean)
    return mean.item()


def skip_batch() -> None:
    """Repeat the steps since the last checkpoint under a watch, and go back. Skip the batch of the first NaN."""
    checkpoint.load(folder, **run)
    batches = []
    with watch(model, optimizer) as watched:  # while a watch is on, steps run eagerly
        for _ in range(EVERY):
            train(1)
            batches.append(data.position)
    checkpoint.load(folder, **run)
    data.skipped.append(batches[watched.findings[0].step - 1])  # the same on all ranks


device = torch.device("cpu")
if torch.cuda.is_available():
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
dist.init_process_group()

torch.manual_seed(0)  # the same weights on every rank
blocks = [nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64)) for _ in range(2)]
model = nn.Sequential(nn.Linear(8, 64), *blocks, nn.Linear(64, 1))
for block in blocks:
    unshard.fully_shard(block)
unshard.fully_shard(model)
optimizer = unshard.optim.flat(torch.optim.AdamW(model.parameters(), lr=3e-3, fused=True))
captured_step = unshard.capture(train_step, model, optimizer)

data, folder = Data(), sys.argv[1]
run = {"model": model, "optimizer": optimizer, "data": data}
if not checkpoint.latest(folder):
    checkpoint.save(folder, step=0, **run)
step = checkpoint.load(folder, **run)
while step < STEPS:
    loss = train(EVERY)
    if not math.isfinite(loss):
        skip_batch()
        continue
    step += EVERY
    checkpoint.save(folder, step=step, keep_last=2, **run)
    if dist.get_rank() == 0:
        print(
            f"step {step}  loss {loss:.4f}  {captured_step.recordings} recordings  skipped {data.skipped}", flush=True
        )
dist.destroy_process_group()
