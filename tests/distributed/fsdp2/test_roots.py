"""Who becomes the root and when; the mixed class; conversions and state while a model is unsharded."""

from __future__ import annotations

import pickle

import pytest
import torch
from bed import world
from bed.recorders import Collectives
from bed.stack import Stack, assert_at_rest, assert_gradients, batch, loss_of, sharded, units
from torch import nn
from torch.distributed.tensor import DTensor

from unshard import FSDPModule, fully_shard, share_comm_ctx
from unshard.engine.states import ParamState


class Halves(nn.Module):
    """A plain module over two sharded ones."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = Stack(1), Stack(2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.left(x) * self.right(x)


@pytest.mark.parametrize("shared", [False, True])
@world(1, 2, 3)
def test_several_roots_in_one_model(shared: bool) -> None:
    """Contract LZY-01, LZY-05, API-37, INT-07: each on its own, also with shared contexts."""
    model, reference = Halves(), Halves()
    sharded(model.left)
    sharded(model.right)
    if shared:
        share_comm_ctx([model.left, model.right])
    for _ in range(2):
        loss_of(model).backward()
        loss_of(reference).backward()
        assert_gradients(model, reference)
    assert_at_rest(model)
    names = [[unit.name for unit in units(half)] for half in (model.left, model.right)]
    assert names == [["(root)", "blocks.0"], ["(root)", "blocks.0", "blocks.1"]]  # LZY-16: as seen from each root


@world(2)
def test_an_explicit_choice_on_the_root_is_respected() -> None:
    """Contract LZY-06, LZY-07, LZY-10."""
    for chosen, whole in ((None, True), (True, False), (False, True)):
        model = Stack(1)
        fully_shard(model.blocks[0])
        fully_shard(model, reshard_after_forward=chosen)
        loss = loss_of(model)
        assert isinstance(model.head.weight, DTensor) != whole
        assert isinstance(model.blocks[0].first.weight, DTensor)
        loss.backward()
        assert_at_rest(model)


@world(2)
def test_a_gather_that_nobody_waits_for() -> None:
    """Contract API-32: it is waited for and dropped at the end of the last backward."""
    model, reference = Halves(), Halves()
    for each in (model.left, model.right):
        for block in each.blocks:
            fully_shard(block)
    fully_shard(model)
    loss_of(model).backward()
    spare = model.left.blocks[0]
    model.left.forward = reference.left.forward = lambda x: 1.0  # type: ignore[method-assign]
    reference.zero_grad()
    model.zero_grad()
    spare.unshard(async_op=True)
    for last in (False, True):
        model.set_is_last_backward(last)
        loss_of(model).backward()
        loss_of(reference).backward()
        unit = fully_shard.state(spare).unit
        assert unit.param_state is (ParamState.SHARDED if last else ParamState.GATHERING)
    assert_at_rest(model)
    assert_gradients(model, reference)


@world(2)
def test_the_mixed_class() -> None:
    """Contract CLS-01, CLS-02, CLS-12."""
    model = sharded(Stack(1))
    mro = type(model).__mro__
    assert mro[:3] == (mro[0], FSDPModule, Stack) and mro[0].__name__ == "FSDPStack"
    assert repr(model).startswith("FSDPStack(") and "FSDPBlock(" in repr(model)
    assert type(model.blocks) is nn.ModuleList and type(model.blocks[0].first) is nn.Linear
    with pytest.raises(NotImplementedError, match=r"cannot be pickled.*state_dict\(\)"):  # CLS-07
        pickle.dumps(model)


@pytest.mark.parametrize("convert", ["double", "cpu", "to_empty"])
@world(2)
def test_conversions_while_the_model_is_unsharded(convert: str) -> None:
    """Contract CLS-08: they bring the sharded parameters back first, of the entire model, and convert those."""
    model, reference = sharded(reshard_after_forward=False), Stack()
    loss_of(model)
    assert not isinstance(model.head.weight, DTensor) and not isinstance(model.blocks[0].first.weight, DTensor)
    before = dict(model.state_dict(keep_vars=True))
    loss_of(model)
    if convert == "to_empty":
        model.to_empty(device="cpu")
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(0.01)
            for parameter in reference.parameters():
                parameter.fill_(0.01)
    else:
        getattr(model, convert)()
        getattr(reference, convert)()
    assert_at_rest(model)
    assert all(parameter is before[name] for name, parameter in model.named_parameters())
    x = batch().to(model.head.weight.dtype)
    for each in (model, reference):
        each(x).square().mean().backward()
    assert_gradients(model, reference)
    assert model.head.weight.grad.dtype == (torch.float64 if convert == "double" else torch.float32)


@pytest.mark.parametrize("when", ["before", "after"])
@world(2)
def test_conversion_by_swapping(when: str) -> None:
    """Contract CLS-11: with swapping conversions the parameter objects stay, and train."""
    model, reference = sharded(Stack(1)), Stack(1)
    if when == "after":
        loss_of(model).backward()
        model.zero_grad()
    objects = [id(parameter) for parameter in model.parameters()]
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        model.double()
        reference.double()
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    assert [id(parameter) for parameter in model.parameters()] == objects
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, reference)]
    for _ in range(2):
        for each, optimizer in zip((model, reference), optimizers, strict=True):
            optimizer.zero_grad()
            each(batch().double()).square().mean().backward()
            optimizer.step()
    assert_gradients(model, reference)


@world(2)
def test_state_dicts_of_a_model_that_is_unsharded_before_its_first_forward() -> None:
    """Contract LZY-15 improved, SDT-01, SDT-02: the hooks are there from the start; no communication."""
    model, source = sharded(Stack(1)), sharded(Stack(1))
    for module in (model, model.blocks[0]):
        module.unshard()
    with Collectives() as calls:
        state = model.state_dict()
    assert calls.calls == [] and all(isinstance(entry, DTensor) for entry in state.values())
    assert_at_rest(model)
    with torch.no_grad():
        for parameter in source.parameters():
            parameter.add_(1)
    for module in (model, model.blocks[0]):
        module.unshard()
    with Collectives() as calls:
        model.load_state_dict(source.state_dict())
    assert calls.calls == []
    assert_at_rest(model)
    assert torch.equal(model(batch()), source(batch()))
