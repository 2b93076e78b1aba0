"""Send the weights of a sharded model to another process while training, one unsharded tensor at a time.

    torchrun --nproc-per-node=3 examples/recipes/streaming_weights.py

The last process does not train. It serves an unsharded copy of the model, as an inference engine does.
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from unshard import fully_shard

device = torch.device("cpu")
if torch.cuda.is_available():
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
dist.init_process_group()

rank, server = dist.get_rank(), dist.get_world_size() - 1
trainers = DeviceMesh(device.type, list(range(server)))  # on all ranks: it creates a process group

torch.manual_seed(0)  # the same weights on every rank
blocks = [nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64)) for _ in range(2)]
model = nn.Sequential(nn.Embedding(32, 64), *blocks, nn.Linear(64, 32)).to(device)
if rank != server:
    for block in blocks:
        fully_shard(block, mesh=trainers)
    fully_shard(model, mesh=trainers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)


def stream_weights():
    """Copy all weights from the trainers to the server. Every rank calls this."""
    for value in model.state_dict().values():  # the same order on all ranks
        if rank == server:
            dist.recv(value, src=0)
            continue
        # All trainers gather. Without a name for it, the tensor is freed before the next one is gathered.
        full = value.full_tensor() if isinstance(value, DTensor) else value
        if rank == 0:
            dist.send(full, dst=server)
        del full


torch.manual_seed(1 + rank)  # different data on every rank
for step in range(1, 31):
    tokens = torch.randint(32, (64,), device=device)
    if rank != server:
        loss = nn.functional.cross_entropy(model(tokens), (tokens + 1) % 32)  # each token is followed by the next one
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    if step % 10 == 0:
        stream_weights()
        if rank == server:
            with torch.no_grad():
                loss = nn.functional.cross_entropy(model(tokens), (tokens + 1) % 32)
            print(f"step {step}  the server's copy has loss {loss.item():.3f}", flush=True)
dist.destroy_process_group()
