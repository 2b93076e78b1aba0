"""Where a parameter's rows lie, and what a gather of uneven ones sends."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from bed import world
from bed.models import CASES, Case
from bed.parity import check_parity, each_unit
from bed.recorders import Collectives
from bed.stack import Stack, batch, loss_of, sharded
from torch import nn
from torch.distributed.tensor import Shard

from unshard import fully_shard


@world(2)
def test_the_example_of_five_rows_on_two_ranks() -> None:
    """Contract LAY-03, LAY-04, CM-02: three and two rows; twelve elements per rank on the wire, bias included."""
    layer = fully_shard(nn.Linear(3, 5))
    rows = 3 - dist.get_rank()
    assert layer.weight.to_local().shape == (rows, 3) and layer.bias.to_local().shape == (rows,)
    with Collectives() as calls:
        layer(torch.ones(2, 3)).sum().backward()
    gather, reduction = calls.calls
    assert (gather.inputs, gather.outputs) == (((torch.float32, 12),), ((torch.float32, 24),))
    assert (reduction.bytes_in, reduction.bytes_out) == (4 * 12, 4 * 12)  # of two ranks, each sends the other's half


@world(2, 4)
def test_a_rank_without_rows() -> None:
    """Contract LAY-01, LAY-02, LAY-05: no rows, the other dimensions kept, for the parameter and its gradient."""
    layer = fully_shard(nn.Linear(3, 1))
    layer(torch.ones(2, 3)).sum().backward()
    rows = 1 if dist.get_rank() == 0 else 0
    for parameter, rest in ((layer.weight, (3,)), (layer.bias, ())):
        assert parameter.to_local().shape == parameter.grad.to_local().shape == (rows, *rest)
        assert parameter.grad.full_tensor().shape == (1, *rest)
    assert layer.weight.grad.full_tensor().tolist() == [[2.0, 2.0, 2.0]]


@world(2)
def test_the_placement_function_sees_unsharded_parameters() -> None:
    """Contract ARG-04, LAY-14: each original parameter, plain and unsharded, before anything is sharded."""
    model = Stack(1)
    originals, seen = set(model.parameters()), set()

    def choose(parameter: nn.Parameter) -> Shard | None:
        assert type(parameter) is nn.Parameter and parameter.shape[0] in (2, 132)
        seen.add(parameter)
        return None

    fully_shard(model, shard_placement_fn=choose)
    assert seen == originals


@pytest.mark.parametrize("dim", [0, 1])
@world(2)
def test_unsharded_parameters_are_contiguous(dim: int) -> None:
    """Contract LAY-16: original shape and contiguous strides while a module computes."""
    model, seen = Stack(1), []
    model.blocks[0].first.register_forward_hook(lambda module, args, output: seen.append(module.weight))
    sharded(model, shard_placement_fn=lambda parameter: Shard(dim) if parameter.ndim > 1 else None)
    with torch.no_grad():
        model(batch())
    assert seen[0].shape == (132, 132) and seen[0].stride() == (132, 1)


def _unsharded_dims(parameter: nn.Parameter) -> Shard | None:
    """The last dimension that any number of ranks up to four divides; else the first."""
    fits = [dim for dim, size in enumerate(parameter.shape) if dim and size % dist.get_world_size() == 0]
    return Shard(fits[-1]) if fits else None


@pytest.mark.parametrize("case", CASES, ids=str)
@world(1, 2, 3, 4)
def test_parity_of_other_dimensions(case: Case) -> None:
    """Contract LAY-06, LAY-16: every model of the test bed, cut along other dimensions where they divide."""
    check_parity(case, each_unit(case, fully_shard, shard_placement_fn=_unsharded_dims), steps=3)


@world(3)
def test_sums_do_not_depend_on_where_the_rows_lie() -> None:
    """Contract LAY-06: the same gradients along either dimension."""
    models = [sharded(shard_placement_fn=fn) for fn in (None, lambda p: Shard(p.ndim - 1))]
    for model in models:
        loss_of(model, dist.get_rank()).backward()
    for first, second in zip(*(model.parameters() for model in models), strict=True):
        torch.testing.assert_close(first.grad.full_tensor(), second.grad.full_tensor(), rtol=1e-6, atol=1e-8)
