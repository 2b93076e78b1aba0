"""A sharded model under `torch.compile`, `torch.func` and double backward."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from bed import world
from bed.stack import Stack, assert_at_rest, assert_gradients, batch, input_gradient, loss_of, sharded
from bed.transforms import TRANSFORMS, called_with, linearized
from torch import nn
from torch.utils.checkpoint import checkpoint

from unshard import MixedPrecisionPolicy, fully_shard
from unshard.errors import ParameterError, UnsupportedError


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


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("name", TRANSFORMS)
@pytest.mark.parametrize("first", [True, False], ids=["first", "later"])
@world(2)
def test_transforms(name: str, first: bool) -> None:
    """Contract INT-06, for every transform, also as the very first forward."""
    transform = TRANSFORMS[name]
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
@pytest.mark.parametrize("reshard", [False, True, 2, None], ids=["kept", "resharded", "smaller", "default"])
@world(2)
def test_forward_mode_first_in_mixed_precision(reshard: bool | int | None, needs_grad: bool) -> None:
    """The first forward of all is one whose tensors have tangents, and casts lie between them and the parameters."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    for transform in (TRANSFORMS["jvp"], TRANSFORMS["dual"]):
        model, reference = sharded(mp_policy=policy, reshard_after_forward=reshard), Stack().bfloat16()
        x = batch(requires_grad=needs_grad)
        expected = transform(reference, x.detach().bfloat16())
        torch.testing.assert_close(transform(model, x), expected, rtol=0, atol=0)
        model.zero_grad()
        model.reset_iter_state()
        loss_of(model).backward()
        assert_at_rest(model)


@pytest.mark.filterwarnings("ignore::UserWarning")
@world(2)
def test_what_cannot_be_transformed_is_refused() -> None:
    """Right, or an error that says why; the model stays usable and keeps its parameters."""
    model, reference = sharded(), Stack()
    with pytest.raises(UnsupportedError, match=r"linearize.*cannot trace Unit '\S*'.*torch\.func\.jvp"):
        linearized(model, batch())
    torch.testing.assert_close(called_with(dict(model.named_parameters()), model, batch()), reference(batch()))
    doubled = {name: parameter.detach() * 2 for name, parameter in model.named_parameters()}
    for others in (doubled, {name: nn.Parameter(value) for name, value in doubled.items()}):
        with pytest.raises(ParameterError, match=r"functional_call (replaces parameter '\S+' of unit|cannot replace)"):
            called_with(others, model, batch())
        torch.testing.assert_close(model(batch()), reference(batch()))
    model.reset_iter_state()
    loss_of(model).backward()
    loss_of(reference).backward()
    assert_gradients(model, reference)
    kept = sharded(reshard_after_forward=False)
    with torch.no_grad():
        kept(batch())
    with pytest.raises(ParameterError, match=r"were replaced while the unit was kept.*functional_call cannot"):
        others = {name: parameter.detach().clone() for name, parameter in kept.named_parameters()}
        called_with(others, kept, batch())
    torch.testing.assert_close(linearized(kept, batch()), linearized(reference, batch()))


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
