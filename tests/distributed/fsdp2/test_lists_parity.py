"""Lists of modules as one unit, against the same model without lists: parity, chunked losses, accumulation."""

from __future__ import annotations

import pytest
import torch
from bed import world
from bed.models import Case, case
from bed.module_lists import Model, sharded
from bed.parity import check_parity
from bed.recorders import Collectives
from bed.stack import assert_at_rest, assert_gradients, batch, loss_of
from torch import nn

from unshard import MixedPrecisionPolicy, fully_shard


def _transformer(model: nn.Module) -> None:
    """The first two blocks are one unit; so are what comes before the blocks and after them."""
    fully_shard([model.blocks[0], model.blocks[1]])
    fully_shard(model.blocks[2])
    fully_shard([model.tokens, model.norm, model.head])
    fully_shard(model)


def _tied(model: nn.Module) -> None:
    """Both users of the tied weight, 29 rows, in one list."""
    fully_shard([model.tokens, model.head])
    fully_shard(list(model.hidden))
    fully_shard(model)


def _uneven(model: nn.Module) -> None:
    fully_shard([*model.layers, model.out])
    fully_shard(model)


SHARD = {"transformer": _transformer, "tied": _tied, "uneven": _uneven}


@pytest.mark.parametrize("each", [case(name) for name in SHARD], ids=str)
@world(1, 2, 3, 4)
def test_parity_of_lists(each: Case) -> None:
    """Contract GRP-01, GRP-07, SHP-03: steps of AdamW like the unsharded model."""
    check_parity(each, SHARD[each.name], steps=4)


def chunked(model: Model, seed: int, chunks: int = 3) -> torch.Tensor:
    """The head runs after the root, chunk by chunk."""
    hidden = model(batch(seed))
    return sum(model.head(chunk).square().mean() for chunk in hidden.chunk(chunks))


def headless(tied: bool = False) -> Model:
    model = Model(tied)
    model.use_head = False
    return model


@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize("tied", [False, True])
@world(2, 3)
def test_a_chunked_loss_without_synchronisation(tied: bool, reshard: bool) -> None:
    """Contract GRP-06, GRP-09: two micro-batches, the first not reduced, each with a loss in chunks."""
    model, reference = sharded(headless(tied), reshard_after_forward=reshard), headless(tied)
    for _ in range(2):
        for seed in range(2):
            model.set_requires_gradient_sync(seed == 1)
            chunked(model, seed).backward()
            chunked(reference, seed).backward()
            assert (model.head.weight.grad is None) == (seed == 0)
        assert_gradients(model, reference)
        assert_at_rest(model)
        model.zero_grad()
        reference.zero_grad()


@pytest.mark.parametrize("policy", [None, MixedPrecisionPolicy(param_dtype=torch.float64)], ids=["plain", "mixed"])
@world(2)
def test_a_chunk_loop_with_its_own_backwards(policy: MixedPrecisionPolicy | None) -> None:
    """Contract GRP-06: every chunk is backpropagated on its own; gradients add up."""
    model, reference = sharded(headless(), mp_policy=policy), headless()
    for each in (model, reference):
        hidden = each(batch())
        leaf = hidden.detach().requires_grad_()
        for chunk in leaf.chunk(3):
            each.head(chunk).square().mean().backward()
        hidden.backward(leaf.grad)
    assert_gradients(model, reference, rtol=1e-4, atol=1e-6)
    assert_at_rest(model)


@world(2)
def test_a_list_that_is_kept_unsharded_for_the_chunks() -> None:
    """Contract GRP-08: no further gather while the switches are off; `reshard()` frees it."""
    model, reference = sharded(headless()), headless()
    chunked(model, 0).backward()
    chunked(reference, 0).backward()
    hidden = model(batch(1))
    model.head.set_reshard_after_forward(False)
    model.head.set_reshard_after_backward(False)
    model.head.unshard()
    leaf = hidden.detach().requires_grad_()
    with Collectives() as calls:
        for chunk in leaf.chunk(3):
            model.head(chunk).square().mean().backward()
    assert calls.of("gather") == []
    model.head.reshard()
    model.head.set_reshard_after_forward(True)
    model.head.set_reshard_after_backward(True)
    hidden.backward(leaf.grad)
    chunked(reference, 1).backward()
    assert_gradients(model, reference, rtol=1e-4, atol=1e-6)
    assert_at_rest(model)


@pytest.mark.parametrize("reshard", [True, False])
@world(2)
def test_one_unit_is_not_a_list(reshard: bool) -> None:
    """Contract GRP-10: a single module that runs twice is freed after each run, or kept, as it was asked."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(132, 132), nn.Tanh())
    model.append(model[0])
    fully_shard(model[0], reshard_after_forward=reshard)
    fully_shard(model)
    with Collectives() as calls:
        loss_of(model)
    assert len(calls.of("gather")) == (2 if reshard else 1)
