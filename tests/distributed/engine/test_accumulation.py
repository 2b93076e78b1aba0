"""Gradients over several backwards: what is kept, what is sent, and that the sum is right."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from bed import world
from bed.recorders import Collectives
from bed.stack import Stack, assert_at_rest, assert_gradients, loss_of, mesh, sharded, units
from torch import nn
from torch.distributed.tensor import DTensor

from unshard import MixedPrecisionPolicy, fully_shard
from unshard.engine.states import GradState

MODES = ("reduced", "local", "partial")


def choose(model: nn.Module, mode: str) -> None:
    """How the next backward treats its gradients."""
    model.set_requires_gradient_sync(mode != "local")
    if mode == "partial":
        model.set_requires_all_reduce(False)


def assert_sums(model: nn.Module, reference: nn.Module) -> None:
    """As the parity tests compare: elements that cancel out in a sum of several steps are rounding errors only."""
    for mine, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        assert (mine.grad.full_tensor() - theirs.grad).norm() <= 1e-5 * theirs.grad.norm() != 0


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("order", ["local reduced", "reduced local reduced", "local local reduced reduced"])
@world(1, 2, 3, 4)
def test_parity_of_every_order_of_modes(order: str, set_to_none: bool) -> None:
    """Contract ACC-01, ACC-02, ACC-04, ACC-09: with and without communication, mixed, over two iterations."""
    model, reference = sharded(), Stack()
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, reference)]
    for iteration in range(2):
        for number, mode in enumerate(order.split()):
            choose(model, mode)
            seed = 7 * iteration + number
            loss_of(model, seed + dist.get_rank()).backward()
            for rank in range(dist.get_world_size()):
                (loss_of(reference, seed + rank) / dist.get_world_size()).backward()
        assert_sums(model, reference)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none)
    assert_at_rest(model)


@pytest.mark.parametrize("policy", [None, MixedPrecisionPolicy(reduce_dtype=torch.float64)], ids=["plain", "mixed"])
@pytest.mark.parametrize("replicas", [1, 2, 4])
@world(4)
def test_parity_of_modes_with_replicas(replicas: int, policy: MixedPrecisionPolicy | None) -> None:
    """Contract ACC-07, ACC-09, CM-15, CM-16: unsharded, partial and reduced gradients in any order."""
    model, reference = sharded(mesh=mesh(replicas), mp_policy=policy), Stack()
    for number, mode in enumerate(("local", "partial", "local", "partial", "reduced", "partial", "reduced")):
        choose(model, mode)
        with Collectives() as calls:
            loss_of(model, number).backward()
        assert len(calls.of("reduce_scatter")) == (4 if replicas < 4 and mode != "local" else 0)
        assert len(calls.of("all_reduce")) == (4 if replicas > 1 and mode == "reduced" else 0)
        loss_of(reference, number).backward()
        if mode == "reduced":
            assert_sums(model, reference)
    assert_at_rest(model)


@world(2)
def test_what_is_kept_between_backwards() -> None:
    """Contract ACC-02, ACC-03: no gradient on the parameters, which rest; unsharded gradients inside the unit."""
    model = sharded()
    model.set_requires_gradient_sync(False)
    for _ in range(2):
        loss_of(model).backward()
        assert all(isinstance(each, DTensor) and each.grad is None for each in model.parameters())
        for unit in units(model):
            assert unit.param_groups[0].gradients.state is GradState.LOCAL and not unit.param_groups[0].held
            sums = unit.param_groups[0].gradients.unreduced.sums()
            assert [tuple(each.shape) for each in sums.values()] == [param.sharding.shape for param in unit.params]


@world(2)
def test_an_optimizers_zero_grad_does_not_reach_what_is_kept() -> None:
    """Contract ACC-06, as documented: that is for the module's `zero_grad` or `reset_iter_state`, API-03."""
    model, reference = sharded(), Stack()
    model.set_requires_gradient_sync(False)
    loss_of(model, 0).backward()
    torch.optim.SGD(model.parameters()).zero_grad()
    model.set_requires_gradient_sync(True)
    loss_of(model, 1).backward()
    for seed in (0, 1):
        loss_of(reference, seed).backward()
    assert_gradients(model, reference)


@world(4)
def test_reset_drops_partial_sums() -> None:
    """Contract API-03, ACC-06."""
    model, reference = sharded(mesh=mesh(2)), Stack()
    model.set_requires_all_reduce(False)
    loss_of(model, 5).backward()
    assert {unit.param_groups[0].gradients.state for unit in units(model)} == {GradState.PARTIAL}
    model.reset_iter_state()
    model.set_requires_all_reduce(True)
    loss_of(model).backward()
    loss_of(reference).backward()
    assert_gradients(model, reference)


