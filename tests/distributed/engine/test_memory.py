"""Bytes that the engine holds, category by category, at every moment of a step: counted, on any device.

What autograd and the optimizer hold besides is theirs; `tests/gpu` asks the allocator of the device.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from bed import loopback, world
from bed.stack import mesh
from torch import nn
from torch.distributed.tensor import Shard

from unshard import MixedPrecisionPolicy, fully_shard
from unshard.comm.process_group import ProcessGroupTransport
from unshard.engine.params.buffers import Buffer
from unshard.engine.params.buffers import Shard as ParamShard
from unshard.engine.reduction import Reduction

WIDTH, BLOCKS, RANKS = 192, 4, 4
UNIT = WIDTH * (WIDTH + 1)  # elements of a block: one weight that travels alone, one bias that is packed
SHARD = UNIT // RANKS
SLACK = 2048  # bytes per unit: alignment, and the packed biases on their way


class Block(nn.Linear):
    """Notes the bytes held while it computes, forward and backward."""

    moments: list[int] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.moments.append(held())
        y = super().forward(x)
        if y.requires_grad:
            y.register_hook(lambda gradient: self.moments.append(held()))
        return y * 1.0


def blocks() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Block(WIDTH, WIDTH) for _ in range(BLOCKS)))


ALIVE: weakref.WeakSet[Buffer | ParamShard] = weakref.WeakSet()


@pytest.fixture(autouse=True)
def note_memory() -> Iterator[None]:
    """Every buffer and master shard that is made is noted, whoever makes it."""

    def noting(cls: type) -> Any:
        make = cls.__init__

        def init(self: Any, *args: Any, **kwargs: Any) -> None:
            ALIVE.add(self)
            make(self, *args, **kwargs)

        return mock.patch.object(cls, "__init__", init)

    ALIVE.clear()
    with noting(Buffer), noting(ParamShard):
        yield


def held() -> int:
    """Bytes in all buffers and master shards alive."""
    storages = [each.storage if isinstance(each, Buffer) else each.memory.untyped_storage() for each in ALIVE]
    return sum(storage.nbytes() for storage in storages)


def sharded(model: nn.Sequential, **options: object) -> nn.Sequential:
    for block in model:
        fully_shard(block, **options)
    return fully_shard(model, **options)


@contextmanager
def job(**options: object) -> Iterator[tuple[nn.Sequential, list[int]]]:
    """The model after two steps, and the bytes held at each moment from then on."""
    with loopback.job(RANKS):
        model = sharded(blocks(), **options)
        for _ in range(2):
            loss(model).backward()
            model.zero_grad()
        Block.moments.clear()
        yield model, Block.moments


def loss(model: nn.Module) -> torch.Tensor:
    return model(torch.randn(3, WIDTH, requires_grad=True)).square().mean()


def close(found: int, expected: float) -> bool:
    return expected <= found <= expected + SLACK * BLOCKS


def test_at_rest_there_are_shards() -> None:
    """Contract ME-01, ME-16, ME-21: parameters; after backward gradients too; after the next forward none again."""
    shards = 4 * SHARD * BLOCKS
    with job() as (model, _):
        assert close(held(), 2 * shards)  # cleared gradients leave with the next forward
        out = loss(model)
        assert close(held(), shards)
        out.backward()
        assert close(held(), 2 * shards)
        optimizer = torch.optim.Adam(model.parameters())
        optimizer.step()
        states = [state[name].to_local() for state in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]
        assert sum(state.nbytes for state in states) == 2 * shards


@pytest.mark.parametrize("policy", [None, MixedPrecisionPolicy(param_dtype=torch.bfloat16)], ids=["plain", "mixed"])
def test_forward_holds_two_units(policy: MixedPrecisionPolicy | None) -> None:
    """Contract ME-02 to ME-04 improved, ME-18: the current unit and the next; no staging, no cast copy."""
    compute = 4 if policy is None else 2
    with job(reshard_after_forward=True, mp_policy=policy) as (model, moments):
        loss(model)
        assert len(moments) == BLOCKS
        assert close(max(moments), 4 * SHARD * BLOCKS + 2 * UNIT * compute)
        assert close(moments[-1], 4 * SHARD * BLOCKS + UNIT * compute)


def test_forward_that_keeps_units() -> None:
    """Contract ME-05 improved: all units unsharded, and nothing else."""
    with job(reshard_after_forward=False) as (model, moments):
        loss(model)
        assert [close(now, 4 * SHARD * BLOCKS + 4 * UNIT * min(n + 2, BLOCKS)) for n, now in enumerate(moments)] == [
            True
        ] * BLOCKS


@pytest.mark.parametrize("reduce", [None, torch.float64])
@pytest.mark.parametrize("reshard", [True, False])
def test_backward_holds_two_units_and_one_reduction(reshard: bool, reduce: torch.dtype | None) -> None:
    """Contract ME-06 to ME-08 improved, ME-19: parameters and gradients as shards, units in use, one reduce buffer.

    A reduce dtype of its own adds one unit's result in that dtype.
    """
    policy, itemsize = MixedPrecisionPolicy(reduce_dtype=reduce), 4 if reduce is None else 8
    with job(reshard_after_forward=reshard, mp_policy=policy) as (model, moments):
        out = loss(model)
        moments.clear()
        out.backward()
        assert len(moments) == BLOCKS
        for number, now in enumerate(moments):
            whole = min(2, BLOCKS - number) if reshard else BLOCKS - number
            packed = UNIT * itemsize if number else 0
            # The last result arrives in the reduce dtype; those before it are gradients already.
            results = (SHARD * itemsize + 4 * SHARD * (number - 1)) if number else 0
            assert close(now, 4 * SHARD * BLOCKS + 4 * UNIT * whole + packed + results), number


def test_gradients_leave_before_the_result_comes() -> None:
    """Those of one unit never lie beside what they are reduced to."""
    taken: list[weakref.ref[torch.Tensor]] = []
    left = []
    start, scatter = Reduction.start, ProcessGroupTransport.reduce_scatter

    def noting(self: Reduction, gradients: list[torch.Tensor], *args: Any) -> Any:
        taken.extend(map(weakref.ref, gradients))
        return start(self, gradients, *args)

    def looking(self: ProcessGroupTransport, *args: Any, **options: Any) -> Any:
        left.append(sum(each() is not None for each in taken))
        return scatter(self, *args, **options)

    with (
        job() as (model, _),
        mock.patch.object(Reduction, "start", noting),
        mock.patch.object(ProcessGroupTransport, "reduce_scatter", looking),
    ):
        loss(model).backward()
    assert len(taken) == 2 * BLOCKS and left == [0] * BLOCKS


@pytest.mark.parametrize(("reduce", "itemsize"), [(None, 4), (torch.float64, 8)])
def test_unsynchronised_gradients_are_unsharded(reduce: torch.dtype | None, itemsize: int) -> None:
    """Contract ME-11: the price of not reducing, in the reduce dtype; given back by the reduction."""
    with job(mp_policy=MixedPrecisionPolicy(reduce_dtype=reduce)) as (model, _):
        model.set_requires_gradient_sync(False)
        for _ in range(2):
            loss(model).backward()
            assert close(held(), 4 * SHARD * BLOCKS + UNIT * itemsize * BLOCKS)
        model.set_requires_gradient_sync(True)
        loss(model).backward()
        assert close(held(), 2 * 4 * SHARD * BLOCKS)


def test_partial_sums_are_shards() -> None:
    """Contract ME-09, ME-12: one more shard in the reduce dtype per unit until the all-reduce; then none."""
    with loopback.job(RANKS):
        model = sharded(blocks(), mesh=mesh(2), mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float64))
        shards = 4 * (UNIT // 2) * BLOCKS
        model.set_requires_all_reduce(False)
        for _ in range(2):
            loss(model).backward()
            assert close(held(), shards + 2 * shards)
        model.set_requires_all_reduce(True)
        loss(model).backward()
        assert close(held(), 2 * shards)


def test_another_dimension_passes_through_a_staging_buffer() -> None:
    """Contract ME-13: one unit's worth more than along the first dimension, only while it is gathered."""
    with job(shard_placement_fn=lambda parameter: Shard(parameter.ndim - 1), reshard_after_forward=True) as (
        model,
        moments,
    ):
        loss(model)
        assert close(max(moments), 4 * SHARD * BLOCKS + 3 * 4 * UNIT)
        assert close(held(), 4 * SHARD * BLOCKS)


@world(2)
def test_originals_are_freed_unit_by_unit() -> None:
    """Contract ME-15: after each call the parameters it took exist as shards only."""
    model = blocks()
    for block in model:
        storage = block.weight.untyped_storage()
        watched = storage._weak_ref()  # of the memory, not of the parameter: a view would keep it
        del storage
        fully_shard(block)
        assert torch.UntypedStorage._expired(watched)
        torch.UntypedStorage._free_weak_ref(watched)
        assert block.weight.to_local().untyped_storage().nbytes() == 4 * WIDTH * WIDTH // dist.get_world_size()
