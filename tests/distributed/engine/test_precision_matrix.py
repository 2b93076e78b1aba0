"""Every combination of dtypes and ways to run, against a model that performs the same casts without sharding.

Outputs, gradients and updated parameters are compared bit by bit: two ranks add two numbers, and a sum of two does not
depend on their order.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
from typing import NamedTuple

import pytest
import torch
from bed import world
from bed.recorders import Collectives
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from unshard import MixedPrecisionPolicy, fully_shard

F64, F32, F16, B16 = torch.float64, torch.float32, torch.float16, torch.bfloat16

PARAM = (F32, F16, B16)
REDUCE = (None, F32, B16)
RANKS = 2  # data-parallel ranks; on four ranks each pair of them shares a model by tensor parallelism
RATE = 0.5


class Way(NamedTuple):
    output: torch.dtype | None
    cast_inputs: bool
    accumulate: bool
    reshard: bool


WAYS = [Way(*values) for values in itertools.product((None, F32), (True, False), (False, True), (True, False))]


class Net(nn.Module):
    """`first` is cut by columns and `second` by rows where there is tensor parallelism; `head` never is."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(11)
        self.first = nn.Linear(6, 8)
        self.second = nn.Linear(8, 5, bias=False)  # with a bias, DTensor's addition would have an order of its own
        self.head = nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.second(torch.tanh(self.first(x)))))


class Halves(Net):
    """The same with `first` and `second` computed in two halves, as two tensor-parallel ranks do."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        one, other = (self._half(x, slice(start, start + 4)) for start in (0, 4))
        return self.head(torch.tanh(one + other))

    def _half(self, x: torch.Tensor, part: slice) -> torch.Tensor:
        hidden = nn.functional.linear(x, self.first.weight[part], self.first.bias[part])
        return nn.functional.linear(torch.tanh(hidden), self.second.weight[:, part])


_once = functools.cache(lambda kind: kind())


def fresh(kind: type[Net]) -> Net:
    return copy.deepcopy(_once(kind))


def batch(rank: int, micro: int) -> torch.Tensor:
    return torch.randn(3, 6, generator=torch.Generator().manual_seed(10 * rank + micro))


def loss_of(output: torch.Tensor) -> torch.Tensor:
    return (output * output).sum()


class Expected(NamedTuple):
    outputs: list[torch.Tensor]
    inputs: list[torch.Tensor]
    gradients: dict[str, torch.Tensor]
    parameters: dict[str, torch.Tensor]


def given(rank: int, micro: int, compute: torch.dtype, way: Way) -> torch.Tensor:
    """What a user passes: something to cast, or the compute dtype where the policy does not cast."""
    wide = F64 if compute == F32 else F32
    return batch(rank, micro).to(wide if way.cast_inputs else compute).requires_grad_()


def one_rank(
    kind: type[Net], rank: int, compute: torch.dtype, reduce: torch.dtype, way: Way
) -> tuple[list[torch.Tensor], list[torch.Tensor], dict[str, torch.Tensor]]:
    """Outputs, gradients of inputs, and unreduced gradients in the reduce dtype of one data-parallel rank."""
    model, outputs, inputs = fresh(kind).to(compute), [], []
    kept: dict[str, torch.Tensor] = {}
    for micro in range(2 if way.accumulate else 1):
        x = given(rank, micro, compute, way)
        output = model(x.to(compute))
        output = output if way.output is None else output.to(way.output)
        loss_of(output).backward()
        outputs.append(output.detach())
        inputs.append(x.grad)
        for name, parameter in model.named_parameters():
            if name in kept:
                kept[name] += parameter.grad
            else:
                kept[name] = parameter.grad.to(reduce)
        model.zero_grad()
    return outputs, inputs, kept


@functools.cache
def expected(kind: type[Net], rank: int, compute: torch.dtype, reduce: torch.dtype, way: Way) -> Expected:
    ranks = [one_rank(kind, each, compute, reduce, way) for each in range(RANKS)]
    # fp16 is halved before the sum, so that it does not overflow; the others are averaged.
    before, after = (2, 1) if reduce == F16 else (1, 2)
    shard, gradients, parameters = fresh(Net), {}, {}
    for name, parameter in shard.named_parameters():
        one, other = (kept[name] / before for _, _, kept in ranks)
        mean = (one + other) / after
        assert mean.dtype == reduce
        gradients[name] = mean.to(F32)
        parameters[name] = parameter.detach() - RATE * gradients[name]
    return Expected(ranks[rank][0], ranks[rank][1], gradients, parameters)


def piece(name: str, whole: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """This rank's rows, worked out by hand: first the tensor-parallel half, then the data-parallel piece of that."""
    if mesh.ndim == 2:
        half = mesh.get_local_rank("tp")
        if name.startswith("first"):
            whole = whole.chunk(2)[half]
        elif name.startswith("second"):
            whole = whole.chunk(2, dim=1)[half]
    return whole.chunk(RANKS)[mesh.get_local_rank("dp")]


