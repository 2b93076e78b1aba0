"""A program that trains on hosts: `python -m bed.training STEPS TIMEOUT`, under torchrun.

Each rank prints one line per step, and the error that ends it.
"""

from __future__ import annotations

import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from bed.stack import Stack, loss_of, sharded
from torch import nn

from unshard.errors import UnshardError


def train(model: nn.Module, steps: int, say: bool = False) -> list[float]:
    optimizer, losses = torch.optim.SGD(model.parameters(), 0.01), []
    for step in range(steps):
        loss = loss_of(model, step)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if say:
            write(f"step {step} loss {losses[-1]!r}")
    return losses


def write(text: str) -> None:
    """In one piece, because other ranks write to the same file."""
    sys.stdout.write(f"rank {dist.get_rank()} {text}\n")
    sys.stdout.flush()


def main() -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=float(sys.argv[2])))
    try:
        train(sharded(Stack()), int(sys.argv[1]), say=True)
    except UnshardError as error:
        write(f"raised {type(error).__name__}: {error}")
        sys.exit(3)
    write("has ended")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
