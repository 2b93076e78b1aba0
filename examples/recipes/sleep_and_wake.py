"""Free the device memory of a model and its optimizer between two phases of training, and go on afterwards.

torchrun --nproc-per-node=2 examples/recipes/sleep_and_wake.py
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
blocks = [nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 256)) for _ in range(4)]
model = nn.Sequential(nn.Embedding(32, 256), *blocks, nn.Linear(256, 32))
for block in blocks:
    unshard.fully_shard(block)
unshard.fully_shard(model)
optimizer = unshard.optim.flat(torch.optim.AdamW(model.parameters(), lr=1e-3))


def train(steps):
    for _ in range(steps):
        tokens = torch.randint(32, (64,), device=device)
        loss = nn.functional.cross_entropy(model(tokens), (tokens + 1) % 32)  # each token is followed by the next one
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return loss.item()


def sleep():
    """Move the weights and the optimizer's state to the host. Call this after `zero_grad`."""
    saved = optimizer.state_dict()
    on_host = {
        number: {key: to_host(value) for key, value in entry.items()} for number, entry in saved["state"].items()
    }
    optimizer.load_state_dict({**saved, "state": {}})  # drops the state on the device
    model.to("cpu")
    return {**saved, "state": on_host}


def to_host(value):
    return value.cpu() if isinstance(value, torch.Tensor) else value


def wake(saved):
    model.to(device)
    optimizer.load_state_dict(saved)


def report(phase, loss=None):
    if dist.get_rank() == 0:
        memory = torch.cuda.memory_allocated() if device.type == "cuda" else 0
        print(
            f"{phase:6}  {memory / 2**20:5.1f} MiB on the device" + (f"  loss {loss:.3f}" if loss else ""), flush=True
        )


torch.manual_seed(1 + dist.get_rank())  # different data on every rank
report("train", train(steps=10))
saved = sleep()
report("sleep")  # here, another model can use the memory
wake(saved)
report("train", train(steps=10))
dist.destroy_process_group()