def check(mesh: DeviceMesh, param: torch.dtype, reduce: torch.dtype | None, way: Way) -> int:
    rank, both = mesh.get_local_rank("dp"), mesh.ndim == 2
    theirs = expected(Halves if both else Net, rank, param, reduce or param, way._replace(reshard=True))
    model = fresh(Net)
    if both:
        parallelize_module(model, mesh["tp"], {"first": ColwiseParallel(), "second": RowwiseParallel()})
    policy = MixedPrecisionPolicy(param, reduce, way.output, way.cast_inputs)
    fully_shard(model, mesh=mesh["dp"], mp_policy=policy, reshard_after_forward=way.reshard)
    recorded = way.output is None and way.cast_inputs  # it takes time, and the others send the same
    micros = 2 if way.accumulate else 1
    compared = 0
    for micro in range(micros):
        model.set_requires_gradient_sync(micro == micros - 1)
        x = given(rank, micro, param, way)
        with Collectives() if recorded else contextlib.nullcontext() as calls:
            output = model(x)
            loss_of(output).backward()
        assert output.dtype == (way.output or param)
        same(f"output {micro}", output.detach(), theirs.outputs[micro])
        same(f"input {micro}", x.grad, theirs.inputs[micro])
        if calls is not None:
            dtypes = [call.dtypes for call in calls.of("reduce_scatter")]
            assert dtypes == [{reduce or param}] * (micro == micros - 1)
            # The model is gathered again for backward if it was not kept; tensor parallelism gathers nothing.
            assert [call.dtypes for call in calls.of("gather")] == [{param}] * (2 if way.reshard else 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    for name, parameter in model.named_parameters():
        same(f"gradient of {name}", parameter.grad.to_local(), piece(name, theirs.gradients[name], mesh))
    optimizer.step()
    for name, parameter in model.named_parameters():
        same(name, parameter.detach().to_local(), piece(name, theirs.parameters[name], mesh))
        compared += 1
    return compared


def same(what: str, mine: torch.Tensor, theirs: torch.Tensor) -> None:
    assert theirs.numel() and theirs.isfinite().all() and theirs.any(), what
    torch.testing.assert_close(mine, theirs, rtol=0, atol=0, msg=lambda text: f"{what}: {text}")


def check_all(mesh: DeviceMesh, param: torch.dtype, reduce: torch.dtype | None, ways: list[Way] = WAYS) -> None:
    done = 0
    for way in ways:
        assert check(mesh, param, reduce, way) == 5, way
        done += 1
    assert done == len(ways) > 3


def quarter(number: int) -> list[Way]:
    """Four of the ways: between them each value of each field, and each pair of values of most fields."""
    chosen = []
    for way in WAYS:
        output, cast, accumulate, reshard = way.output is None, way.cast_inputs, way.accumulate, way.reshard
        if (output ^ cast ^ accumulate, cast ^ accumulate ^ reshard) == divmod(number % 4, 2):
            chosen.append(way)
    return chosen


@pytest.mark.parametrize("reduce", REDUCE)
@pytest.mark.parametrize("param", PARAM)
@world(2)
def test_one_dimension(param: torch.dtype, reduce: torch.dtype | None) -> None:
    """Contract MP-42 to MP-45, MP-08, MP-11, MP-14, MP-18, MP-20, MP-21, MP-23."""
    check_all(init_device_mesh("cpu", (RANKS,), mesh_dim_names=("dp",)), param, reduce)


@pytest.mark.parametrize("param", PARAM)
@world(4)
def test_two_dimensions(param: torch.dtype) -> None:
    """Contract MP-37 and those above, with tensor parallelism: every way, though not with every pair of dtypes."""
    mesh = init_device_mesh("cpu", (RANKS, 2), mesh_dim_names=("dp", "tp"))
    for number, reduce in enumerate(REDUCE):  # in one job, which plans its operations on DTensors once
        check_all(mesh, param, reduce, quarter(3 * PARAM.index(param) + number))


@pytest.mark.slow
@pytest.mark.parametrize("reduce", REDUCE)
@pytest.mark.parametrize("param", PARAM)
@world(4)
def test_two_dimensions_in_every_way(param: torch.dtype, reduce: torch.dtype | None) -> None:
    check_all(init_device_mesh("cpu", (RANKS, 2), mesh_dim_names=("dp", "tp")), param, reduce)


def test_no_combination_is_missing() -> None:
    assert len(set(WAYS)) == 16
    assert {way for number in range(4) for way in quarter(number)} == set(WAYS)
    for number in range(4):
        assert all(len(set(values)) == 2 for values in zip(*quarter(number), strict=True))
    assert len(set(PARAM)) * len(set(REDUCE)) * len(set(WAYS)) * 2 == 288
