"""Features of `fully_shard` on a CUDA device, each as on the CPU."""

from __future__ import annotations

import pytest
import torch
from bed import world
from bed.cuda import check, real_collectives, rows_of_rank
from bed.models import CASES, Case, case
from bed.packing import path
from bed.stack import Stack, batch, input_gradient, sharded
from bed.tensor_subclass import SplitTensor, with_split_weights
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from unshard import CPUOffloadPolicy, HSDPMeshInfo, OffloadPolicy, ShardPlacementResult, fully_shard


@pytest.mark.parametrize("pooled", [False, True], ids=["usual", "pooled"])
@pytest.mark.parametrize("way", ["rows", "packed"])
@pytest.mark.parametrize("each", CASES, ids=str)
@world(1, backend="nccl")
def test_collectives_of_nccl(each: Case, way: str, pooled: bool) -> None:
    """Contract API-22: grouped gathers and reductions of NCCL itself, also in memory of its own."""
    with path(way), real_collectives(pooled):
        check(each, steps=4)


class Mixed(nn.Module):
    """Parameters of two dtypes in one unit, large and small."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.randn(256, 256).bfloat16())
        self.gain, self.shift = nn.Parameter(torch.randn(256)), nn.Parameter(torch.randn(256).bfloat16())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x @ self.weight.float()) * self.gain + self.shift.float()


@world(1, backend="nccl")
def test_collectives_of_nccl_in_several_dtypes() -> None:
    model, reference = nn.Sequential(Mixed(), Mixed()).cuda(), nn.Sequential(Mixed(), Mixed()).cuda()
    with real_collectives():
        for layer in model:
            fully_shard(layer, reshard_after_forward=True)
        fully_shard(model)
    x = torch.randn(4, 256, device="cuda")
    for _ in range(2):
        for each in (model, reference):
            each(x).square().mean().backward()
    for mine, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        assert mine.grad.dtype == theirs.dtype
        assert torch.equal(mine.grad.full_tensor(), theirs.grad)


@pytest.mark.parametrize("name", ["transformer", "uneven", "recurrent"])
@world(4, backend="nccl")
def test_slices(name: str) -> None:
    """Contract RAF-04."""
    check(case(name), steps=4, reshard_after_forward=2)


@pytest.mark.parametrize("name", ["transformer", "recurrent"])
@world(4, backend="nccl")
def test_shards_and_replicas(name: str) -> None:
    mesh = init_device_mesh("cuda", (2, 2), mesh_dim_names=("replicate", "shard"))
    check(case(name), steps=4, mesh=mesh)


@world(4, backend="nccl")
def test_several_meshes_in_one_call() -> None:
    """Contract LAY-12."""
    flat = init_device_mesh("cuda", (4,), mesh_dim_names=("all",))
    info = HSDPMeshInfo(init_device_mesh("cuda", (2, 2), mesh_dim_names=("replicate", "shard")), 1, 0)

    def choose(parameter: nn.Parameter) -> ShardPlacementResult | None:
        return ShardPlacementResult(None, info) if parameter.ndim == 1 else None

    check(case("transformer"), steps=4, mesh=flat, shard_placement_fn=choose)


@pytest.mark.parametrize("offload", [False, True])
@world(1, 2, 3, backend="nccl")
def test_shards_with_their_own_gather_protocol(offload: bool) -> None:
    """Contract EXT-06, EXT-10."""
    model, reference = with_split_weights(Stack().cuda()), Stack().cuda()
    policy = CPUOffloadPolicy(pin_memory=False) if offload else OffloadPolicy()
    for block in model.blocks:
        fully_shard(block, reshard_after_forward=True, offload_policy=policy)
    fully_shard(model, offload_policy=policy)
    for seed in range(3):
        for each in (model, reference):
            each(batch(seed).cuda()).square().mean().backward()
        for mine, theirs in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(mine.grad.to_local().cuda(), rows_of_rank(theirs.grad), rtol=1e-3, atol=1e-5)
    assert SplitTensor.seen


@pytest.mark.parametrize("offload", [False, True], ids=["device", "host"])
@pytest.mark.parametrize("kept", [False, True], ids=["freed", "kept"])
@world(1, 2, 3, backend="nccl")
def test_gradient_penalty(kept: bool, offload: bool) -> None:
    """A device's backward runs in a thread of its own: what it records comes last in the second one, not first."""
    options = {"reshard_after_forward": not kept, "offload_policy": CPUOffloadPolicy() if offload else OffloadPolicy()}
    model, reference = sharded(Stack().cuda(), **options), Stack().cuda()
    for _ in range(3):
        for each in (model, reference):
            out, slope = input_gradient(each, batch().cuda().requires_grad_(), aside=False)
            ((slope.norm(dim=1) - 1).square().mean() + out.mean()).backward()
        for mine, theirs in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(mine.grad.to_local().cuda(), rows_of_rank(theirs.grad), rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("ignore::UserWarning")
@world(1, 2, backend="nccl")
def test_a_compiled_block() -> None:
    """Contract INT-04."""
    model, reference = Stack(1).cuda(), Stack(1).cuda()
    model.blocks[0].compile()
    fully_shard(model.blocks[0])
    fully_shard(model)
    for seed in range(2):
        for each in (model, reference):
            each(batch(seed).cuda()).square().mean().backward()
    for mine, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(mine.grad.full_tensor(), theirs.grad, rtol=1e-3, atol=1e-5)


@world(1, 2, 3, 4, backend="nccl")
def test_a_captured_step() -> None:
    """Contract INT-09: forward and backward of a sharded model inside a CUDA graph."""
    model, reference = Stack(2).cuda(), Stack(2).cuda()
    for block in model.blocks:
        fully_shard(block, reshard_after_forward=True)
    fully_shard(model)
    x = batch().cuda()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            model(x).square().mean().backward()
            model.zero_grad()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        model(x).square().mean().backward()
    for seed in (3, 4):
        x.copy_(batch(seed))
        graph.replay()
        reference.zero_grad()
        reference(batch(seed).cuda()).square().mean().backward()
        for mine, theirs in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(mine.grad.full_tensor(), theirs.grad, rtol=1e-3, atol=1e-5)
