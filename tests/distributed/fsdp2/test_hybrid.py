"""Shards and replicas: meshes of two dimensions, partial sums, and how the mean over all ranks is taken."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.distributed as dist
from bed import world
from bed.models import CASES, Case
from bed.parity import check_parity, each_unit
from bed.recorders import Collectives
from bed.stack import Stack, assert_at_rest, assert_gradients, batch, loss_of, mesh, sharded
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard

from unshard import MixedPrecisionPolicy, fully_shard

SHAPES = [(case, replicas) for case in CASES for replicas in (2, 4)]


@pytest.mark.parametrize(("case", "replicas"), [(CASES[2], 1), *SHAPES], ids=str)
@world(4)
def test_parity_of_shards_and_replicas(case: Case, replicas: int) -> None:
    """Contract MESH-02, MESH-08: 2x2 and 4x1; 1x4 is what a mesh of one dimension is, so one model shows it."""
    check_parity(case, each_unit(case, fully_shard, mesh=mesh(replicas)), steps=4)


@world(4)
def test_collectives_and_placements() -> None:
    """Contract CM-04, CM-14, MESH-02: reduce-scatter over the shards, all-reduce of the shard over the replicas."""
    model = sharded(mesh=mesh(2))
    assert model.head.weight.placements == (Replicate(), Shard(0))
    assert model.head.weight.to_local().shape == (1, 132)
    loss = loss_of(model)
    with Collectives() as calls:
        loss.backward()
    scatters, reductions = calls.of("reduce_scatter"), calls.of("all_reduce")
    assert (len(scatters), len(reductions)) == (4, 4)
    for scatter, reduction in zip(scatters, reductions, strict=True):
        assert scatter.ranks in (0, 2) and reduction.ranks in (0, 2)
        padding = reduction.bytes_in - scatter.bytes_out
        assert 0 <= padding < 256 * len(scatter.outputs)


@world(4)
def test_partial_sums_wait_for_their_all_reduce() -> None:
    """Contract API-06, ACC-07, CM-16: reduced over the shards at each backward, over the replicas once."""
    model, reference = sharded(mesh=mesh(2)), Stack()
    for _ in range(2):
        for seed in range(3):
            model.set_requires_all_reduce(seed == 2)
            with Collectives() as calls:
                loss_of(model, seed).backward()
            assert len(calls.of("reduce_scatter")) == 4
            assert len(calls.of("all_reduce")) == (4 if seed == 2 else 0)
            loss_of(reference, seed).backward()
            if seed < 2 and _ == 0:
                assert model.head.weight.grad is None
        assert_gradients(model, reference)
        assert_at_rest(model)


@world(4)
def test_partial_sums_of_parameters_that_are_not_used_again() -> None:
    class Either(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.ways = nn.ModuleList(nn.Linear(132, 5) for _ in range(2))

        def forward(self, x: torch.Tensor, way: int) -> torch.Tensor:
            return self.ways[way](x)

    model, reference = fully_shard(Either(), mesh=mesh(2)), Either()
    for way in (0, 1):
        model.set_requires_all_reduce(way == 1)
        model(batch(), way).square().mean().backward()
        reference(batch(), way).square().mean().backward()
    assert_gradients(model, reference)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64])
@world(4)
def test_division(dtype: torch.dtype) -> None:
    """Contract DIV-01 to DIV-13: the sum over all four ranks divided by the factor, also on Gloo."""
    meshes = [mesh(replicas) for replicas in (1, 2, 4)]
    ways = itertools.product(meshes, (False, True), (None, 1.0, 2.0, 3.0, 4.0))
    for where, force_sum, factor in ways:
        model = nn.Linear(1, 3, bias=False)
        fully_shard(model, mesh=where, mp_policy=MixedPrecisionPolicy(reduce_dtype=dtype))
        if factor is not None:
            model.set_gradient_divide_factor(factor)
        model.set_force_sum_reduction_for_comms(force_sum)
        model(torch.full((1, 1), 1.0 + dist.get_rank())).sum().backward()
        gradient = model.weight.grad.full_tensor()
        assert gradient.dtype == torch.float32
        torch.testing.assert_close(gradient, torch.full((3, 1), 10.0 / (factor or 4.0)), rtol=1e-3, atol=0)


@pytest.mark.parametrize("replicas", [1, 2])
@world(4)
def test_a_hook_on_the_reduced_gradients(replicas: int) -> None:
    """Contract API-13: after the last reduction, before the division; edits take effect."""
    model, reference, seen = sharded(mesh=mesh(replicas)), Stack(), []

    def double(gradients: torch.Tensor) -> None:
        seen.append(gradients.numel())
        gradients.mul_(2)

    model.blocks[1].set_all_reduce_hook(double)
    loss_of(model).backward()
    loss_of(reference).backward()
    for parameter in reference.blocks[1].parameters():
        parameter.grad.mul_(2)
    assert_gradients(model, reference)
    assert len(seen) == 1 and seen[0] >= 2 * 132 * 133 // (4 // replicas)


@world(4)
def test_several_meshes_in_one_model() -> None:
    """Contract MESH-05: blocks on 2x2, the root on all four ranks."""
    model, reference = Stack(), Stack()
    for block in model.blocks:
        fully_shard(block, mesh=mesh(2))
    fully_shard(model)
    for _ in range(2):
        loss_of(model).backward()
        loss_of(reference).backward()
        assert_gradients(model, reference)


@world(4)
def test_wrong_meshes() -> None:
    """Contract MESH-03, MESH-04."""
    with pytest.raises(AssertionError, match="mesh_dim_names"):
        fully_shard(Stack(), mesh=init_device_mesh("cpu", (2, 2)))
    with pytest.raises(ValueError, match="one or two dimensions"):
        fully_shard(Stack(), mesh=init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=("a", "b", "c")))
    elsewhere = DeviceMesh("cpu", [0, 1])
    if dist.get_rank() > 1:
        with pytest.raises(ValueError, match=r"Rank . is not part"):
            fully_shard(Stack(), mesh=elsewhere)
    with pytest.raises(ValueError, match="positive"):
        sharded().set_gradient_divide_factor(0)
