"""What sums of gradients are divided by: where, in which dtype, and in which collective."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from bed import loopback, world
from bed.recorders import TorchCalls
from bed.stack import Stack, assert_gradients, loss_of, mesh, sharded
from torch import nn

from unshard import MixedPrecisionPolicy, fully_shard

F32, F16, B16, F64 = torch.float32, torch.float16, torch.bfloat16, torch.float64


@pytest.mark.parametrize(
    ("reduce", "factor", "force_sum", "scatter", "reduction"),
    [
        (F32, None, False, "AVG", "AVG"),
        (B16, None, False, "AVG", "AVG"),
        (F16, None, False, "SUM", "SUM"),
        (F64, None, False, "SUM", "SUM"),
        (F32, None, True, "SUM", "SUM"),
        (F32, 2.0, False, "AVG", "SUM"),
        (F32, 3.0, False, "SUM", "SUM"),
        (F32, 3.0, True, "SUM", "SUM"),
    ],
)
def test_the_reduction_in_each_collective(
    reduce: torch.dtype, factor: float | None, force_sum: bool, scatter: str, reduction: str
) -> None:
    """Contract DIV-01, DIV-02, DIV-04, DIV-06, DIV-07, DIV-09, DIV-12, API-17; two shards, two replicas."""
    with loopback.job(4) as group:
        layer = fully_shard(nn.Linear(1, 2), mesh=mesh(2), mp_policy=MixedPrecisionPolicy(reduce_dtype=reduce))
        if factor is not None:
            layer.set_gradient_divide_factor(factor)
        layer.set_force_sum_reduction_for_comms(force_sum)
        group.log.clear()
        layer(torch.full((1, 1), 3.0)).sum().backward()
        seen = {call.kind: call.reduce for call in group.log}
        assert (seen["reduce_scatter"], seen["all_reduce"]) == (scatter, reduction)
        # Four equal ranks: the mean is each one's gradient, and a factor divides the sum.
        expected = 3.0 if factor is None else 12.0 / factor
        assert layer.weight.grad.to_local().item() == pytest.approx(expected)


@world(1)
def test_one_rank_divides_only_if_asked() -> None:
    """Contract DIV-05, DIV-13."""
    for factor, expected in ((None, 3.0), (4.0, 0.75)):
        layer = fully_shard(nn.Linear(1, 2))
        if factor is not None:
            layer.set_gradient_divide_factor(factor)
        with TorchCalls() as calls:
            layer(torch.full((1, 1), 3.0)).sum().backward()
        assert calls.counts["aten._foreach_div_.Scalar"] + calls.counts["aten._foreach_div_"] == (factor is not None)
        assert layer.weight.grad.full_tensor().tolist() == [[expected]] * 2


@world(3)
def test_division_in_the_reduce_dtype() -> None:
    """Contract DIV-14: four thirds as bf16 knows them, then cast; not divided after the cast."""
    layer = nn.Linear(1, 1, bias=False)
    fully_shard(layer, mp_policy=MixedPrecisionPolicy(reduce_dtype=B16))
    layer.set_force_sum_reduction_for_comms(True)
    layer(torch.tensor([[2.0 if dist.get_rank() == 0 else 1.0]])).sum().backward()
    gradient = layer.weight.grad.full_tensor()
    assert gradient.dtype == F32
    assert gradient.item() == torch.tensor(4 / 3).to(B16).item() != torch.tensor(4 / 3).item()


@pytest.mark.parametrize("setter", ["set_gradient_divide_factor", "set_reduce_scatter_divide_factor"])
@world(2)
def test_a_factor_counts_for_one_module(setter: str) -> None:
    """Contract DIV-11, API-15, API-16: the module it was set on, and none below or above."""
    model, reference = sharded(), Stack()
    getattr(model, setter)(1.0)
    getattr(model.blocks[1], setter)(8.0)
    loss_of(model).backward()
    loss_of(reference).backward()
    for parameter in reference.head.parameters():
        parameter.grad.mul_(2)
    for parameter in reference.blocks[1].parameters():
        parameter.grad.div_(4)
    assert_gradients(model, reference)


@pytest.mark.parametrize("setter", ["set_gradient_divide_factor", "set_reduce_scatter_divide_factor"])
@world(2)
def test_a_factor_for_the_whole_model(setter: str) -> None:
    """Contract API-15: with `recurse=True`, every unit below the module."""
    model, reference = sharded(), Stack()
    getattr(model, setter)(1.0, recurse=True)
    loss_of(model).backward()
    loss_of(reference).backward()
    for parameter in reference.parameters():
        parameter.grad.mul_(2)
    assert_gradients(model, reference)


@pytest.mark.parametrize("factor", [2.0, 4.0, 6.0])
@world(2)
def test_another_factor_in_half_precision(factor: float) -> None:
    """Contract DIV-10: divided before and after, so that sums beyond the largest number of fp16 do not appear."""
    layer = nn.Linear(1, 1, bias=False)
    fully_shard(layer, mp_policy=MixedPrecisionPolicy(param_dtype=F16))
    layer.set_gradient_divide_factor(factor)
    layer(torch.tensor([[40000.0]])).sum().backward()
    torch.testing.assert_close(layer.weight.grad.full_tensor().item(), 80000.0 / factor, rtol=1e-3, atol=0)
