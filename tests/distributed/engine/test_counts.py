"""Counted, not timed: collectives with their bytes, torch calls per unit, Python objects over many steps."""

from __future__ import annotations

import gc
from contextvars import Context
from math import prod

import pytest
import torch
import torch.distributed as dist
from bed import loopback, world
from bed.recorders import Call, Collectives, TorchCalls
from torch import nn

from unshard import MixedPrecisionPolicy, fully_shard
from unshard.comm.process_group import ON_HOST

LARGE = ON_HOST.below // 4  # elements of fp32 from which a parameter has a region of its own


def blocks(count: int, *, width: int = 160, small: int = 1) -> nn.Sequential:
    """Equal blocks of one large weight and some small parameters each."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(width, width) / width**0.5)
            self.gains = nn.ParameterList(nn.Parameter(torch.randn(width)) for _ in range(small))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x @ self.weight
            for gain in self.gains:
                x = x * gain
            return x

    assert width * width >= LARGE
    return nn.Sequential(*(Block() for _ in range(count)))


def sharded(model: nn.Sequential, **options: object) -> nn.Sequential:
    for block in model:
        fully_shard(block, **options)
    return fully_shard(model, **options)


def piece_bytes(module: nn.Module, itemsize: int, world: int) -> int:
    """Contract CM-02: the padded pieces of all parameters."""
    shapes = [tuple(parameter.shape) for parameter in module.parameters()]
    return itemsize * sum(-(-shape[0] // world) * prod(shape[1:]) for shape in shapes)


def step(model: nn.Module, x: torch.Tensor) -> tuple[list[Call], list[Call]]:
    with Collectives() as forward:
        loss = model(x).square().mean()
    with Collectives() as backward:
        loss.backward()
    return forward.calls, backward.calls


@pytest.mark.parametrize("width", [160, 161])
@pytest.mark.parametrize(("reshard", "gathers_back"), [(True, 3), (False, 0), (None, 3)], ids=["true", "false", "none"])
@world(2, 3)
def test_one_gather_forward_one_backward_one_reduction(reshard: bool | None, gathers_back: int, width: int) -> None:
    """Contract CM-01 to CM-03, CM-10 to CM-12: the number of collectives and their bytes, exactly."""
    size, model = dist.get_world_size(), blocks(3, width=width)
    each = piece_bytes(model[0], 4, size)
    sharded(model, reshard_after_forward=reshard)
    for _ in range(3):
        forward, backward = step(model, torch.randn(4, width))
        gathers = [call for call in backward if call.kind == "gather"]
        reductions = [call for call in backward if call.kind == "reduce_scatter"]
        assert [call.kind for call in forward] == ["gather"] * 3
        assert (len(gathers), len(reductions), len(backward)) == (gathers_back, 3, gathers_back + 3)
        for call in [*forward, *gathers]:
            assert (call.bytes_in, call.bytes_out) == (each, each * size)
        for call in reductions:
            # Pieces are exchanged. With one other rank only its piece is sent.
            exchanged = each if size == 2 else each * size
            assert (call.bytes_in, call.bytes_out) == (exchanged, exchanged)


@world(2)
def test_dtypes_on_the_wire() -> None:
    """Contract MP-09, MP-10: gathered in the compute dtype, reduced in the reduce dtype; half the bytes."""
    model = blocks(2)
    elements = piece_bytes(model[0], 1, 2)
    sharded(model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32))
    forward, backward = step(model, torch.randn(4, 160))
    for call in [*forward, *backward]:
        expected = torch.bfloat16 if call.kind == "gather" else torch.float32
        assert call.dtypes == {expected}
        assert min(call.bytes_in, call.bytes_out) == elements * expected.itemsize


@world(1)
def test_one_rank_sends_nothing() -> None:
    """Contract MESH-07, CM-24."""
    forward, backward = step(sharded(blocks(2)), torch.randn(4, 160))
    assert (forward, backward) == ([], [])


@world(2)
def test_a_frozen_unit_in_the_middle_gathers_and_does_not_reduce() -> None:
    """Contract CM-19, FRZ-02, FRZ-04."""
    model = blocks(3)
    model[1].requires_grad_(False)
    forward, backward = step(sharded(model), torch.randn(4, 160))
    assert len(forward) == 3
    assert [call.kind for call in backward].count("gather") == 3
    assert [call.kind for call in backward].count("reduce_scatter") == 2


def copied(calls: TorchCalls) -> dict[str, int]:
    """Operations that move data on the device."""
    words = ("copy", "cat", "split", "clone", "index", "to_")
    local = {name: count for name, count in calls.counts.items() if name.startswith("aten.")}
    return {name: count for name, count in local.items() if any(word in name for word in words)}


def test_one_group_of_collectives_per_unit() -> None:
    """The same on the zero-copy path: each large parameter has a tensor of its own in the group."""
    with loopback.job(world=2) as group:
        model = blocks(3)
        each = piece_bytes(model[0], 4, 2)
        sharded(model, reshard_after_forward=True)
        for _ in range(2):
            group.log.clear()
            model(torch.randn(4, 160)).square().mean().backward()
            kinds = [call.kind for call in group.log]
            assert (kinds.count("gather"), kinds.count("reduce_scatter"), len(kinds)) == (6, 3, 9)
            for call in group.log:
                assert call.grouped and len(call.inputs) == 2
                assert {call.bytes_in, call.bytes_out} == {each, 2 * each}


def test_large_parameters_are_never_copied_out() -> None:
    """Only the packed small parameters pass a copy after the gather; a unit without them has none at all."""
    with loopback.job(world=2):
        _check_copies_out()


def _check_copies_out() -> None:
    plain = blocks(2, small=0)
    sharded(plain, reshard_after_forward=True)
    packed = sharded(blocks(2, small=2), reshard_after_forward=True)
    for model in (plain, packed):
        model(torch.randn(4, 160)).sum().backward()
    with torch.no_grad(), TorchCalls() as without:
        plain(torch.randn(4, 160))
    with torch.no_grad(), TorchCalls() as with_small:
        packed(torch.randn(4, 160))
    assert copied(without) == {}
    assert copied(with_small) == {"aten.split_with_sizes_copy": 2}


def added_calls(parameters: int) -> dict[str, int]:
    """Dispatcher operations that sharding adds to forward and backward of one unit, by name."""
    width, counts = 160, []
    for shard in (False, True):
        torch.manual_seed(0)
        model = blocks(1, small=parameters - 1, width=width)
        if shard:
            sharded(model, reshard_after_forward=True)
        x = torch.randn(4, width, requires_grad=True)
        for _ in range(2):
            model(x).sum().backward()
            model.zero_grad()
        with TorchCalls() as calls:
            model(x).sum().backward()
        counts.append(calls.counts)
    names = counts[0].keys() | counts[1].keys()
    added = {name: counts[1].get(name, 0) - counts[0].get(name, 0) for name in names}
    return {name: count for name, count in added.items() if count}


def test_calls_per_unit_do_not_depend_on_the_number_of_parameters() -> None:
    """At most twelve, a collective and a `_foreach` counting once: the cost rule of docs/design.md."""
    with loopback.job(world=2):
        few, many = added_calls(5), added_calls(50)
    assert few == many
    assert sum(few.values()) <= 12, few
    assert few["aten._foreach_copy_"] == 1  # large gradients into the reduce buffer, nothing else


@world(2)
def test_nothing_grows_over_two_hundred_steps() -> None:
    """The step works on local tensors: in torch 2.11 the dispatch of DTensors keeps 26 objects of every AdamW step."""
    model = sharded(blocks(2, small=3))

    def train(steps: int) -> int:
        for _ in range(steps):
            model(torch.randn(2, 160)).square().mean().backward()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.to_local().sub_(parameter.grad.to_local(), alpha=0.01)
            model.zero_grad()
        gc.collect()
        # A thread has a context of its own from the first time it needs one, and threads come and go.
        return sum(type(each) is not Context for each in gc.get_objects())

    before = train(20)
    # Threads of torch and of the order check own a few objects at the moment of counting. One object that is kept
    # every other step would be 50.
    assert min(train(100), train(100)) < before + 50
