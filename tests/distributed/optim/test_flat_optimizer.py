"""Optimizers on flat shards against the same optimizers on the DTensors: the same bits, from far fewer tensors."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from bed import world
from bed.flat_optimizers import (
    FUSED,
    KINDS,
    OPTIMIZERS,
    WAYS,
    Mirror,
    Net,
    assert_clean,
    by_decay,
    inputs,
    local,
    optim,
    parameters_of,
    ranges,
    sharded,
    some_ignored,
    some_ignored_of_full_vectors,
    train,
)
from bed.models import CASES, Case
from torch import nn
from torch.distributed.tensor import DTensor

from unshard import MixedPrecisionPolicy, fully_shard
from unshard.optim import flat


@pytest.mark.parametrize("name", list(OPTIMIZERS))
@world(2)
def test_the_same_numbers(name: str) -> None:
    """Parameters and state. One layer has no gradient in some steps, so that its counters lag."""
    kind, options = OPTIMIZERS[name]
    for way in WAYS if name in FUSED else ("loop", "foreach"):
        model = sharded()
        model.odd.weight.requires_grad_(False)
        optimizer = flat(kind(by_decay(model), **options, **WAYS[way]))
        mirror = Mirror(optimizer, **options, **WAYS[way])
        train(
            model,
            optimizer,
            mirror,
            steps=range(6),
            loss=lambda m, step: m(inputs(step), step % 3 != 1).square().mean(),
        )
        mirror.check(bitwise=way != "fused")
        assert len(ranges(optimizer)) < len(list(model.parameters()))
        assert_clean()


@pytest.mark.parametrize("name", ["momentum", "amsgrad"])
@world(2)
def test_the_same_as_with_dtensors(name: str) -> None:
    """And not only as with their local tensors."""
    kind, options = OPTIMIZERS[name]
    mine, theirs = sharded(), sharded()
    ours, other = flat(kind(by_decay(mine), **options)), kind(by_decay(theirs), **options)
    train(mine, ours)
    train(theirs, other)
    for a, b in zip(mine.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(local(a), local(b))
        assert ours.state[a].keys() == other.state[b].keys()
        for key, value in other.state[b].items():
            assert type(value) is type(ours.state[a][key]) and torch.equal(local(value), local(ours.state[a][key]))


@pytest.mark.parametrize("each", CASES, ids=str)
@world(1, 3)
def test_every_kind_of_parameter(each: Case) -> None:
    """Uneven, empty, tied, recurrent and four-dimensional ones."""
    model = each.build()
    for unit in each.units(model):
        fully_shard(unit)
    optimizer = flat(optim.AdamW(by_decay(model), lr=0.01))
    mirror = Mirror(optimizer)
    train(model, optimizer, mirror, steps=range(3), loss=lambda model, step: each.loss(model, each.batch(step)))
    mirror.check()
    assert len(ranges(optimizer)) <= 2 * len(each.units(model))
    assert_clean()


def in_two_precisions() -> nn.Module:
    return sharded(mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32))


@pytest.mark.parametrize("build", [*KINDS, in_two_precisions])
@world(4)
def test_every_kind_of_sharding(build: Callable[[], nn.Module]) -> None:
    model = build()
    optimizer = flat(optim.AdamW(by_decay(model), lr=0.01))
    mirror = Mirror(optimizer)
    train(model, optimizer, mirror)
    mirror.check()
    plain = sum(not isinstance(each, DTensor) for each in model.parameters())
    assert plain == (2 if build is some_ignored else 0)
    assert_clean()


@pytest.mark.parametrize("way", list(WAYS))
@world(2)
def test_plain_parameters_in_one_step_with_sharded_ones(way: str) -> None:
    """Ignored ones in the same groups: one call of torch takes both kinds, though it refuses DTensors among others."""
    model = some_ignored() if way != "fused" else some_ignored_of_full_vectors()
    with pytest.raises(RuntimeError, match=r"mixed torch\.Tensor and DTensor") if way != "loop" else nullcontext():
        other = optim.AdamW(by_decay(some_ignored()), **WAYS[way])
        for each in parameters_of(other):
            each.grad = torch.ones_like(each)
        other.step()
    optimizer = flat(optim.AdamW(by_decay(model), lr=0.01, **WAYS[way]))
    mirror = Mirror(optimizer, **WAYS[way])
    train(model, optimizer, mirror)
    mirror.check()


@world(3)
def test_padding_where_eps_is_nothing() -> None:
    """In float16 torch's default is zero, and an optimizer that steps padding divides zero by zero."""
    model = fully_shard(Net().half())
    optimizer = flat(optim.AdamW(by_decay(model), lr=0.01))
    mirror = Mirror(optimizer)
    for step in range(3):
        model(inputs(step).half()).square().mean().backward()
        for each in model.parameters():
            local(each.grad).fill_(0.5)
        mirror.step()
        optimizer.step()
        optimizer.zero_grad()
    mirror.check()
    assert_clean()
    assert all(local(each).isfinite().all() for each in model.parameters())


@world(2)
def test_a_group_for_every_parameter() -> None:
    """Learning rates of their own: each is a range then, and none is stepped by another's."""
    model = sharded()
    groups = [{"params": [each], "lr": 0.01 * rate} for rate, each in enumerate(model.parameters(), 1)]
    optimizer = flat(optim.SGD(groups, momentum=0.9))
    mirror = Mirror(optimizer)
    train(model, optimizer, mirror)
    mirror.check()
    assert len(ranges(optimizer)) == len(list(model.parameters()))
