"""Parameters that are frozen and unfrozen while training, against the unsharded model."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from bed import world
from bed.recorders import Collectives
from bed.stack import Stack, assert_at_rest, assert_gradients, batch, loss_of, mesh, sharded

from unshard import MixedPrecisionPolicy

PHASES = (
    "blocks.0 blocks.1 blocks.2",  # only the head
    "blocks.0.first blocks.2",
    "",
    "blocks.1.second.bias head.weight",
    "head blocks.2 blocks.1",  # only the first block
)


def freeze(model: torch.nn.Module, names: str) -> None:
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not any(name.startswith(each) for each in names.split()))


@pytest.mark.parametrize("policy", [None, MixedPrecisionPolicy(reduce_dtype=torch.float64)], ids=["plain", "mixed"])
@world(1, 2, 3, 4)
def test_parity_of_switches_while_training(policy: MixedPrecisionPolicy | None) -> None:
    """Contract FRZ-01 to FRZ-06: entire units and some of their parameters, frozen from the start or later."""
    for reshard in (None, True, False):  # in one job, which plans its operations on DTensors once
        switch_while_training(policy, reshard)


def switch_while_training(policy: MixedPrecisionPolicy | None, reshard: bool | None) -> None:
    model, reference = Stack(), Stack()
    for each in (model, reference):
        freeze(each, PHASES[0])
    sharded(model, mp_policy=policy, reshard_after_forward=reshard)
    size = dist.get_world_size()
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1, foreach=True) for each in (model, reference)]
    for step, names in enumerate((*PHASES, PHASES[0])):
        for each, optimizer in zip((model, reference), optimizers, strict=True):
            freeze(each, names)
            optimizer.zero_grad()
        loss_of(model, step + dist.get_rank()).backward()
        for rank in range(size):
            (loss_of(reference, step + rank) / size).backward()
        for mine, theirs in zip(model.parameters(), reference.parameters(), strict=True):
            assert (mine.grad is None) == (theirs.grad is None) == (not mine.requires_grad)
            if theirs.grad is not None:
                assert (mine.grad.full_tensor() - theirs.grad).norm() <= 1e-5 * theirs.grad.norm()
        assert_at_rest(model)
        for optimizer in optimizers:
            optimizer.step()
    with torch.no_grad():
        torch.testing.assert_close(model(batch()), reference(batch()), rtol=1e-4, atol=1e-5)


@world(4)
def test_frozen_parts_with_replicas() -> None:
    """Contract FRZ-02, FRZ-05, CM-14: only what has a gradient is reduced, over shards and over replicas."""
    model, reference = sharded(mesh=mesh(2)), Stack()
    for names, reductions in (("blocks.0 blocks.1", 2), ("", 4), ("head blocks.2", 2)):
        for each in (model, reference):
            freeze(each, names)
            each.zero_grad()
        with Collectives() as calls:
            loss_of(model).backward()
        assert len(calls.of("reduce_scatter")) == len(calls.of("all_reduce")) == reductions
        loss_of(reference).backward()
        assert_gradients(model, reference)


@world(2)
def test_freezing_between_unsynchronised_backwards() -> None:
    """Contract FRZ-05, ACC-09: what a frozen parameter has collected is still reduced."""
    model, reference = sharded(), Stack()
    for seed, names in enumerate(("", "blocks.1", "head")):
        model.set_requires_gradient_sync(seed == 2)
        for each in (model, reference):
            freeze(each, names)
            loss_of(each, seed).backward()
    assert_gradients(model, reference)
    assert_at_rest(model)
