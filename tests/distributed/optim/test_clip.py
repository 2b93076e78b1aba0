"""Clipping of sharded gradients against torch's clipping of the same model unsharded."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from bed import world
from bed.models import CASES, Case
from bed.recorders import Collectives
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard

from unshard import HSDPMeshInfo, ShardPlacementResult, fully_shard
from unshard.errors import ArgumentError, GradientError
from unshard.optim import clip_grad_norm_

INF = math.inf


class Net(nn.Module):
    """Layers that tensor parallelism can cut, uneven ones, and a row that only one rank has anything of."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 6)
        self.odd, self.last = nn.Linear(6, 7), nn.Linear(7, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.second(torch.tanh(self.first(x)))
        return self.last(torch.tanh(self.odd(x)))


def backward(model: nn.Module) -> None:
    """The same on every rank, so that gradients are those of the unsharded model."""
    x = torch.randn(5, 6, generator=torch.Generator().manual_seed(1))
    model(x).square().mean().backward()


def full(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def everywhere(value: object) -> list:
    values: list = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def check(model: nn.Module, reference: nn.Module, order: float = 2.0, limit: float = 0.125) -> None:
    """Norm and gradients of both, after one reduction of one number."""
    with Collectives() as calls:
        norm = clip_grad_norm_(model.parameters(), limit, order)
    expected = torch.nn.utils.clip_grad_norm_(reference.parameters(), limit, order)
    assert expected > (0 if order < 0 else limit)
    assert type(norm) is torch.Tensor and (norm.shape, norm.dtype) == ((), torch.float32)
    assert len(set(everywhere(norm.item()))) == 1
    # The smallest gradient has the rounding errors of a sum of much larger numbers.
    torch.testing.assert_close(norm, expected, rtol=1e-5, atol=1e-9 if order < 0 else 0)
    compared = 0
    for (name, mine), theirs in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert (mine.grad is None) == (theirs.grad is None), name
        if theirs.grad is not None:
            torch.testing.assert_close(full(mine.grad), theirs.grad, rtol=1e-4, atol=1e-7, msg=name)
            compared += 1
    assert compared
    alone = dist.get_world_size() == 1
    if order == 0:  # gradient by gradient first
        return
    assert [(call.kind, call.outputs[0][1], call.ranks) for call in calls.calls] == (
        [] if alone else [("all_reduce", 1, dist.get_world_size())]
    )


ORDERS = pytest.mark.parametrize("order", [0.5, 1.0, 2.0, 3.5, INF])


@pytest.mark.parametrize("order", [0.0, -INF])
@world(1, 2, 3, 4)
def test_orders_that_are_not_positive(order: float) -> None:
    """Of each gradient by itself: a part that is zero, a whole one that is, and the zeros of padding do not count."""
    model, reference = Net(), Net()
    fully_shard(model.first, reshard_after_forward=False)
    fully_shard(model, ignored_params={model.last.bias})
    for each in (model, reference):
        backward(each)
        if order == 0:
            each.second.bias.grad.zero_()
            each.last.bias.grad.zero_()
    if order == 0 and dist.get_rank() == 0:
        model.odd.weight.grad.to_local()[0] = 0
    if order == 0:
        reference.odd.weight.grad[0] = 0
    check(model, reference, order, limit=0.125 if order == 0 else 1e-5)


@pytest.mark.parametrize("order", [0.0, -INF])
@world(4)
def test_orders_that_are_not_positive_on_meshes(order: float) -> None:
    """Replicas, tensor parallelism, and gradients that are not summed yet."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    replicas = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    for build in (lambda: tensor_parallel(mesh, "dp"), lambda: fully_shard(Net(), mesh=replicas)):
        model, reference = build(), Net()
        for each in (model, reference):
            backward(each)
            if order == 0:
                each.second.weight.grad.zero_()
        check(model, reference, order, limit=0.125 if order == 0 else 1e-5)
    weight = nn.Parameter(distribute_tensor(torch.zeros(3), mesh, [Replicate(), Replicate()]))
    mine = torch.tensor([3.0, 8.0, 1.0]) * (1 if mesh.get_local_rank("dp") else -1)
    weight.grad = DTensor.from_local(mine.clone(), mesh, [Partial(), Replicate()], run_check=False)
    assert clip_grad_norm_([weight], 1.0, order).item() == 0.0  # the sum is zero


@world(2)
def test_the_smallest_where_a_rank_has_nothing_or_nan() -> None:
    """A row that only rank 0 has, no gradients anywhere, and a NaN on one rank."""
    model = fully_shard(nn.Linear(3, 1, bias=False))
    assert clip_grad_norm_(model.parameters(), 1.0, -INF).item() == 0.0  # as torch: no gradients
    model(torch.tensor([[2.0, 3.0, 5.0]])).sum().backward()
    assert clip_grad_norm_(model.parameters(), 10.0, -INF).item() == 2.0
    plain = nn.Parameter(torch.zeros(2))
    plain.grad = torch.tensor([1.0, math.nan if dist.get_rank() else 7.0])
    assert math.isnan(clip_grad_norm_([model.weight, plain], 10.0, -INF).item())


@ORDERS
@world(1, 2, 3, 4)
def test_shards(order: float) -> None:
    """Uneven and empty pieces among them."""
    model, reference = Net(), Net()
    fully_shard(model.first)
    fully_shard(model)
    for each in (model, reference):
        backward(each)
    check(model, reference, order)


@pytest.mark.parametrize("each", CASES, ids=str)
@world(3)
def test_every_kind_of_parameter(each: Case) -> None:
    model, reference = each.build(), each.build()
    for unit in each.units(model):
        fully_shard(unit)
    for net in (model, reference):
        each.loss(net, each.batch(0)).backward()
    check(model, reference, limit=1e-3)


@ORDERS
@world(4)
def test_replicas(order: float) -> None:
    """Each replica holds all of the gradient: counted once."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model, reference = fully_shard(Net(), mesh=mesh), Net()
    for each in (model, reference):
        backward(each)
    check(model, reference, order)


def tensor_parallel(mesh: DeviceMesh, *names: str) -> Net:
    """Strided cuts, cuts of another dimension, replicas, and parameters that are not on the "tp" ranks at all."""
    model = Net()
    plan = {"first": ColwiseParallel(), "second": RowwiseParallel()}
    parallelize_module(model, mesh["tp"], plan)
    return fully_shard(model, mesh=mesh[names])


@ORDERS
@world(4)
def test_tensor_parallelism(order: float) -> None:
    """Also: parameters on one and on two dimensions of a mesh are of one model."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model, reference = tensor_parallel(mesh, "dp"), Net()
    assert model.first.weight.placements == (_StridedShard(0, split_factor=2), Shard(0))
    assert model.second.bias.placements == (Shard(0), Replicate())
    assert {each.device_mesh.ndim for each in model.parameters()} == {1, 2}
    assert len({id(each.device_mesh) for each in model.parameters()}) == 2  # many equal ones would be slow to compare
    for each in (model, reference):
        backward(each)
    check(model, reference, order)


@pytest.mark.parametrize("shape", [(1, 2, 2), (2, 1, 2), (2, 2, 1)], ids=str)
@world(4)
def test_three_dimensions(shape: tuple[int, int, int]) -> None:
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard", "tp"))
    model, reference = tensor_parallel(mesh, "replicate", "shard"), Net()
    for each in (model, reference):
        backward(each)
    check(model, reference)


@ORDERS
@world(2, 3, 4)
def test_parameters_that_are_not_sharded(order: float) -> None:
    """Ignored ones are plain and whole on every rank, frozen ones have no gradients."""
    model, reference = Net(), Net()
    for each in (model, reference):
        each.odd.weight.requires_grad_(False)
    fully_shard(model, ignored_params={model.first.weight, model.last.bias})
    for each in (model, reference):
        backward(each)
    assert not isinstance(model.first.weight.grad, DTensor)
    check(model, reference, order)


@world(4)
def test_several_meshes() -> None:
    """Over all ranks, over half of them with replicas, over half of them alone; in one model."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))

    def choose(parameter: nn.Parameter) -> ShardPlacementResult | None:
        return ShardPlacementResult(None, HSDPMeshInfo(mesh, 1, 0)) if parameter.ndim == 1 else None

    model, reference = Net(), Net()
    fully_shard(model.second, mesh=mesh["shard"])
    fully_shard(model.odd, mesh=mesh["replicate"])
    fully_shard(model, mesh=init_device_mesh("cpu", (4,)), shard_placement_fn=choose)
    assert len({tuple(each.device_mesh.mesh.flatten().tolist()) for each in model.parameters()}) == 3
    for each in (model, reference):
        backward(each)
    check(model, reference)


@world(4)
def test_slices_that_cross() -> None:
    """No mesh covers the other; the one that both are slices of does."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    model, reference = Net(), Net()
    fully_shard(model.first, mesh=mesh["a"])
    fully_shard(model, mesh=mesh["b"])
    for each in (model, reference):
        backward(each)
    check(model, reference)


@world(2)
def test_some_gradients_of_a_unit() -> None:
    """Those of one layer, and all where one was replaced: no others are measured, and none is scaled."""
    model, reference = fully_shard(Net()), Net()
    for each in (model, reference):
        backward(each)
    untouched = model.odd.weight.grad.to_local().clone()
    check(model.first, reference.first, limit=1e-2)
    assert torch.equal(model.odd.weight.grad.to_local(), untouched)
    for each in (model, reference):
        each.last.weight.grad = each.last.weight.grad * 3
    check(model, reference, limit=1e-2)


@world(2)
def test_plain_gradients_that_differ() -> None:
    """Ranks that trained a plain parameter apart: the mean of the powers, the same on all ranks."""
    model = fully_shard(nn.Sequential(nn.Linear(2, 2, bias=False)))
    weight, plain = model[0].weight, nn.Parameter(torch.zeros(1))
    weight.grad = torch.full_like(weight, 1.0)
    plain.grad = torch.tensor([2.0 + dist.get_rank()])
    norm = clip_grad_norm_([weight, plain], 1.0)
    torch.testing.assert_close(norm, torch.tensor(math.sqrt(4 + (4 + 9) / 2)))
    torch.testing.assert_close(plain.grad, (2.0 + dist.get_rank()) / norm.reshape(1))
    assert clip_grad_norm_([plain], 10.0).item() == pytest.approx(plain.grad.item())  # nobody to ask
    plain.grad = torch.tensor([2.0 + dist.get_rank()])
    named = clip_grad_norm_([plain], 10.0, process_group=dist.group.WORLD)
    torch.testing.assert_close(named, torch.tensor(math.sqrt(13 / 2)))


@world(2)
def test_gradients_that_are_not_summed_yet() -> None:
    """Of DTensors made elsewhere: measured as their sum, scaled as they are."""
    mesh = init_device_mesh("cpu", (2,))
    weight = nn.Parameter(distribute_tensor(torch.zeros(3), mesh, [Replicate()]))
    mine = torch.tensor([3.0, -8.0, 0.0]) if dist.get_rank() else torch.tensor([0.0, 8.0, 4.0])
    weight.grad = DTensor.from_local(mine.clone(), mesh, [Partial()], run_check=False)
    assert clip_grad_norm_([weight], 1.0).item() == pytest.approx(5.0)
    torch.testing.assert_close(weight.grad.to_local(), mine / 5)
    assert weight.grad.placements == (Partial(),)


@world(2, 4)
def test_large_gradients_in_float16() -> None:
    """Neither the norm nor the factor fits float16."""
    model = fully_shard(nn.Linear(64, 64, bias=False).half())
    model.weight.grad = torch.full_like(model.weight, 6e4)
    norm = clip_grad_norm_(model.parameters(), 1.0)
    assert norm.dtype == torch.float32 and norm.item() == pytest.approx(64 * 6e4, rel=1e-3)
    assert model.weight.grad.dtype == torch.float16
    torch.testing.assert_close(
        model.weight.grad.to_local().float(), torch.full((64 // dist.get_world_size(), 64), 1 / 64)
    )


@world(3)
def test_several_dtypes() -> None:
    model, reference = Net(), Net()
    for each in (model, reference):
        each.first.bfloat16()
        each.odd.double()
    fully_shard(model)
    for mine, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        theirs.grad = torch.arange(theirs.numel(), dtype=theirs.dtype).reshape(theirs.shape)
        mine.grad = distribute_tensor(theirs.grad, mine.device_mesh, mine.placements)
    expected = torch.cat([each.grad.double().flatten() for each in reference.parameters()]).norm().item()
    norm = clip_grad_norm_(model.parameters(), 0.5)
    assert norm.dtype == torch.float32 and norm.item() == pytest.approx(expected, rel=1e-6)
    for mine, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        assert mine.grad.dtype == theirs.dtype
        scaled = theirs.grad.double() * (0.5 / expected)
        torch.testing.assert_close(mine.grad.full_tensor().double(), scaled, rtol=1e-2, atol=1e-6)


@world(3)
def test_a_rank_without_gradients() -> None:
    """It comes to the reduction, and learns the norm of the others."""
    model = fully_shard(nn.Linear(3, 3, bias=False))
    if dist.get_rank() != 1:
        model.weight.grad = torch.full_like(model.weight, 2.0)
    for order, expected in ((2.0, math.sqrt(6 * 4)), (INF, 2.0)):
        norm = clip_grad_norm_(model.parameters(), 100.0, order)
        assert norm.item() == pytest.approx(expected)


@pytest.mark.parametrize("bad", [INF, math.nan])
@ORDERS
@world(3)
def test_gradients_that_are_not_finite(order: float, bad: float) -> None:
    """On one rank; all ranks raise before anything is scaled, and only that one names a gradient."""
    model = fully_shard(Net())
    backward(model)
    rank = dist.get_rank()
    if rank == 2:
        model.odd.weight.grad.to_local()[0, 0] = bad
    before = [each.grad.to_local().clone() for each in model.parameters()]
    here = "All gradients on this rank are finite"
    if rank == 2:
        here = r"1 gradients on this rank are not finite: parameters 'odd\.weight' of unit '\(root\)'"
    with pytest.raises(GradientError, match=rf"Rank {rank} .*{bad}\. {here}.*error_if_nonfinite=False"):
        clip_grad_norm_(model.parameters(), 1.0, order, error_if_nonfinite=True)
    for each, gradient in zip(model.parameters(), before, strict=True):
        torch.testing.assert_close(each.grad.to_local(), gradient, rtol=0, atol=0, equal_nan=True)
    norm = clip_grad_norm_(model.parameters(), 1.0, order)
    assert everywhere(repr(norm.item())) == [repr(bad)] * 3


@world(4)
def test_groups() -> None:
    """A named one must hold all ranks of the parameters; two unrelated meshes need a name."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    model = fully_shard(nn.Linear(4, 4, bias=False), mesh=mesh["a"])
    model.weight.grad = torch.full_like(model.weight, 1.0)
    with Collectives() as calls:
        assert clip_grad_norm_(model.parameters(), 10.0).item() == 4.0
        assert clip_grad_norm_(model.parameters(), 10.0, process_group=dist.group.WORLD).item() == 4.0
    assert [call.ranks for call in calls.calls] == [2, 4]
    with pytest.raises(ArgumentError, match=r"process_group has the ranks \[\d, \d\], and parameters on rank"):
        clip_grad_norm_(model.parameters(), 10.0, process_group=mesh["b"].get_group())
    other = fully_shard(nn.Linear(4, 4), mesh=init_device_mesh("cpu", (2, 2), mesh_dim_names=("c", "d"))["d"])
    with pytest.raises(ArgumentError, match=r"None of these covers.*Pass process_group="):
        clip_grad_norm_([*model.parameters(), *other.parameters()], 10.0)


def in_one_dimension() -> tuple[nn.Module, list[nn.Parameter]]:
    model = fully_shard(Net())
    return model, list(model.parameters())


def in_two_dimensions() -> tuple[nn.Module, list[nn.Parameter]]:
    model = tensor_parallel(init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")), "dp")
    return model, [*model.first.parameters(), *model.second.parameters()]


@pytest.mark.parametrize("build", [in_one_dimension, in_two_dimensions])
@world(4)
def test_torchs_own_on_one_mesh(build: Callable) -> None:
    """It gives the same value, as a DTensor."""
    model, parameters = build()
    backward(model)
    mine = clip_grad_norm_(parameters, INF)
    theirs = torch.nn.utils.clip_grad_norm_(parameters, 0.01)
    assert isinstance(theirs, DTensor)
    torch.testing.assert_close(theirs.full_tensor(), mine)
    torch.testing.assert_close(clip_grad_norm_(parameters, 1.0), torch.tensor(0.01), rtol=1e-3, atol=0)


@pytest.mark.parametrize("order", [0.0, 1.0, 2.0, INF, -INF])
@world(4)
def test_stages_of_a_pipeline(order: float) -> None:
    """Two stages of two ranks with different layers: the norm is that of both together."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("stage", "dp"))
    reference = Net()
    backward(reference)
    stage = Net()
    backward(stage)
    layers = [(stage.first, stage.second), (stage.odd, stage.last)][mesh.get_local_rank("stage")]
    pieces = []
    for layer in layers:
        gradients = [each.grad for each in layer.parameters()]
        fully_shard(layer, mesh=mesh["dp"])
        for parameter, gradient in zip(layer.parameters(), gradients, strict=True):
            parameter.grad = distribute_tensor(gradient, mesh["dp"], parameter.placements)
            pieces.append(parameter)
    norm = clip_grad_norm_(pieces, 0.01, order, process_group=dist.group.WORLD, pipeline_stages=2)
    expected = torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.01, order)
    torch.testing.assert_close(norm, expected, rtol=1e-6, atol=0)
    with pytest.raises(ArgumentError, match="needs a process_group of all ranks"):
        clip_grad_norm_(pieces, 1.0, pipeline_stages=2)
    with pytest.raises(ArgumentError, match="got one of 4 ranks"):
        clip_grad_norm_(pieces, 1.0, process_group=dist.group.WORLD, pipeline_stages=3)
