"""Train with tensor and data parallelism on a two-dimensional mesh, in mixed precision with a gradient scaler.

    torchrun --standalone --nproc-per-node=4 examples/tensor_parallel.py

Tensor parallelism splits the matrices of a block over the ranks of a row (`mesh["tp"]`), which all get the same data.
`fully_shard` shards the parts over a column (`mesh["dp"]`), whose ranks get different data. The losses do not depend on
the number of ranks. It uses one GPU per process, or else the CPU.
"""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from unshard import MixedPrecisionPolicy, fully_shard
from unshard.optim import GradScaler, clip_grad_norm_

VOCABULARY, WIDTH, BATCH, LENGTH = 32, 64, 16, 24
HEADS = 4


class Block(nn.Module):
    """Causal attention and an MLP. The number of heads follows from the width of `query`, which may be a part."""

    def __init__(self) -> None:
        super().__init__()
        self.norm_attention, self.norm_mlp = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.query, self.key, self.value = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.project = nn.Linear(WIDTH, WIDTH)
        self.expand, self.contract = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm_attention(x)
        heads = [
            each(normed).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2)
            for each in (self.query, self.key, self.value)
        ]
        mixed = F.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.project(mixed.transpose(1, 2).flatten(2))
        return x + self.contract(F.relu(self.expand(self.norm_mlp(x))))


# The first matrix of a pair is split by columns and the second one by rows. Only the results of the pair are summed.
PLAN = {
    **dict.fromkeys(["query", "key", "value", "expand"], ColwiseParallel()),
    **dict.fromkeys(["project", "contract"], RowwiseParallel()),
}


def build(mesh: DeviceMesh, policy: MixedPrecisionPolicy) -> nn.Sequential:
    torch.manual_seed(0)  # the same weights on every rank
    blocks = [Block() for _ in range(2)]
    model = nn.Sequential(nn.Embedding(VOCABULARY, WIDTH), *blocks, nn.Linear(WIDTH, VOCABULARY))
    for block in blocks:
        parallelize_module(block, mesh["tp"], PLAN)  # first
        fully_shard(block, mesh=mesh["dp"], mp_policy=policy)
    return fully_shard(model, mesh=mesh["dp"], mp_policy=policy)


def main() -> None:
    parser = argparse.ArgumentParser(description="Train with tensor and data parallelism.")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--tensor-parallel", type=int, default=2, help=f"ranks of a row; must divide {HEADS}")
    args = parser.parse_args()
    device, policy = torch.device("cpu"), MixedPrecisionPolicy()  # CPUs compute in fp32 here
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        policy = MixedPrecisionPolicy(param_dtype=torch.float16, reduce_dtype=torch.float32)
    dist.init_process_group()
    shape = (dist.get_world_size() // args.tensor_parallel, args.tensor_parallel)
    mesh = init_device_mesh(device.type, shape, mesh_dim_names=("dp", "tp"))
    model = build(mesh, policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scaler = GradScaler(device.type)  # needed in fp16: it skips a step with overflows, on all ranks

    column, columns = mesh["dp"].get_local_rank(), mesh["dp"].size()
    for step in range(1, args.steps + 1):
        draw = torch.Generator().manual_seed(step)
        begin = torch.randint(VOCABULARY, (BATCH, 1), generator=draw)  # the same batch for any number of ranks
        tokens = (begin + torch.arange(LENGTH)) % VOCABULARY  # sequences that count up
        tokens = tokens[column::columns].to(device)  # the same rows on all ranks of a row of the mesh
        logits = model(tokens[:, :-1]).float()
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        norm = clip_grad_norm_(model.parameters(), 1.0)  # torch's function refuses parameters on different meshes
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        mean = loss.detach() / columns
        dist.all_reduce(mean, group=mesh.get_group("dp"))
        if dist.get_rank() == 0:
            print(f"step {step}  loss {mean.item():.4f}  gradient norm {norm.item():.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
