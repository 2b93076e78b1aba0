"""Wrapped modules under `torch.func` and forward-mode differentiation."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from bed import world
from bed.stack import Stack, batch, loss_of
from bed.transforms import TRANSFORMS, called_with, linearized
from bed.wrapped import full_gradients, full_parameters
from torch import nn

from unshard import FullyShardedDataParallel as FSDP
from unshard import MixedPrecision, ShardingStrategy
from unshard.errors import ParameterError, UnsupportedError


def wrapped(originals: bool, **options: Any) -> FSDP:
    model = Stack(1)
    model.blocks[0] = FSDP(model.blocks[0], use_orig_params=originals, **options)
    return FSDP(model, use_orig_params=originals, **options)


def assert_trains(model: FSDP, reference: nn.Module) -> None:
    model.zero_grad()
    loss_of(model).backward()
    loss_of(reference).backward()
    found = full_gradients(model)
    for name, parameter in reference.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad, rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("strategy", [ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP], ids=["full", "op"])
@pytest.mark.parametrize("originals", [False, True], ids=["flat", "originals"])
@pytest.mark.parametrize("name", TRANSFORMS)
@world(1, 2)
def test_transforms(name: str, originals: bool, strategy: ShardingStrategy) -> None:
    """As the very first forward, and after a step."""
    model, reference = wrapped(originals, sharding_strategy=strategy), Stack(1)
    for _ in range(2):
        transform = TRANSFORMS[name]
        torch.testing.assert_close(transform(model, batch()), transform(reference, batch()))
        reference.zero_grad()
        assert_trains(model, reference)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("strategy", [ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP], ids=["full", "op"])
@pytest.mark.parametrize("originals", [False, True], ids=["flat", "originals"])
@world(2)
def test_forward_mode_first_in_mixed_precision(originals: bool, strategy: ShardingStrategy) -> None:
    precision = MixedPrecision(param_dtype=torch.bfloat16)
    for name in ("jvp", "dual"):
        model = wrapped(originals, sharding_strategy=strategy, mixed_precision=precision)
        expected = TRANSFORMS[name](Stack(1).bfloat16(), batch().bfloat16())
        torch.testing.assert_close(TRANSFORMS[name](model, batch()), expected, rtol=0, atol=0)
        model.zero_grad()
        loss_of(model).backward()


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("originals", [False, True], ids=["flat", "originals"])
@world(2)
def test_what_cannot_be_transformed_is_refused(originals: bool) -> None:
    model, reference = wrapped(originals), Stack(1)
    with pytest.raises(UnsupportedError, match=r"linearize.*cannot trace Unit '\S*'.*torch\.func\.jvp"):
        linearized(model, batch())
    before = full_parameters(model)
    others = {name: nn.Parameter(parameter.detach() * 2) for name, parameter in model.named_parameters()}
    with pytest.raises(ParameterError, match=r"functional_call replaces parameter '\S+' of unit '\(root\)' on rank"):
        called_with(others, model, batch())
    for name, parameter in full_parameters(model).items():
        torch.testing.assert_close(parameter, before[name], rtol=0, atol=0)
    assert_trains(model, reference)
