"""Clipping where nothing is sharded: as torch's own, but for what is named."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from unshard.errors import ArgumentError, GradientError
from unshard.optim import clip_grad_norm_


def parameters(*dtypes: torch.dtype, scale: float = 1.0) -> list[nn.Parameter]:
    dice = torch.Generator().manual_seed(0)
    made = [nn.Parameter(torch.zeros(3, 4, dtype=dtype)) for dtype in dtypes or (torch.float32,) * 3]
    for each in made:
        each.grad = (scale * torch.randn(3, 4, generator=dice)).to(each.dtype)
    return made


@pytest.mark.parametrize("foreach", [None, True, False])
@pytest.mark.parametrize("order", [0.5, 1, 2.0, 3.5, math.inf, "inf"])
@pytest.mark.parametrize("limit", [0, 0.25, 1000.0, math.inf])
def test_as_torch_does(order: float | str, limit: float, foreach: bool | None) -> None:
    mine, theirs = parameters(), parameters()
    for each in (mine, theirs):
        each.append(nn.Parameter(torch.ones(2)))  # without a gradient
    norm = clip_grad_norm_(mine, limit, order, foreach=foreach)
    expected = torch.nn.utils.clip_grad_norm_(theirs, limit, float(order))
    torch.testing.assert_close(norm, expected)
    for a, b in zip(mine[:3], theirs[:3], strict=True):
        torch.testing.assert_close(a.grad, b.grad)
    assert mine[3].grad is None


def test_norms_are_wide() -> None:
    """Half precision overflows at 65504, and so would the factor's inverse; float32 does when it is squared."""
    half = parameters(torch.float16, torch.bfloat16, scale=2e4)
    expected = torch.cat([each.grad.double().flatten() for each in half])
    norm = clip_grad_norm_(half, 1e-3)
    assert norm.dtype == torch.float32 and norm.item() == pytest.approx(expected.norm().item(), rel=1e-5)
    clipped = torch.cat([each.grad.double().flatten() for each in half])
    assert clipped.norm().item() == pytest.approx(1e-3, rel=1e-2)
    large = [nn.Parameter(torch.zeros(1)) for _ in range(2)]
    for each in large:
        each.grad = torch.full((1,), 1e15)
    assert clip_grad_norm_(large, 1.0, norm_type=4).item() == pytest.approx(2**0.25 * 1e15, rel=1e-5)
    assert clip_grad_norm_(parameters(torch.float64, torch.float64), 1.0).dtype == torch.float64
    assert clip_grad_norm_(parameters(torch.float64, torch.float32), 1.0).dtype == torch.float32


def test_each_parameter_counts_once() -> None:
    (weight,) = parameters(torch.float32)
    expected = weight.grad.norm()
    torch.testing.assert_close(clip_grad_norm_([weight, weight], 0.5), expected)
    torch.testing.assert_close(weight.grad.norm(), torch.tensor(0.5))
    torch.testing.assert_close(clip_grad_norm_(weight, 0.25), torch.tensor(0.5))


def test_sparse_gradients() -> None:
    table = nn.Embedding(4, 2, sparse=True)
    table(torch.tensor([1, 1, 2])).sum().backward()
    assert clip_grad_norm_(table.parameters(), 1.0).item() == pytest.approx(math.sqrt(10))
    torch.testing.assert_close(table.weight.grad.to_dense().norm(), torch.tensor(1.0))


def test_complex_gradients() -> None:
    weight = nn.Parameter(torch.zeros(2, dtype=torch.complex64))
    weight.grad = torch.tensor([3 + 4j, 12j])
    assert clip_grad_norm_(weight, 1.3).item() == pytest.approx(13.0)
    torch.testing.assert_close(weight.grad.abs().norm(), torch.tensor(1.3))


@pytest.mark.parametrize("bad", [math.inf, math.nan])
@pytest.mark.parametrize("order", [2.0, math.inf])
def test_gradients_that_are_not_finite(order: float, bad: float) -> None:
    mine = parameters()
    mine[1].grad[0, 0] = bad
    before = [each.grad.clone() for each in mine]
    with pytest.raises(
        GradientError, match=r"Rank 0 .*1 gradients on this rank are not finite: parameters 1 of shape \(3, 4\)"
    ):
        clip_grad_norm_(mine, 1.0, order, error_if_nonfinite=True)
    assert issubclass(GradientError, RuntimeError)
    for each, gradient in zip(mine, before, strict=True):
        torch.testing.assert_close(each.grad, gradient, rtol=0, atol=0, equal_nan=True)
    assert repr(clip_grad_norm_(mine, 1.0, order).item()) == repr(bad)
    expected = 0.0 if math.isinf(bad) else math.nan
    assert repr(mine[0].grad.abs().sum().item()) == repr(expected)


def test_wrong_arguments() -> None:
    mine = parameters()
    named = [("weight", mine[0])]
    for given, limit, order, message in (
        (mine, -1.0, 2, "max_norm must not be negative, got -1.0"),
        (mine, math.nan, 2, "max_norm must not be negative"),
        (mine, 1.0, -1, "norm_type must be 0, positive or infinite, got -1"),
        (mine, 1.0, math.nan, "norm_type must be 0, positive"),
        (None, 1.0, 2, "parameters must be tensors, got a NoneType"),
        (nn.Linear(2, 2), 1.0, 2, r"must be tensors, got a Linear\. Pass model.parameters\(\)\.$"),
        (nn.Sequential(), 1.0, 2, "got a Sequential"),
        ([1.0], 1.0, 2, "parameters must be tensors, got a float"),
        (named, 1.0, 2, r"got a tuple\..*not named_parameters"),
    ):
        with pytest.raises(ArgumentError, match=message):
            clip_grad_norm_(given, limit, order)
    assert issubclass(ArgumentError, ValueError)


def test_nothing_to_clip() -> None:
    assert clip_grad_norm_([], 1.0).item() == 0.0
    assert clip_grad_norm_([nn.Parameter(torch.ones(1))], 1.0, "inf").item() == 0.0
    spent = iter([])
    with pytest.warns(UserWarning, match="exhausted iterator"):
        clip_grad_norm_(spent, 1.0)