@pytest.mark.parametrize("recurse", [True, False])
@world(2, 3)
def test_some_modules_synchronise_and_others_do_not(recurse: bool) -> None:
    """Contract ACC-08, API-05, API-38: flags belong to modules; without `recurse` to one module only."""
    model, reference = sharded(), Stack()
    chosen = model if not recurse else model.blocks[1]
    for seed in range(3):
        chosen.set_requires_gradient_sync(seed == 2, recurse=recurse)
        with Collectives() as calls:
            loss_of(model, seed).backward()
        assert len(calls.of("reduce_scatter")) == (4 if seed == 2 else 3)
        kept = model.head if not recurse else model.blocks[1].first
        assert (kept.weight.grad is None) == (seed < 2)
        assert model.blocks[0].first.weight.grad is not None
        loss_of(reference, seed).backward()
    assert_gradients(model, reference)


@pytest.mark.parametrize(
    ("forward", "backward", "gathers"),
    [(True, True, 3 * 8), (False, True, 3 * 4), (False, False, 4)],
    ids=["freed in between", "kept for backward", "kept for all"],
)
@world(2)
def test_gathers_of_an_accumulation(forward: bool, backward: bool, gathers: int) -> None:
    """Contract ACC-10, CM-27: two per unit and backward, one, or one for all of them."""
    model, reference = sharded(reshard_after_forward=forward), Stack()
    loss_of(model).backward()
    model.zero_grad()
    with Collectives() as calls:
        for seed in range(3):
            model.set_requires_gradient_sync(seed == 2)
            model.set_reshard_after_backward(backward or seed == 2)
            loss_of(model, seed).backward()
    assert (len(calls.of("gather")), len(calls.of("reduce_scatter"))) == (gathers, 4)
    for seed in range(3):
        loss_of(reference, seed).backward()
    assert_gradients(model, reference)
    assert_at_rest(model)


@pytest.mark.parametrize("reshard", [True, False])
@world(2, 4)
def test_one_forward_one_backward_schedule(reshard: bool) -> None:
    """Contract ACC-11, API-04; ACC-12 improved: after every backward what was reduced is there.

    Two micro-batches ahead, as a stage of a pipeline does.
    """
    model, reference = sharded(reshard_after_forward=reshard), Stack()
    for _ in range(2):
        waiting = [loss_of(model, 0), loss_of(model, 1)]
        for done in range(4):
            last = done == 3
            model.set_is_last_backward(last)
            model.set_requires_gradient_sync(last)
            model.set_reshard_after_backward(last)
            waiting.pop(0).backward()
            if done < 2:
                waiting.append(loss_of(model, done + 2))
        for seed in range(4):
            loss_of(reference, seed).backward()
        assert_gradients(model, reference)
        assert_at_rest(model)


@world(2)
def test_gradients_are_there_after_a_backward_that_is_not_the_last() -> None:
    """Contract ACC-12 improved: nothing is left in flight."""
    model, reference = sharded(), Stack()
    losses = [loss_of(model, seed) for seed in range(2)]
    for seed, loss in enumerate(losses):
        model.set_is_last_backward(seed == 1)
        loss.backward()
        loss_of(reference, seed).backward()
        assert {unit.param_groups[0].gradients.state for unit in units(model)} == {GradState.REDUCED}
        for module in (model, *model.blocks):
            module.reshard()
        assert_gradients(model, reference)


@world(2)
def test_low_precision_gradients_add_up_in_the_reduce_dtype() -> None:
    """Contract ACC-05, ACC-13: equal, bit by bit, to bf16 gradients that a reference adds up in fp32."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    torch.manual_seed(0)
    layer, sums = nn.Linear(12, 8), None
    reference = nn.Linear(12, 8).bfloat16()
    reference.load_state_dict({name: value.bfloat16() for name, value in layer.state_dict().items()})
    fully_shard(layer, mp_policy=policy)
    for seed in range(5):
        x = torch.randn(4, 12, generator=torch.Generator().manual_seed(seed))
        layer.set_requires_gradient_sync(seed == 4)
        layer(x).float().square().mean().backward()
        reference(x.bfloat16()).float().square().mean().backward()
        new = [each.grad.float() for each in reference.parameters()]
        sums = new if sums is None else [old + more for old, more in zip(sums, new, strict=True)]
        reference.zero_grad()
    for mine, expected in zip(layer.parameters(), sums, strict=True):
        assert torch.equal(mine.grad.full_tensor(), expected)
