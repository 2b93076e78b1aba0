"""Train so that a lost host or a killed process costs only the steps since the last checkpoint.

    torchrun --standalone --nproc-per-node=2 --max-restarts=3 examples/elastic.py checkpoints

torchrun starts the program again after a loss, and the program loads the last checkpoint, with up to 12
ranks, the samples of a step. docs/node_loss.md has the commands for several hosts.
"""

import os
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor, nn

import unshard
from unshard import checkpoint, fully_shard

STEPS, EVERY, BATCH = 200, 20, 12  # BATCH: samples of a step, over all ranks
TIMEOUT = timedelta(minutes=2)  # for hosts that vanish with their connections open; longer than any rank is ever late


class Samples:
    """The position counts the samples of all ranks, so it is the same on every rank and fits any number of ranks."""

    def __init__(self) -> None:
        self.position = 0

    def next(self) -> tuple[Tensor, Tensor]:
        mine = torch.arange(self.position, self.position + BATCH)[dist.get_rank() :: dist.get_world_size()]
        self.position += BATCH
        rows = [torch.randn(16, generator=torch.Generator().manual_seed(int(each))) for each in mine]
        inputs = torch.stack(rows)
        return inputs, inputs.sin().sum(1, keepdim=True)

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


def say(text: str) -> None:
    if dist.get_rank() == 0:
        print(f"{time.time():.3f} {text}", flush=True)


def train(folder: str) -> None:
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    torch.manual_seed(0)  # the same weights on every rank
    model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1)).to(device)
    for layer in model[::2]:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    samples = Samples()
    run = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "data": samples}
    say(f"start with {dist.get_world_size()} ranks")
    step = checkpoint.load(folder, **run) if checkpoint.latest(folder) else 0
    say(f"resume at step {step}, sample {samples.position}")
    with checkpoint.Saver(folder, keep_last=3) as saver:
        while step < STEPS:
            rate = scheduler.get_last_lr()[0]
            inputs, targets = (each.to(device) for each in samples.next())
            with unshard.step(model) as training:  # the mean over the samples of all ranks
                loss = nn.functional.mse_loss(model(inputs), targets, reduction="sum")
                training.backward(loss, weight=len(inputs))
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            step += 1
            say(f"step {step} sample {samples.position} lr {rate:.6g} loss {training.loss.item():.9g}")
            if step % EVERY == 0 or step == STEPS:
                saver.save(step=step, **run)
            if step == EVERY:
                saver.wait()  # raises now, not at the next save, if hosts see different folders


if __name__ == "__main__":
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group(timeout=TIMEOUT)
    train(sys.argv[1])
    dist.destroy_process_group()
