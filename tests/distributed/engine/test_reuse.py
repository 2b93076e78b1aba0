"""Units that are used several times, not at all, or only in part: collectives counted, gradients compared."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import suppress

import pytest
import torch
from bed import world
from bed.recorders import Collectives
from bed.stack import WIDTH, Stack, assert_at_rest, assert_gradients, batch, loss_of, sharded
from torch import nn
from torch.utils.checkpoint import checkpoint

from unshard import MixedPrecisionPolicy, fully_shard


def counted(function: Callable[[], object]) -> tuple[int, int]:
    """Gathers and reductions."""
    with Collectives() as calls:
        function()
    assert len(calls.calls) == len(calls.of("gather")) + len(calls.of("reduce_scatter"))
    return len(calls.of("gather")), len(calls.of("reduce_scatter"))


class Uses(nn.Module):
    def __init__(self, uses: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.uses = nn.Linear(WIDTH, WIDTH), uses

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(self.uses):
            x = torch.tanh(self.inner(x))
        return x


@pytest.mark.parametrize("uses", [1, 2, 3])
@pytest.mark.parametrize("reshard", [True, False])
@world(2)
def test_gathers_of_a_unit_used_several_times(reshard: bool, uses: int) -> None:
    """Contract CM-22, CM-23, MUL-01 to MUL-03: a gather per use, except where it is kept; one reduction."""
    model, reference = Uses(uses), Uses(uses)
    fully_shard(model.inner, reshard_after_forward=reshard)
    fully_shard(model)
    for _ in range(2):
        x = batch(requires_grad=True)
        with Collectives() as forward:
            loss = model(x).square().mean()
        assert len(forward.of("gather")) == len(forward.calls) == (uses if reshard else 1)
        # Each use's backward frees the unit, so the next one gathers again.
        assert counted(loss.backward) == (uses if reshard else uses - 1, 1)
        reference(batch()).square().mean().backward()
        assert_gradients(model, reference)
    assert_at_rest(model)


class Recursive(nn.Module):
    """Calls itself, and computes with its own parameters before and after that."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, depth: int) -> torch.Tensor:
        x = torch.tanh(self.down(x))
        if depth:
            x = self(x, depth - 1)
        return torch.tanh(self.up(x)) if depth % 2 else x


class CallsRecursive(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.head = Recursive(), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, depth: int) -> torch.Tensor:
        return self.head(self.inner(x, depth))


@pytest.mark.parametrize("reshard", [True, False])
@world(1, 2)
def test_a_unit_that_calls_itself(reshard: bool) -> None:
    """As the root and below it: a nested call is a part of the outer one, which needs the parameters to its end."""
    for as_root in (True, False):
        model, reference = CallsRecursive(), CallsRecursive()
        fully_shard(model.inner, reshard_after_forward=reshard)
        if as_root:
            model, reference = model.inner, reference.inner
        else:
            fully_shard(model)
        for depth in (1, 2, 3):
            for requires_grad in (False, True):
                inputs = [batch(depth, requires_grad) for _ in range(2)]
                results = [each(x, depth) for each, x in zip((model, reference), inputs, strict=True)]
                torch.testing.assert_close(*results)
                for result in results:
                    result.square().mean().backward()
                assert_gradients(model, reference)
                if requires_grad:
                    torch.testing.assert_close(inputs[0].grad, inputs[1].grad)
                assert_at_rest(model)
        with torch.no_grad():
            torch.testing.assert_close(model(batch(), 2), reference(batch(), 2))
        if reshard:
            assert_at_rest(model)


class Interrupted(Recursive):
    def forward(self, x: torch.Tensor, depth: int, error: type[BaseException] | None = None) -> torch.Tensor:
        if depth == 0 and error is not None:
            raise error
        x = self.down(x)
        with suppress(ValueError):
            x = self(x, depth - 1, error) if depth else x
        return self.up(x)


@pytest.mark.parametrize("below", [True, False])
@world(2)
def test_an_exception_leaves_a_unit_that_calls_itself(below: bool) -> None:
    """Caught by an outer call, which goes on; or a KeyboardInterrupt, for which torch calls no hooks."""
    torch.manual_seed(0)
    inner = Interrupted()
    reference = copy.deepcopy(inner)
    model = fully_shard(inner, reshard_after_forward=True)
    if below:
        model = fully_shard(Through(inner))
    for error in (ValueError, KeyboardInterrupt, None):
        if error is KeyboardInterrupt:
            with pytest.raises(KeyboardInterrupt):
                model(batch(), 2, error)
            continue
        model(batch(), 2, error).square().mean().backward()
        reference(batch(), 2, error).square().mean().backward()
        assert_gradients(inner, reference)
        assert_at_rest(model)


