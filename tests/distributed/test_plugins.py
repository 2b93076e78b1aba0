"""Collectives that a user brings."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
import torch.distributed as dist
from bed import world
from bed.recorders import TorchCalls
from distributed.test_fully_shard import Stack, assert_at_rest, assert_gradients, loss_of, sharded

from unshard import AllGather, MixedPrecisionPolicy, ReduceScatter, fully_shard


class Counting:
    """Allocates from a pool of its own and notes what it was asked for."""

    def __init__(self) -> None:
        self.allocated: list[tuple[tuple[int, ...], torch.dtype]] = []
        self.calls = 0

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        self.allocated.append((tuple(size), dtype))
        poison = float("nan") if dtype.is_floating_point else 99
        return torch.full(tuple(size), poison, dtype=dtype, device=device)


class ToyGather(Counting, AllGather):
    def __call__(self, output_tensor, input_tensor, group, async_op=False):
        self.calls += 1
        size = output_tensor.numel() // dist.get_world_size(group)
        start = output_tensor.data_ptr() + dist.get_rank(group) * size * output_tensor.element_size()
        assert input_tensor.data_ptr() == start and input_tensor.numel() == size
        return dist.all_gather_into_tensor(output_tensor, input_tensor, group=group, async_op=async_op)


class ToyReduceScatter(Counting, ReduceScatter):
    def __call__(self, output_tensor, input_tensor, group, op, async_op=False):
        self.calls += 1
        dist.reduce_scatter_tensor(output_tensor, input_tensor, op=op, group=group)
        return None  # done at once


class ToyMany(ToyGather):
    def gather_many(self, outputs, inputs, group):
        self.calls += 1
        for output, piece in zip(outputs, inputs, strict=True):
            dist.all_gather_into_tensor(output, piece.clone(), group=group)


IGNORED = pytest.mark.filterwarnings("ignore:.*(all_gather_into_tensor|reduce_scatter_tensor).*:FutureWarning")


@IGNORED
@pytest.mark.parametrize("policy", [None, MixedPrecisionPolicy(reduce_dtype=torch.float64)], ids=["plain", "mixed"])
@world(1, 2, 3)
def test_a_users_collectives(policy: MixedPrecisionPolicy | None) -> None:
    """Contract COM-01 to COM-06, API-11, API-12: one flat buffer in, one flat buffer out, in place."""
    model, reference = sharded(mp_policy=policy), Stack()
    gather, scatter = ToyGather(), ToyReduceScatter()
    block = model.blocks[1]
    block.set_custom_all_gather(gather)
    block.set_custom_reduce_scatter(scatter)
    for _ in range(2):
        loss_of(model).backward()
        loss_of(reference).backward()
        assert_gradients(model, reference)
    assert_at_rest(model)
    assert (gather.calls, scatter.calls) == (4, 2)
    size = dist.get_world_size()
    piece = 2 * -(-132 // size) * 133
    assert gather.allocated == [((size * piece,), torch.float32)] * 4
    reduce = torch.float32 if policy is None else torch.float64
    assert scatter.allocated == [((size * piece,), reduce), ((piece,), reduce)] * 2


@IGNORED
@world(2)
def test_a_plugin_for_many_tensors_gets_the_memory_itself() -> None:
    """One call for the whole unit; large parameters are copied nowhere."""
    model, reference = sharded(), Stack()
    gather = ToyMany()
    model.blocks[0].set_custom_all_gather(gather)
    loss_of(model).backward()
    loss_of(reference).backward()
    assert_gradients(model, reference)
    assert gather.calls == 2 and gather.allocated == []
    with torch.no_grad(), TorchCalls() as calls:
        loss_of(model)
    assert calls.counts["aten.split_with_sizes_copy"] == 4  # biases and the head, as without a plug-in


@IGNORED
@world(2)
def test_plugins_can_be_installed_between_steps() -> None:
    model, reference = sharded(), Stack()
    loss_of(model).backward()
    model.blocks[2].set_custom_all_gather(ToyGather())
    loss_of(model, 1).backward()
    for seed in range(2):
        loss_of(reference, seed).backward()
    assert_gradients(model, reference)
    with pytest.raises(ValueError, match="AllGather"):
        model.set_custom_all_gather(ToyReduceScatter())
    with pytest.raises(ValueError, match="ReduceScatter"):
        model.set_custom_reduce_scatter(object())
    assert fully_shard.state(model.blocks[2]).wiring.plugins[0] is not None
