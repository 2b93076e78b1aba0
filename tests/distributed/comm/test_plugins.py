"""Collectives that a user brings."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from bed import world
from bed.recorders import TorchCalls
from bed.stack import Stack, assert_at_rest, assert_gradients, loss_of, sharded
from bed.user_collectives import ToyGather, ToyMany, ToyReduceScatter, ignore_old_names

from unshard import MixedPrecisionPolicy, fully_shard


@ignore_old_names
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


@ignore_old_names
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


@ignore_old_names
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
    assert fully_shard.state(model.blocks[2]).transport_settings.plugins[0] is not None
