"""Wrapped models in the situations that programs get them into: checkpointing, exceptions, eval, other roots."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from bed import models, world
from bed.models import CASES
from bed.parity import adamw
from bed.stack import input_gradient
from bed.wrapped import full_gradients, full_parameters, wrap, wrap_case
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from unshard import FullyShardedDataParallel as FSDP
from unshard import MixedPrecision, ShardingStrategy, composable, fully_shard
from unshard.fsdp1.state import wrapper_state_of

S = ShardingStrategy
flat_or_originals = pytest.mark.parametrize("originals", [False, True], ids=["flat", "originals"])
strategies = pytest.mark.parametrize(
    "strategy", [S.FULL_SHARD, S.SHARD_GRAD_OP, S.NO_SHARD], ids=lambda each: each.name
)


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)) for _ in range(3))
        self.head = nn.Linear(6, 1)
        self.fail = False
        self.recompute = ""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number, block in enumerate(self.blocks):
            if self.recompute:
                x = x + checkpoint(block, x, use_reentrant=self.recompute == "reentrant")
            else:
                x = x + block(x)
            if self.fail and number == 1:
                raise OSError("a user's own")
        return self.head(x)


def build(originals: bool, **options: Any) -> tuple[FSDP, Blocks, torch.Tensor]:
    model, reference = Blocks(), Blocks()
    wrapped = wrap(model, list(model.blocks), use_orig_params=originals, **options)
    x = torch.randn(12, 6, generator=torch.Generator().manual_seed(4))
    return wrapped, reference, x


def mine(x: torch.Tensor) -> torch.Tensor:
    each = len(x) // dist.get_world_size()
    return x[dist.get_rank() * each : (dist.get_rank() + 1) * each]


def agree(model: FSDP, reference: nn.Module) -> None:
    found = full_gradients(model)
    assert found.keys() == {name for name, _ in reference.named_parameters()}
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, reference.get_parameter(name).grad, rtol=1e-4, atol=1e-6)


@flat_or_originals
@strategies
@world(2, 3)
def test_activation_checkpointing(strategy: S, originals: bool) -> None:
    """Units are recomputed in backward, whichever way."""
    for way in ("reentrant", "plain"):
        model, reference, x = build(originals, sharding_strategy=strategy)
        model.module.recompute = way
        for _ in range(2):
            model.zero_grad()
            reference.zero_grad()
            model(mine(x).clone().requires_grad_()).square().mean().backward()
            reference(x).square().mean().backward()
            agree(model, reference)
    for outside in (True, False):
        module, reference = Blocks(), Blocks()
        for number, block in enumerate(module.blocks):
            options = {"sharding_strategy": strategy, "use_orig_params": originals}
            if outside:
                inner = wrap(block, [], **options)
                module.blocks[number] = checkpoint_wrapper(inner, CheckpointImpl.NO_REENTRANT)
            else:
                module.blocks[number] = wrap(checkpoint_wrapper(block, CheckpointImpl.NO_REENTRANT), [], **options)
        model = wrap(module, [], **options)
        model(mine(x)).square().mean().backward()
        reference(x).square().mean().backward()
        for name, gradient in full_gradients(model).items():
            plain = name.replace("_checkpoint_wrapped_module.", "")
            torch.testing.assert_close(gradient, reference.get_parameter(plain).grad, rtol=1e-4, atol=1e-6)


@flat_or_originals
@strategies
@world(2)
def test_after_an_exception_the_next_step_works(strategy: S, originals: bool) -> None:
    model, reference, x = build(originals, sharding_strategy=strategy)
    model.module.fail = True
    for _ in range(2):
        with pytest.raises(OSError, match="a user's own"):
            model(mine(x))
    model.module.fail = False
    model(mine(x)).square().mean().backward()
    reference(x).square().mean().backward()
    agree(model, reference)


@flat_or_originals
@strategies
@world(2)
def test_evaluation_between_steps(strategy: S, originals: bool) -> None:
    """No graph: with `no_grad` and in inference mode, before, between and after training steps."""
    model, reference, x = build(originals, sharding_strategy=strategy)
    stepper, other = adamw(model.parameters()), adamw(reference.parameters())
    for step in range(3):
        for mode in (torch.no_grad, torch.inference_mode):
            with mode():
                torch.testing.assert_close(model(x), reference(x), rtol=1e-4, atol=1e-5)
        output = model(mine(x))
        with torch.no_grad():  # between forward and backward
            model(x)
        output.square().mean().backward()
        reference(x).square().mean().backward()
        agree(model, reference)
        for each in (stepper, other):
            each.step()
            each.zero_grad(set_to_none=step % 2 == 0)
    for name, parameter in full_parameters(model).items():
        torch.testing.assert_close(parameter, reference.get_parameter(name).detach(), rtol=1e-4, atol=1e-5)


@flat_or_originals
@world(2)
def test_a_unit_used_twice_and_on_its_own(originals: bool) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(4, 4)
    reference = copy.deepcopy(layer)

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = FSDP(layer, use_orig_params=originals)
            self.scale = nn.Parameter(torch.ones(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(torch.tanh(self.inner(x))) * self.scale

    model = FSDP(Twice(), use_orig_params=originals)
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(2))
    for _ in range(2):
        model(x).sum().backward()
        reference(torch.tanh(reference(x))).sum().backward()
    for name, gradient in full_gradients(model).items():
        if name != "scale":
            expected = reference.get_parameter(name.removeprefix("inner.")).grad
            torch.testing.assert_close(gradient, expected, rtol=1e-4, atol=1e-6)


@world(2)
def test_different_strategies_and_precisions_under_one_root() -> None:
    """A strategy and a precision belong to a unit."""
    case = CASES[0]
    reference, model = case.build(), case.build()
    kinds = (S.SHARD_GRAD_OP, S.NO_SHARD, S.FULL_SHARD)
    for number, strategy in enumerate(kinds):
        model.blocks[number] = wrap(model.blocks[number], [], sharding_strategy=strategy)
    model = FSDP(model)
    stepper, other = adamw(model.parameters()), adamw(reference.parameters())
    for step in range(3):
        batch = case.batch(step)
        case.loss(reference, batch).backward()
        case.loss(model, models.shard(batch, dist.get_rank(), 2)).backward()
        for each in (stepper, other):
            each.step()
            each.zero_grad()
    for name, parameter in full_parameters(model).items():
        torch.testing.assert_close(parameter, reference.get_parameter(name).detach(), rtol=1e-4, atol=1e-5)


@flat_or_originals
@world(2)
def test_f1_72_gradients_of_gradients_are_refused(originals: bool) -> None:
    model, reference, x = build(originals)
    with pytest.raises(RuntimeError, match="differentiated again"):
        model(mine(x)).square().mean().backward(create_graph=True)
    model.zero_grad()
    model(mine(x)).square().mean().backward()
    reference(x).square().mean().backward()
    agree(model, reference)


@flat_or_originals
@world(2)
def test_gradient_penalty(originals: bool) -> None:
    """The second backward leads through the first one's, in another order if that ran in a device's thread."""
    model, reference, x = build(originals)
    for aside in (False, True):
        for each, given in ((model, mine(x)), (reference, x)):
            out, slope = input_gradient(each, given.clone().requires_grad_(), aside)
            (out[:, 0] + slope.square().sum(1)).mean().backward()
        agree(model, reference)


@world(2)
def test_copies_are_refused() -> None:
    with pytest.raises(NotImplementedError, match="before you wrap it"):
        copy.deepcopy(FSDP(nn.Linear(2, 2)))


@flat_or_originals
@world(2)
def test_memory_returns_to_rest(originals: bool) -> None:
    """ME-30, ME-31: whatever happened, full buffers are empty after a step, also with half precision and offload."""
    model, _, x = build(originals, mixed_precision=MixedPrecision(torch.bfloat16, torch.float32))
    for _ in range(3):
        model(mine(x)).square().mean().backward()
        model.zero_grad()
    with torch.no_grad():
        model(x)
    assert not any(part.held for state in FSDP.fsdp_modules(model) for part in state._state.unit.param_groups)
    case = CASES[1]
    model = wrap_case(case, use_orig_params=originals)
    case.loss(model, case.batch(0)).backward()
    assert not any(part.held for each in FSDP.fsdp_modules(model) for part in each._state.unit.param_groups)


class Keeps(nn.Module):
    """What a loss is computed from is not what forward returns."""

    def __init__(self, returned: str):
        super().__init__()
        self.layer, self.returned = nn.Linear(4, 4), returned
        self.kept: Any = None

    def forward(self, x: torch.Tensor) -> Any:
        self.kept = self.layer(x)
        return {"nothing": None, "object": object(), "detached": self.kept.detach(), "number": 3}[self.returned]


class Around(nn.Module):
    def __init__(self, returned: str):
        super().__init__()
        torch.manual_seed(2)
        self.first, self.inner, self.last = nn.Linear(4, 4), Keeps(returned), nn.Linear(4, 4)
        self.kept: Any = None

    def forward(self, x: torch.Tensor) -> None:
        self.inner(self.first(x))
        self.kept = self.last(x)


@pytest.mark.parametrize("returned", ["nothing", "object", "detached", "number"])
@pytest.mark.parametrize("how", ["flat", "originals", "fully_shard"])
@world(2)
@pytest.mark.filterwarnings("ignore")
def test_the_loss_is_reached_past_what_forward_returns(returned: str, how: str) -> None:
    """Of the root and of a unit inside, whose input has a gradient too: no gradient is lost."""
    model, reference = Around(returned), Around(returned)
    root: nn.Module = model
    if how == "fully_shard":
        fully_shard(model.inner, reshard_after_forward=True)
        fully_shard(model, reshard_after_forward=True)
    else:
        model.inner = FSDP(model.inner, use_orig_params=how == "originals")  # type: ignore[assignment]
        root = FSDP(model, use_orig_params=how == "originals")
    optimizer, other = torch.optim.SGD(root.parameters(), lr=0.1), torch.optim.SGD(reference.parameters(), lr=0.1)
    for step in range(3):
        x = torch.full((2, 4), step + 1.0)
        for top, inside, stepper in ((root, model, optimizer), (reference, reference, other)):
            top(x)
            (inside.inner.kept.square().sum() + inside.kept.square().sum()).backward()
            stepper.step()
            stepper.zero_grad()
    if how == "fully_shard":
        assert all(isinstance(each, DTensor) for each in model.parameters())  # all at rest
        found = {name: parameter.full_tensor() for name, parameter in model.named_parameters()}
    else:
        assert not any(part.held for each in FSDP.fsdp_modules(root) for part in each._state.unit.param_groups)
        found = full_parameters(root)
    for name, parameter in reference.named_parameters():
        torch.testing.assert_close(found[name].detach(), parameter.detach(), rtol=1e-5, atol=1e-6)


class Remembering(nn.Module):
    """Attends over what its earlier forwards have computed."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(6, 6), nn.Linear(6, 6)
        self.keys: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.keys.append(self.key(x))
        keys = torch.stack(self.keys)
        return x + ((self.query(x) * keys).softmax(0) * keys).sum(0)


