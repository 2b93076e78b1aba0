"""A sharded model under `torch.compile`, `torch.func` and double backward."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from bed import world
from bed.stack import Stack, assert_at_rest, assert_gradients, batch, input_gradient, loss_of, sharded
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

from unshard import MixedPrecisionPolicy, fully_shard


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("how", ["blocks before", "blocks after", "model"])
@world(1, 3)
def test_compile(how: str) -> None:
    """Contract INT-04: graphs break at the hooks; what lies between is compiled. One rank sends nothing, three do."""
    model, reference = Stack(2), Stack(2)
    for block in model.blocks:
        if how == "blocks before":
            block.compile(backend="aot_eager")
        fully_shard(block)
        if how == "blocks after":
            block.compile(backend="aot_eager")
    fully_shard(model)
    called = torch.compile(model, backend="aot_eager") if how == "model" else model
    for seed in range(3):
        loss_of(called, seed).backward()
        loss_of(reference, seed).backward()
        assert_gradients(model, reference)
    assert_at_rest(model)


TRANSFORMS = {
    "grad": lambda model, x: torch.func.grad(lambda x: model(x).sum())(x),
    "vjp": lambda model, x: torch.func.vjp(model, x)[1](torch.ones(6, 2))[0],
    "jvp": lambda model, x: torch.func.jvp(model, (x,), (torch.ones_like(x),))[1],
    "vmap": lambda model, x: torch.func.vmap(model)(x),
}


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", TRANSFORMS)
@pytest.mark.parametrize("first", [True, False], ids=["first", "later"])
@world(2)
def test_transforms(name: str, first: bool) -> None:
    """Contract INT-06, for every transform, also as the very first forward."""
    transform: Callable = TRANSFORMS[name]
    model, reference = sharded(), Stack()
    if not first:
        loss_of(model).backward()
    torch.testing.assert_close(transform(model, batch()), transform(reference, batch()))
    model.zero_grad()
    model.reset_iter_state()
    loss_of(model).backward()
    loss_of(reference).backward()
    assert_gradients(model, reference)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("needs_grad", [False, True], ids=["input without", "input with gradient"])
@pytest.mark.parametrize("reshard", [False, True], ids=["kept", "resharded"])
@world(2)
def test_forward_mode_first_in_mixed_precision(reshard: bool, needs_grad: bool) -> None:
    """The first forward of all is one whose tensors have tangents, and casts lie between them and the parameters."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    for transform in (TRANSFORMS["jvp"], dual):
        model, reference = sharded(mp_policy=policy, reshard_after_forward=reshard), Stack().bfloat16()
        x = batch(requires_grad=needs_grad)
        expected = transform(reference, x.detach().bfloat16())
        torch.testing.assert_close(transform(model, x), expected, rtol=0, atol=0)
        model.zero_grad()
        model.reset_iter_state()
        loss_of(model).backward()
        assert_at_rest(model)


def dual(model: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    """The tangent of the output, by dual numbers."""
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(model(forward_ad.make_dual(x, torch.ones_like(x)))).tangent


def fail(gradient: torch.Tensor) -> None:
    raise OSError("a user's own")


@pytest.mark.parametrize("kept", [False, True], ids=["freed", "kept"])
@pytest.mark.parametrize("aside", [False, True], ids=["same thread", "aside"])
@world(2)
def test_gradient_penalty(aside: bool, kept: bool) -> None:
    """A second backward leads through the first, in an order of its own: parameters stay until it is done."""
    model, reference = sharded(reshard_after_forward=not kept), Stack()
    for alone, recomputed in ((False, False), (True, False), (False, True), (False, False)):
        for each in (model, reference):
            each.run = partial(checkpoint, use_reentrant=False) if recomputed else Stack().run
            out, slope = input_gradient(each, batch(requires_grad=True), aside)
            penalty = (slope.norm(dim=1) - 1).square().mean()
            (penalty if alone else penalty + out.mean()).backward()
        assert_gradients(model, reference)
        assert_at_rest(model)
    input_gradient(model, batch(requires_grad=True), aside)  # and no second one
    failing = batch(requires_grad=True)
    failing.register_hook(fail)
    with pytest.raises(OSError, match="a user's own"):
        input_gradient(model, failing, aside)
    for _ in range(2):
        loss_of(model).backward()
        loss_of(reference).backward()
        assert_gradients(model, reference)
        assert_at_rest(model)
