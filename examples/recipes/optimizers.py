"""Train matrices with Muon, and all other parameters with a flat AdamW.

torchrun --nproc-per-node=2 examples/recipes/optimizers.py
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
blocks = [nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64)) for _ in range(2)]
model = nn.Sequential(nn.Embedding(32, 64), *blocks, nn.Linear(64, 32))
for block in blocks:
    unshard.fully_shard(block)
unshard.fully_shard(model)

# Build optimizers after sharding. Muon is for the matrices inside the blocks, not for embeddings and heads.
matrices = [parameter for block in blocks for parameter in block.parameters() if parameter.ndim == 2]
others = [parameter for parameter in model.parameters() if all(parameter is not matrix for matrix in matrices)]
muon = torch.optim.Muon(matrices, lr=1e-2)  # gathers each matrix to orthogonalize its update
adamw = unshard.optim.flat(torch.optim.AdamW(others, lr=3e-3))  # steps a few flat tensors per unit

torch.manual_seed(1 + dist.get_rank())  # different data on every rank
for step in range(1, 31):
    tokens = torch.randint(32, (64,), device=device)
    loss = nn.functional.cross_entropy(model(tokens), (tokens + 1) % 32)  # each token is followed by the next one
    loss.backward()
    norm = unshard.optim.clip_grad_norm_(model.parameters(), 1.0)  # over the parameters of both optimizers
    for optimizer in (muon, adamw):
        optimizer.step()
        optimizer.zero_grad()
    if dist.get_rank() == 0 and step % 5 == 0:
        print(f"step {step}  loss {loss.item():.3f}  gradient norm {norm:.2f}", flush=True)
dist.destroy_process_group()
