"""What happens around and inside the blocks of `unshard.step` and `unshard.inference`."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from bed import world
from bed.boom import Boom, boom
from bed.branches import quick
from bed.recorders import Collectives
from bed.stack import Stack, assert_at_rest, assert_gradients, batch, loss_of, sharded, units
from bed.uneven import Towers
from bed.wrapped import wrap
from torch import nn

import unshard
from unshard import MixedPrecision, MixedPrecisionPolicy, fully_shard
from unshard.engine.side_stream import recording_step
from unshard.errors import ArgumentError, CollectiveError, OrderError, StateError, UnsupportedError

BLOCKS = 3


def rank_work(rank: int, number: int) -> list[int]:
    """Seeds of the micro-batches of a rank: 1 for the first rank, 2 for the second, ..."""
    return [100 * number + 10 * rank + each for each in range(rank + 1)]


def accumulate(model: nn.Module, reference: nn.Module, number: int, **options: Any) -> Any:
    """A step with the default weight: the gradient is that of the mean over all micro-batches."""
    with unshard.step(model, **options) as step:
        for seed in rank_work(dist.get_rank(), number):
            step.backward(loss_of(model, seed))
    ranks = dist.get_world_size()
    seeds = [seed for rank in range(ranks) for seed in rank_work(rank, number)]
    for seed in seeds:
        (loss_of(reference, seed) / len(seeds)).backward()
    return step


# -- collectives ---------------------------------------------------------------------------------------------


@world(3)
def test_kept_units_issue_no_collective_inside_the_block() -> None:
    model, reference = sharded(), Stack()
    for number in range(3):
        inside = Collectives()
        with Collectives() as all_calls, unshard.step(model, units="keep") as step:
            with inside:
                for seed in rank_work(dist.get_rank(), number):
                    step.backward(loss_of(model, seed))
                with torch.no_grad():
                    loss_of(model)
        assert not inside.calls
        if number:  # in the first step, the ranks also compare how they run the units
            assert len(all_calls.of("gather")) == len(all_calls.of("reduce_scatter")) == BLOCKS + 1
            assert len(all_calls.of("all_reduce")) == 1  # losses, weights and flags
        for rank in range(3):
            for seed in rank_work(rank, number):
                (loss_of(reference, seed) / 6).backward()
        assert_gradients(model, reference)
        model.zero_grad()
        reference.zero_grad()
    assert_at_rest(model)


@pytest.mark.parametrize("known", [False, True])
@world(3)
def test_followed_units_issue_the_collectives_of_the_longest_rank(known: bool) -> None:
    model, reference = sharded(), Stack()
    for number in range(3):
        with Collectives() as calls:
            accumulate(model, reference, number, units="follow", backwards=dist.get_rank() + 1 if known else None)
        if number:  # the first step also learns the order of the units
            rounds = dist.get_world_size()  # the last rank has as many micro-batches
            messages = 1 if known else 0  # the numbers of micro-batches
            # The root is kept: it contains the others.
            assert len(calls.of("gather")) == 1 + 2 * BLOCKS * rounds + messages
            assert len(calls.of("reduce_scatter")) == 1 + BLOCKS * rounds
            assert len(calls.of("all_reduce")) == (1 if known else rounds + 1)
        assert_gradients(model, reference)
        model.zero_grad()
        reference.zero_grad()
    assert_at_rest(model)


@world(2)
def test_reductions_of_a_known_last_backward_run_inside_it() -> None:
    model, reference = sharded(), Stack()
    inside = Collectives()
    with unshard.step(model, units="keep", backwards=2) as step:
        step.backward(loss_of(model, dist.get_rank()))
        with inside:
            step.backward(loss_of(model, 2 + dist.get_rank()))
    assert len(inside.of("reduce_scatter")) == BLOCKS + 1
    for seed in range(4):
        (loss_of(reference, seed) / 4).backward()
    assert_gradients(model, reference)


@pytest.mark.parametrize("units_, backwards", [("keep", None), ("keep", 2), ("follow", None), ("follow", 2)])
@world(2)
def test_units_that_run_twice_and_out_of_order(units_: str, backwards: int | None) -> None:
    """Followed units then need more rounds, with the same result."""
    model, reference = sharded(), Stack()

    def loss(of: Any, rank: int) -> torch.Tensor:
        x = batch(rank)
        for number in (0, 0, 2, 1) if rank else (0, 0, 1, 2):
            x = of.blocks[number](x)
        return x.square().mean()

    for _ in range(2):
        with unshard.step(model, units=units_, backwards=backwards) as step:
            step.backward(loss(model, dist.get_rank()))
            step.backward(loss(model, dist.get_rank()))
        for rank in range(2):
            (2 * loss(reference, rank) / 4).backward()
        assert_gradients(model, reference)
        model.zero_grad()
        reference.zero_grad()


@world(2)
def test_units_that_stay_unsharded_are_gathered_again() -> None:
    """After an optimizer step, what they hold is out of date."""
    model, reference = sharded(reshard_after_forward=False), Stack()
    model.set_reshard_after_backward(False)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, reference)]
    for each, optimizer in zip((model, reference), optimizers, strict=True):
        loss_of(each).backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            loss_of(each)
    if dist.get_rank():
        model.reshard()
    accumulate(model, reference, 1)
    assert_gradients(model, reference)


@world(2, 3)
def test_units_that_are_unfrozen_between_steps() -> None:
    """On a rank without work as well, which never runs them."""
    for units_ in ("keep", "follow"):
        model, reference = sharded(), Stack()
        for number in range(3):
            for each in (model, reference):
                each.blocks[1].requires_grad_(number == 1)
            with unshard.step(model, units=units_) as step:
                if dist.get_rank() or number == 0:
                    step.backward(loss_of(model, number))
            loss_of(reference, number).backward()
            assert_gradients(model, reference)
            model.zero_grad()
            reference.zero_grad()


@world(2)
def test_a_caught_backward_counts_neither_its_loss_nor_its_weight() -> None:
    model = sharded()
    with pytest.raises(StateError, match="cannot go on"):
        with unshard.step(model) as step:
            loss = loss_of(model)
            loss.register_hook(boom)
            with pytest.raises(Boom):
                step.backward(loss, weight=5)


@world(2)
def test_numbers_of_numpy() -> None:
    model = sharded()
    with unshard.step(model, memory=1e9) as step:
        step.backward(loss_of(model), weight=np.int64(3))
        step.backward(loss_of(model), weight=np.float32(2))
    assert step.weight.item() == 10


@world(2)
def test_the_wrapper_adds_up_in_the_reduce_dtype() -> None:
    """Without `unshard.step`, it accumulates in the compute dtype, as PyTorch's does."""
    policy = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for originals in (False, True):
        model = wrap(nn.Linear(3, 3), [], mixed_precision=policy, use_orig_params=originals)
        with unshard.step(model) as step:
            for _ in range(2):
                step.backward(model(torch.ones(2, 3)).sum())
            sums = model._state.unit.param_groups[0].gradients.unreduced.sums()
            assert {each.dtype for each in sums.values()} == {torch.float32}