@pytest.mark.parametrize("last", [False, True], ids=["all", "the last"])
@flat_or_originals
@strategies
@world(2, 3)
def test_a_backward_through_earlier_forwards(strategy: S, originals: bool, last: bool) -> None:
    """It comes to units again whose gradients are being reduced."""

    def build() -> nn.Sequential:
        torch.manual_seed(2)
        return nn.Sequential(Remembering(), Remembering(), nn.Linear(6, 1))

    module, reference = build(), build()
    remembering = [*module[:2], *reference[:2]]
    model = wrap(module, list(module[:2]), use_orig_params=originals, sharding_strategy=strategy)
    for top, optimizer in ((model, adamw(model.parameters())), (reference, adamw(reference.parameters()))):
        for step in range(2):
            for each in remembering:
                each.keys.clear()
            x = torch.randn(3, 12, 6, generator=torch.Generator().manual_seed(step))
            losses = [top(mine(part) if top is model else part).square().mean() for part in x]
            (losses[-1] if last else sum(losses)).backward()
            optimizer.step()
            optimizer.zero_grad()
    for name, parameter in full_parameters(model).items():
        torch.testing.assert_close(parameter, dict(reference.named_parameters())[name].data)


@pytest.mark.parametrize("to_none", [True, False])
@flat_or_originals
@strategies
@world(2)
def test_gradients_are_cleared_between_forward_and_backward(strategy: S, originals: bool, to_none: bool) -> None:
    model, reference, x = build(originals, sharding_strategy=strategy)
    for top in (model, reference):
        for step in range(2):
            loss = top((mine(x) if top is model else x) + step).square().mean()
            top.zero_grad(set_to_none=to_none)
            loss.backward()
    expected = {name: parameter.grad for name, parameter in reference.named_parameters()}
    for name, gradient in full_gradients(model).items():
        torch.testing.assert_close(gradient, expected[name])


