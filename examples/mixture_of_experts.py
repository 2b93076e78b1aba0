"""Train a mixture of experts on two meshes: experts are sharded over one, all other parameters over the other.

    torchrun --standalone --nproc-per-node=4 examples/mixture_of_experts.py

With four ranks and `--expert-parallel 2`, the ranks form this mesh:

                expert = 0               expert = 1
    data = 0    rank 0: experts 0 to 3   rank 1: experts 4 to 7
    data = 1    rank 2: experts 0 to 3   rank 3: experts 4 to 7

Ranks of a row exchange tokens, so that each token reaches the rank of its expert. Ranks of a column have the same
experts, and shard them: `fully_shard` over `mesh["data"]`. All ranks shard everything else. The losses do not depend on
the number of ranks. It uses one GPU per process, or else the CPU.
"""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import unshard

VOCABULARY, WIDTH, EXPERTS, BATCH = 64, 64, 8, 512


class Exchange(torch.autograd.Function):
    """Send `outgoing[r]` rows to each rank r of a group, and receive `incoming[r]` rows. Gradients are sent back."""

    @staticmethod
    def forward(context, rows: Tensor, outgoing: list[int], incoming: list[int], group: dist.ProcessGroup) -> Tensor:
        context.arguments_of_backward = incoming, outgoing, group
        received = rows.new_empty(sum(incoming), rows.shape[1])
        dist.all_to_all_single(received, rows.contiguous(), incoming, outgoing, group=group)
        return received

    @staticmethod
    def backward(context, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return Exchange.apply(gradient, *context.arguments_of_backward), None, None, None


class Experts(nn.Module):
    """The experts of this rank, for tokens that all ranks of its row send."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        self.group, self.ranks = mesh.get_group(), mesh.size()
        # DTensors over the row: clipping and checkpoints then know that ranks of a row have different experts.
        expand = torch.randn(EXPERTS, WIDTH, 2 * WIDTH) / WIDTH**0.5
        contract = torch.randn(EXPERTS, 2 * WIDTH, WIDTH) / WIDTH**0.5
        self.expand = nn.Parameter(distribute_tensor(expand, mesh, [Shard(0)]))
        self.contract = nn.Parameter(distribute_tensor(contract, mesh, [Shard(0)]))

    def forward(self, tokens: Tensor, counts: Tensor) -> Tensor:
        """Return the outputs for `tokens`, which are sorted by expert: `counts` of them for each of all experts."""
        received = torch.empty_like(counts)
        dist.all_to_all_single(received, counts, group=self.group)
        # One row per rank that sends tokens, one column per expert of this rank.
        sent, received = counts.view(self.ranks, -1), received.view(self.ranks, -1)
        outgoing, incoming = sent.sum(1).tolist(), received.sum(1).tolist()
        inputs = Exchange.apply(tokens, outgoing, incoming, self.group)
        expert_of = torch.arange(received.shape[1], device=tokens.device).repeat(self.ranks)
        expert_of = expert_of.repeat_interleave(received.flatten())
        outputs = torch.zeros_like(inputs)
        for number, (expand, contract) in enumerate(zip(self.expand.to_local(), self.contract.to_local(), strict=True)):
            rows = (expert_of == number).nonzero().squeeze(1)
            outputs = outputs.index_add(0, rows, F.relu(inputs[rows] @ expand) @ contract)
        return Exchange.apply(outputs, incoming, outgoing, self.group)


class MixtureOfExperts(nn.Module):
    """Sends each token to one expert."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.router = nn.Linear(WIDTH, EXPERTS)
        self.experts = Experts(mesh)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm(x)
        weight, expert = self.router(normed).softmax(-1).max(-1)
        order = expert.argsort(stable=True)
        outputs = self.experts(normed[order], expert.bincount(minlength=EXPERTS))
        return x + weight.unsqueeze(1) * torch.zeros_like(x).index_copy(0, order, outputs)  # in the order of x again


def build(mesh: DeviceMesh, everywhere: DeviceMesh) -> nn.Sequential:
    torch.manual_seed(0)  # the same weights on every rank
    blocks = [MixtureOfExperts(mesh["expert"]) for _ in range(2)]
    model = nn.Sequential(nn.Embedding(VOCABULARY, WIDTH), *blocks, nn.Linear(WIDTH, VOCABULARY))
    for block in blocks:
        unshard.fully_shard(block.experts, mesh=mesh["data"])
        # An expert gets tokens from all ranks, but its gradient is reduced over one column. Divide by all ranks.
        block.experts.set_gradient_divide_factor(everywhere.size())
        unshard.fully_shard(block, mesh=everywhere)
    return unshard.fully_shard(model, mesh=everywhere)


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a mixture of experts on two meshes.")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--expert-parallel", type=int, default=2, help="ranks of a row, which have different experts")
    args = parser.parse_args()
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group()
    rank, world = dist.get_rank(), dist.get_world_size()
    shape = (world // args.expert_parallel, args.expert_parallel)
    mesh = init_device_mesh(device.type, shape, mesh_dim_names=("data", "expert"))
    model = build(mesh, init_device_mesh(device.type, (world,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(1, args.steps + 1):
        draw = torch.Generator().manual_seed(step)
        batch = torch.randint(VOCABULARY, (BATCH,), generator=draw)  # the same batch for any number of ranks
        tokens = batch[rank::world].to(device)
        targets = (tokens * 5 + 1) % VOCABULARY
        loss = F.cross_entropy(model(tokens), targets)
        loss.backward()
        norm = unshard.optim.clip_grad_norm_(model.parameters(), 1.0)  # of all parameters, on both meshes
        optimizer.step()
        optimizer.zero_grad()
        loss = loss.detach() / world
        dist.all_reduce(loss)
        if rank == 0:
            print(f"step {step}  loss {loss.item():.4f}  gradient norm {norm.item():.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
