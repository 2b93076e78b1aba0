"""Several modules as one unit: `fully_shard([a, b])`."""

from __future__ import annotations

import pytest
import torch
from bed import world
from bed.module_lists import Model, sharded
from bed.recorders import Collectives
from bed.stack import assert_at_rest, assert_gradients, batch, loss_of, units
from torch import nn
from torch.utils.checkpoint import checkpoint

from unshard import FSDPModule, MixedPrecisionPolicy, fully_shard


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("reshard", [None, True, False])
@world(2, 3)
def test_one_gather_and_one_reduction_for_the_list(reshard: bool | None, tied: bool) -> None:
    """Contract GRP-01, GRP-03, GRP-07, FS-04."""
    model, reference = sharded(Model(tied), reshard_after_forward=reshard), Model(tied)
    assert isinstance(model.norm, FSDPModule) and isinstance(model.head, FSDPModule)
    assert fully_shard.state(model.norm) is fully_shard.state(model.head)
    for _ in range(2):
        with Collectives() as calls:
            loss_of(model).backward()
        assert len(calls.of("gather")) == (3 if reshard is False else 6)
        assert len(calls.of("reduce_scatter")) == 3
        loss_of(reference).backward()
        assert_gradients(model, reference)
        assert_at_rest(model)
    assert "norm, head, extra" in {unit.name for unit in units(model)}


@world(2)
def test_inner_modules_of_listed_ones_are_dropped() -> None:
    """Contract GRP-02."""
    model = Model()
    fully_shard([model.body, model.body.blocks[0], model.norm])
    assert isinstance(model.body, FSDPModule) and not isinstance(model.body.blocks[0], FSDPModule)
    fully_shard(model)
    loss_of(model).backward()
    assert_at_rest(model)


@pytest.mark.parametrize("reshard", [True, False])
@world(2)
def test_a_loss_in_chunks_after_the_root_has_ended(reshard: bool) -> None:
    """Contract GRP-05, GRP-06: the head does not run in the root's forward, then alone, several times."""
    model, reference = sharded(Model(), reshard_after_forward=reshard), Model()
    model.use_head = reference.use_head = False
    for _ in range(2):
        for each in (model, reference):
            hidden = each(batch())
            sum(each.head(chunk).square().mean() for chunk in hidden.chunk(3)).backward()
        assert_gradients(model, reference)
        assert_at_rest(model)


@pytest.mark.parametrize("reentrant", [True, False])
@world(2)
def test_checkpointing_and_casts(reentrant: bool) -> None:
    """Contract GRP-04, GRP-07, MP-28."""
    seen = []
    model, reference = Model(), Model().double()
    for each in (model.norm, model.head, model.extra):
        each.register_forward_pre_hook(lambda module, args: seen.append(args[0].dtype))
    sharded(model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.float64))
    x, y = batch().requires_grad_(), batch().double().requires_grad_()
    checkpoint(model, x, use_reentrant=reentrant).square().mean().backward()
    reference(y).square().mean().backward()
    assert set(seen) == {torch.float64}
    torch.testing.assert_close(x.grad, y.grad.float())
    assert_at_rest(model)


@world(2)
def test_a_list_is_no_root() -> None:
    """Contract LZY-04, ARG-15."""
    layers = (nn.Linear(3, 3), nn.Linear(3, 3))
    assert fully_shard(layers) is layers
    with pytest.raises(RuntimeError, match="cannot be the root"):
        layers[0](torch.ones(2, 3))
    with pytest.raises(ValueError, match="empty list"):
        fully_shard([])
    with pytest.raises(ValueError, match="or a list of them"):
        fully_shard([nn.Linear(1, 1), "head"])