@pytest.mark.filterwarnings("ignore:There is one rank")
@pytest.mark.parametrize("legacy", [False, True], ids=["wrapper", "legacy"])
@world(1, 2)
def test_a_model_that_ran_is_wrapped_again(legacy: bool) -> None:
    """Inside a larger one, or a part of it; whichever runs is the root, also for graphs of before."""
    torch.manual_seed(2)
    plain = nn.Sequential(nn.Sequential(nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 5)), nn.Linear(5, 5), nn.Linear(5, 5))
    sharded = copy.deepcopy(plain)
    x = torch.ones(2, 5, requires_grad=True)

    def shard(module: nn.Module) -> nn.Module:
        return composable.fully_shard(module) if legacy else wrap(module, [], use_orig_params=True)

    sharded[0][2] = shard(sharded[0][2])
    sharded[0] = inner = shard(sharded[0])
    optimizers = adamw(plain[0].parameters()), adamw(inner.parameters())

    def step(one: nn.Module, other: nn.Module) -> None:
        for model, optimizer in zip((one, other), optimizers, strict=True):
            model(x).sum().backward()
            optimizer.step()
            model.zero_grad()
        torch.testing.assert_close(other(x), one(x), rtol=1e-5, atol=1e-6)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # one rank
        step(plain[0], inner)
        earlier = inner(x)
        outer = shard(sharded)
        later = outer(x)
        assert wrapper_state_of(outer).is_root(outer) and not wrapper_state_of(inner).is_root(inner)
        plain(x).sum().backward()
        plain[0](x).sum().backward()
        later.sum().backward()
        earlier.sum().backward()
        expected = {name: each.grad for name, each in plain.named_parameters()}
        for name, gradient in gradients_of(outer).items():
            torch.testing.assert_close(gradient, expected[name], rtol=1e-5, atol=1e-6)
        for model in (plain, outer):
            model.zero_grad()
        step(plain, outer)
        part = shard(nn.Sequential(sharded[0]))
        for one, other in ((plain[0], part), (plain, outer), (plain[0], inner), (plain, outer)):
            step(one, other)
        assert wrapper_state_of(outer).is_root(outer)


def gradients_of(model: nn.Module) -> dict[str, torch.Tensor]:
    with FSDP.summon_full_params(model, with_grads=True, writeback=False):
        return {name.replace("_fsdp_wrapped_module.", ""): each.grad.clone() for name, each in model.named_parameters()}