class Through(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *args: object) -> torch.Tensor:
        return self.inner(*args)


@world(2, 3)
def test_only_the_second_of_two_forwards_is_used() -> None:
    """Contract MUL-07, RUN-19."""
    model, reference = sharded(), Stack()
    for seed in range(2):
        loss_of(model, seed + 5)
        loss_of(model, seed).backward()
        loss_of(reference, seed).backward()
    assert_gradients(model, reference)
    assert_at_rest(model)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("reshard", [True, False])
@world(2)
def test_two_forwards_with_nested_checkpoints(reshard: bool, reentrant: bool) -> None:
    """Contract MUL-06: recomputation finds its parameters unsharded, whoever has freed them meanwhile."""

    def saved(function: Callable, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(function, x, use_reentrant=reentrant)

    model, reference = Stack(), Stack()
    model.run = lambda block, x: saved(lambda x: saved(block, x), x)
    sharded(model, reshard_after_forward=reshard)
    for _ in range(2):
        for each in (model, reference):
            losses = [each(batch(seed, requires_grad=True)).square().mean() for seed in (0, 1)]
            sum(losses).backward()
        assert_gradients(model, reference)
        assert_at_rest(model)


class Maybe(nn.Module):
    """Blocks of which a forward uses some."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.head = nn.Linear(WIDTH, 2)
        self.used = (0, 1, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number in self.used:
            x = torch.tanh(self.blocks[number](x))
        return self.head(x)


@world(1, 2, 3)
def test_modules_that_are_not_used() -> None:
    """Contract FRZ-10, CM-29, RUN-25, MUL-08: no gather, no reduction, no gradient; in any step."""
    model, reference = sharded(Maybe(), reshard_after_forward=True), Maybe()
    for used in ((0, 2), (0, 2), (0, 1, 2), (1,), (1,)):
        changed = used != model.used
        model.used = reference.used = used
        model.zero_grad()
        reference.zero_grad()
        gathers, reductions = counted(lambda: loss_of(model).backward())
        if model.head.weight.device_mesh.size() > 1:
            assert reductions == len(used) + 1
            # One gather more where another order was expected.
            assert 0 <= gathers - 2 * (len(used) + 1) <= changed
        loss_of(reference).backward()
        assert_gradients(model, reference)
    assert_at_rest(model)


@world(2)
def test_evaluation_gathers_once() -> None:
    """Contract CM-17, RUN-16: without a graph, one gather per unit and forward, and nothing else."""
    model = sharded(reshard_after_forward=True)
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            for _ in range(2):
                assert counted(lambda: model(batch())) == (4, 0)
        assert_at_rest(model)


@world(2)
def test_frozen_units_below_the_first_trainable_one() -> None:
    """Contract CM-20: gathered in forward only; no gradient passes through them."""
    model, reference = Stack(), Stack()
    for each in (model, reference):
        for number in (0, 1):
            each.blocks[number].requires_grad_(False)
    sharded(model, reshard_after_forward=True)
    for _ in range(2):
        loss = loss_of(model)
        assert counted(loss.backward) == (2, 2)  # block 2 and the root
        loss_of(reference).backward()
        assert_gradients(model, reference)
    assert_at_rest(model)


class Parts(nn.Module):
    """Parameters of known sizes, frozen or not used."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.used = nn.Parameter(torch.randn(8, 3))
        self.frozen = nn.Parameter(torch.randn(10, 3), requires_grad=False)
        self.unused = nn.Parameter(torch.randn(12, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.used.sum() * self.frozen.sum()


@pytest.mark.parametrize("policy", [None, MixedPrecisionPolicy(torch.bfloat16, torch.float32)], ids=["plain", "mixed"])
@world(2)
def test_what_a_reduction_contains(policy: MixedPrecisionPolicy | None) -> None:
    """Contract FRZ-02, FRZ-03, FRZ-08, FRZ-11, CM-03: parameters with gradients; with zeros, all trainable ones."""
    model = fully_shard(Parts(), mp_policy=policy)
    gathered = 4 if policy is None else 2
    for zeros, elements in ((False, 8 * 3), (True, 8 * 3 + 12 * 3)):
        model.set_reduce_scatter_unused_params(zeros)
        model.zero_grad()
        with Collectives() as calls:
            model(torch.ones(2)).sum().backward()
        assert [call.bytes_out for call in calls.of("gather")] == [gathered * 30 * 3]
        # Of two ranks, each sends the other's half.
        assert [call.bytes_in for call in calls.of("reduce_scatter")] == [4 * elements // 2]
        assert model.used.grad is not None and model.frozen.grad is None
        if zeros:
            assert model.unused.grad.dtype == torch.float32 and not model.unused.grad.full_tensor().any()
        else:
            assert model.unused.grad is None