class Around(nn.Module):
    """A unit that runs before and after another one, on inputs without a gradient."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.outer = nn.Linear(4, 4), nn.Linear(3, 4)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        return self.inner(self.outer(image)) + self.outer(image + 1)


@world(2, 3)
def test_gradients_that_come_after_the_reduction_of_their_unit() -> None:
    """The backward of the outer unit begins before that of the inner one, and ends after it."""
    model, reference = Around().double(), Around().double()
    fully_shard(model.inner)
    fully_shard(model.outer)
    fully_shard(model)
    late = []
    for _ in range(2):
        with unshard.step(model, units="follow") as step:
            for seed in range(dist.get_rank() + 1):
                step.backward(model(image_of(dist.get_rank(), seed).double()).square().sum())
        seeds = [(rank, seed) for rank in range(dist.get_world_size()) for seed in range(rank + 1)]
        for rank, seed in seeds:
            (reference(image_of(rank, seed).double()).square().sum() / len(seeds)).backward()
        assert_gradients(model, reference)
        late.append({unit.name for unit in step._plan.late})
        model.zero_grad()
        reference.zero_grad()
    assert late == [{"outer"}, {"outer"}]


def image_of(rank: int, seed: int) -> torch.Tensor:
    return torch.randn(5, 3, generator=torch.Generator().manual_seed(10 * rank + seed))


@world(2)
def test_memory_decides_which_units_are_kept() -> None:
    model = sharded()
    one = sum(each.numel() for each in Stack().blocks[0].parameters()) * 8  # parameter and sum, in fp32
    head = sum(each.numel() for each in Stack().head.parameters()) * 8
    with unshard.step(model, memory=head + one) as step:
        step.backward(loss_of(model))
    ways = [line.split()[1] for line in step.explain().splitlines()[1:-1]]
    assert ways == ["keep", "keep", "follow", "follow"]
    with (
        pytest.raises(ArgumentError, match="chose different ways"),
        unshard.step(model, memory=10**9 * dist.get_rank()),
    ):
        pass


# -- weights -------------------------------------------------------------------------------------------------


@world(2)
def test_no_rank_has_work() -> None:
    model = sharded()
    with unshard.step(model) as step:
        pass
    assert step.weight.item() == 0 and step.loss.item() == 0
    assert all(parameter.grad is None for parameter in model.parameters())


@world(2)
def test_a_weight_that_is_not_a_number_shows() -> None:
    model = sharded()
    with unshard.step(model) as step:
        step.backward(loss_of(model), weight=torch.tensor(float("nan") if dist.get_rank() else 1.0))
    assert step.loss.isnan() and step.weight.isnan()
    assert all(parameter.grad.full_tensor().isnan().all() for parameter in model.parameters())


@world(2)
def test_weights_of_zero_give_zero_gradients() -> None:
    model = sharded()
    with unshard.step(model) as step:
        step.backward(0 * loss_of(model), weight=torch.tensor(0))
    assert step.weight.item() == 0 and step.loss.item() == 0
    assert all(not parameter.grad.full_tensor().any() for parameter in model.parameters())


@world(2)
def test_weights_may_be_tensors_and_losses_of_low_precision() -> None:
    model, reference = sharded(mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32)), Stack()
    with unshard.step(model) as step:
        step.backward(300 * loss_of(model, dist.get_rank()), weight=torch.tensor([100 + 100 * dist.get_rank()]))
    assert step.weight.item() == 300
    for rank in range(2):
        loss_of(reference, rank).backward()
    assert_gradients(model, reference, rtol=0.05, atol=0.01)


@world(2)
def test_an_overflow_on_one_rank_skips_the_step_everywhere() -> None:
    model, reference = sharded(), Stack()
    scaler, theirs = torch.amp.GradScaler("cpu", init_scale=1024.0), torch.amp.GradScaler("cpu", init_scale=1024.0)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, reference)]
    for number in range(3):
        bad = float("inf") if number == 1 else 1.0
        with unshard.step(model, scaler=scaler) as step:
            if dist.get_rank() == 0:  # the other rank has no work in any step
                step.backward(loss_of(model, number) * bad, weight=2)
                step.backward(loss_of(model, 10 + number), weight=3)
        for seed, factor in ((number, bad), (10 + number, 1.0)):
            theirs.scale(loss_of(reference, seed) * factor / 5).backward()
        for each, optimizer in zip((scaler, theirs), optimizers, strict=True):
            each.step(optimizer)
            each.update()
            optimizer.zero_grad()
        assert scaler.get_scale() == theirs.get_scale() == (1024.0 if number < 1 else 512.0)
    for mine, other in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(mine.full_tensor(), other)


# -- refusals ------------------------------------------------------------------------------------------------


def direct(model: Any, step: Any) -> None:
    loss_of(model).backward()


def optimize(model: Any, step: Any) -> None:
    torch.optim.SGD(model.parameters(), lr=0.1).step()


def no_synchronization(model: Any, step: Any) -> None:
    model.set_requires_gradient_sync(False)


def nest(model: Any, step: Any) -> None:
    with unshard.step(model):
        pass


def nest_inference(model: Any, step: Any) -> None:
    with unshard.inference(model):
        pass


def many_losses(model: Any, step: Any) -> None:
    step.backward(model(batch()))


def negative(model: Any, step: Any) -> None:
    step.backward(loss_of(model), weight=-1)


def without_graph(model: Any, step: Any) -> None:
    with torch.no_grad():
        loss = loss_of(model)
    step.backward(loss)


def read_early(model: Any, step: Any) -> None:
    step.loss.item()


def too_often(model: Any, step: Any) -> None:
    step.backward(loss_of(model))
    step.backward(loss_of(model))


def clear(model: Any, step: Any) -> None:
    model.zero_grad()


def clip(model: Any, step: Any) -> None:
    step.backward(loss_of(model))
    unshard.optim.clip_grad_norm_(model.parameters(), 1.0)


def write(model: Any, step: Any) -> None:
    with torch.no_grad():
        next(model.blocks[1].parameters()).mul_(1)


def reshard(model: Any, step: Any) -> None:
    loss_of(model)
    model.reshard()
    loss_of(model)


REFUSALS = [
    (direct, {}, StateError, "Call step.backward(loss, weight=...)"),
    (optimize, {}, StateError, "SGD.step() was called inside unshard.step"),
    (no_synchronization, {}, StateError, "`synchronize` of a unit cannot be changed inside unshard.step"),
    (nest, {}, StateError, "was entered inside unshard.step of the same model"),
    (nest_inference, {}, StateError, "was entered inside unshard.step of the same model"),
    (many_losses, {}, ArgumentError, "a loss with one element"),
    (negative, {}, ArgumentError, "weight must be a finite number"),
    (without_graph, {}, ArgumentError, "a loss that does not require a gradient. Is grad mode off"),
    (read_early, {}, StateError, "exist after the block"),
    (too_often, {"backwards": 1}, ArgumentError, "got backwards=1"),
    (clear, {}, StateError, "zero_grad() was called inside unshard.step"),
    (clip, {}, StateError, "clip_grad_norm_() was called inside unshard.step"),
    (write, {}, StateError, "were written, frozen or unfrozen inside unshard.step"),
    (reshard, {}, StateError, "would have to be all-gathered inside unshard.step"),
]


@pytest.mark.parametrize("do, options, kind, text", REFUSALS, ids=[each[0].__name__ for each in REFUSALS])
@world(2)
def test_misuse_is_refused_and_the_model_stays_usable(
    do: Callable[..., None], options: dict[str, Any], kind: type[Exception], text: str
) -> None:
    model, reference = sharded(), Stack()
    with pytest.raises(kind, match=re.escape(text)):
        with unshard.step(model, units="keep", **options) as step:
            do(model, step)
    assert_at_rest(model)
    model.zero_grad()
    accumulate(model, reference, 1)
    assert_gradients(model, reference)


@world(2)
def test_models_that_steps_refuse() -> None:
    with pytest.raises(ArgumentError, match="needs a sharded model, got Stack"):
        unshard.step(Stack())
    model = sharded()
    with pytest.raises(ArgumentError, match="is a part of one"):
        loss_of(model)
        unshard.step(model.blocks[0])
    with pytest.raises(ArgumentError, match='"keep", "follow"'):
        unshard.step(model, units="all")
    with pytest.raises(ArgumentError, match=r"scaler must be a gradient scaler, such as .*, got 3"):
        unshard.step(model, scaler=3)
    with (
        pytest.raises(ArgumentError, match=r"No unit matches 'block\.\*'"),
        unshard.step(model, units={"block.*": "keep"}),
    ):
        pass
    model.set_requires_gradient_sync(False)
    loss_of(model).backward()
    with pytest.raises(StateError, match="accumulated some without synchronization"), unshard.step(model):
        pass
    plain = Stack()
    fully_shard(plain, ignored_params={plain.head.weight})
    with pytest.raises(ArgumentError, match=r"cannot reduce the gradients of 'head.weight'"):
        with unshard.step(plain):
            pass
    hooked = wrap(nn.Linear(3, 3), [])
    hooked.register_comm_hook(None, lambda state, gradient, output=None: None)
    with pytest.raises(UnsupportedError, match="communication hook"), unshard.step(hooked):
        pass
    with recording_step(), pytest.raises(UnsupportedError, match="cannot be captured"), unshard.step(model):
        pass


@world(2)
def test_a_step_is_entered_once_and_ends() -> None:
    model = sharded()
    with unshard.step(model) as step:
        step.backward(loss_of(model))
    with pytest.raises(StateError, match="outside of its"):
        step.backward(loss_of(model))
    with pytest.raises(StateError, match="has been entered before"), step:
        pass


# -- exceptions ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("units_", ["keep", "follow"])
@pytest.mark.parametrize("where", ["block", "forward", "backward"])
@world(3)
def test_an_exception_on_all_ranks_leaves_the_model_usable(where: str, units_: str) -> None:
    model, reference = sharded(), Stack()
    with pytest.raises(Boom):
        with unshard.step(model, units=units_) as step:
            step.backward(loss_of(model))
            loss = loss_of(model)
            if where == "block":
                raise Boom
            if where == "forward":
                with model.blocks[1].register_forward_pre_hook(boom):
                    loss_of(model)
            loss.register_hook(boom)
            step.backward(loss)
    assert_at_rest(model)
    assert all(parameter.grad is None for parameter in model.parameters())
    for number in range(2):
        accumulate(model, reference, number, units=units_)
        assert_gradients(model, reference)
        model.zero_grad()
        reference.zero_grad()


@world(2)
def test_a_caught_exception_ends_the_step() -> None:
    """The gradients of earlier micro-batches are gone, so the step must not end as if nothing had happened."""
    model = sharded()
    with pytest.raises(StateError, match="Gradients of this block were dropped"):
        with unshard.step(model) as step:
            step.backward(loss_of(model))
            with pytest.raises(Boom), model.blocks[1].register_forward_pre_hook(boom):
                loss_of(model)
    assert_at_rest(model)


@pytest.mark.parametrize("units_", ["keep", "follow"])
@pytest.mark.parametrize("way", ["raises", "plain", "other model"])
@world(2)
def test_one_rank_leaves_the_others(way: str, units_: str) -> None:
    """The others are told which rank it was, and what it does instead."""
    odd = dist.get_rank() == 1
    with quick():
        model, other = sharded(), sharded()
        for each in (model, other):
            for number in range(3):
                accumulate(each, Stack(), number, units=units_)
        with pytest.raises((OrderError, CollectiveError, Boom)) as caught:
            if odd and way == "plain":
                loss_of(model).backward()
                loss_of(model).backward()
            with unshard.step(other if odd and way == "other model" else model, units=units_) as step:
                if odd and way == "raises":
                    raise Boom
                step.backward(loss_of(other if odd and way == "other model" else model))
        if not odd:
            assert not isinstance(caught.value, Boom)
            assert "ank 1" in str(caught.value)


# -- inference -----------------------------------------------------------------------------------------------


@world(2, 3)
def test_ranks_make_different_numbers_of_calls() -> None:
    model, reference = sharded(mp_policy=MixedPrecisionPolicy(torch.float64)), copy.deepcopy(Stack()).double()
    model.eval()
    for _ in range(2):
        inside = Collectives()
        with Collectives() as all_calls, unshard.inference(model), inside:
            for seed in range(3 * dist.get_rank()):
                output = model(batch(seed))
                assert not output.requires_grad
                torch.testing.assert_close(output, reference(batch(seed).double()).detach())
            assert units(model)[0].params[0].unsharded.dtype == torch.float64
        assert not inside.calls
        assert len(all_calls.of("gather")) == BLOCKS + 1
        assert_at_rest(model)
    assert torch.is_grad_enabled()
    loss_of(model).backward()


@world(2)
def test_inference_refuses_backward_and_runs_in_eval_precision() -> None:
    model = sharded(mp_policy=MixedPrecisionPolicy(torch.bfloat16, full_precision_in_eval=True))
    with pytest.raises(StateError, match=r"use unshard.step\(model\) for training"):
        with unshard.inference(model), torch.enable_grad():
            loss_of(model).backward()
    assert torch.is_grad_enabled()
    model.eval()
    with unshard.inference(model):
        assert model(batch()).dtype == torch.float32
    model.train()
    with unshard.inference(model):
        assert model(batch()).dtype == torch.bfloat16


@world(2)
def test_towers_that_no_rank_runs_keep_their_parameters() -> None:
    """As without sharding: an optimizer with momentum or weight decay skips parameters without a gradient."""
    torch.manual_seed(0)
    model = Towers()
    for layer in (*model.text, *model.vision):
        fully_shard(layer)
    fully_shard(model)
    tokens = torch.arange(5)
    with unshard.step(model) as step:
        if dist.get_rank():
            step.backward(model(tokens).square().sum(), weight=5)
    without = {name for name, parameter in model.named_parameters() if parameter.grad is None}
    assert without == {"unused", *[name for name, _ in model.named_parameters() if name.startswith("vision")]}
