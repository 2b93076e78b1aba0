"""Sequence parallelism under `fully_shard`, the usual plan for a transformer, in two and three dimensions."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from bed import world
from bed.checkpoints import quiet
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

from unshard import MixedPrecisionPolicy, fully_shard
from unshard.optim import GradScaler, clip_grad_norm_

WIDTH, ROWS, LENGTH = 8, 12, 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens = nn.Embedding(ROWS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, ROWS, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def sequence_parallel(tp: DeviceMesh) -> Decoder:
    model = Decoder()
    outer = {
        "tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    parallelize_module(model, tp, outer)
    for block in model.blocks:
        inner = {
            "norm": SequenceParallel(),
            "up": ColwiseParallel(input_layouts=Shard(1)),
            "down": RowwiseParallel(output_layouts=Shard(1)),
        }
        parallelize_module(block, tp, inner)
    return model


def sharded(mesh: DeviceMesh, policy: MixedPrecisionPolicy | None = None) -> Decoder:
    model = sequence_parallel(mesh["tp"])
    dp = mesh["dp"] if "dp" in mesh.mesh_dim_names else mesh["replicas", "shards"]
    for block in model.blocks:
        fully_shard(block, mesh=dp, mp_policy=policy)
    return fully_shard(model, mesh=dp, mp_policy=policy)


def loss_of(model: nn.Module, step: int, part: int = 0, parts: int = 1) -> torch.Tensor:
    """Of one part of the batch, which is whole for the reference."""
    dice = torch.Generator().manual_seed(step)
    tokens = torch.randint(ROWS, (4, LENGTH + 1), generator=dice).chunk(parts)[part]
    return nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


SHAPES = {
    "dp2-tp2": ((2, 2), ("dp", "tp")),
    "dp1-tp4": ((1, 4), ("dp", "tp")),
    "replicas2-shards1-tp2": ((2, 1, 2), ("replicas", "shards", "tp")),
    "replicas1-shards2-tp2": ((1, 2, 2), ("replicas", "shards", "tp")),
}


def mesh_of(shape: str) -> tuple[DeviceMesh, int, int]:
    """The mesh, and which part of how many this rank's share of the batch is."""
    sizes, names = SHAPES[shape]
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names)
    return mesh, dist.get_rank() // sizes[-1], dist.get_world_size() // sizes[-1]


@pytest.mark.parametrize("shape", SHAPES)
@world(4)
def test_parity(shape: str) -> None:
    """Losses, clipped norms and parameters of four steps of AdamW with a gradient scaler, one of them skipped."""
    mesh, part, parts = mesh_of(shape)
    model, reference = sharded(mesh), Decoder()
    optimizers = [torch.optim.AdamW(each.parameters(), lr=0.01) for each in (model, reference)]
    scalers = [GradScaler("cpu", init_scale=8.0), torch.amp.GradScaler("cpu", init_scale=8.0)]
    for step in range(4):
        norms, losses = [], []
        for each, optimizer, scaler in zip((model, reference), optimizers, scalers, strict=True):
            loss = loss_of(each, step, part, parts) if each is model else loss_of(each, step)
            scaler.scale(loss).backward()
            if step == 2 and (each is reference or dist.get_rank() == 3):  # overflow on the last rank only
                local = each.head.weight.grad if each is reference else each.head.weight.grad.to_local()
                local.view(-1)[0] = torch.inf
            scaler.unscale_(optimizer)
            clip = torch.nn.utils.clip_grad_norm_ if each is reference else clip_grad_norm_
            norms.append(clip(each.parameters(), 0.5))
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            losses.append(loss.detach())
        dist.all_reduce(losses[0])
        torch.testing.assert_close(losses[0] / dist.get_world_size(), losses[1], rtol=1e-5, atol=1e-6)
        if step != 2:
            torch.testing.assert_close(norms[0], norms[1], rtol=1e-5, atol=1e-6)
        assert scalers[0].get_scale() == scalers[1].get_scale() == (8.0 if step < 2 else 4.0)
    for (name, mine), theirs in zip(model.named_parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(mine.detach().full_tensor(), theirs.detach(), rtol=1e-4, atol=1e-5, msg=name)


@world(4)
def test_mixed_precision() -> None:
    """bf16 compute with norms in fp32: dtypes of gradients, and numbers near those of the unsharded model."""
    mesh, part, parts = mesh_of("dp2-tp2")
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, overrides={"*norm*": torch.float32})
    model, reference = sharded(mesh, policy), Decoder()
    loss_of(model, 0, part, parts).float().backward()
    loss_of(reference, 0).backward()
    for (name, mine), theirs in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert mine.dtype == mine.grad.dtype == torch.float32
        error = (mine.grad.full_tensor() - theirs.grad).norm() / theirs.grad.norm()
        assert error < 0.03, (name, error)


@quiet
@world(4)
def test_checkpoint_between_layouts(tmp_path: Path) -> None:
    """Saved in two dimensions, loaded in one, in three and unsharded."""
    mesh, part, parts = mesh_of("dp2-tp2")
    model = sharded(mesh)
    loss_of(model, 0, part, parts).backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    expected = {name: value.full_tensor() for name, value in model.state_dict().items()}
    dcp.save({"model": model.state_dict()}, checkpoint_id=tmp_path)
    others = [sharded(mesh_of("replicas1-shards2-tp2")[0]), fully_shard(Decoder()), Decoder()]
    for other in others:
        state = {"model": other.state_dict()}
        dcp.load(state, checkpoint_id=tmp_path)
        other.load_state_dict(state["model"])
        for name, value in other.state_dict().items():
            whole = value.full_tensor() if hasattr(value, "full_tensor") else value
            assert torch.equal(whole, expected[name]), name
