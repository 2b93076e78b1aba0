"""The state of a flat optimizer: shown per parameter, saved, loaded, copied, and changed by hand."""

from __future__ import annotations

import copy
import io
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from bed import world
from bed.checkpoints import quiet
from bed.flat_optimizers import (
    Counting,
    Mirror,
    assert_equal,
    by_decay,
    local,
    loss_of_some_layers,
    optim,
    plain_loss,
    ranges,
    sharded,
    train,
)
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

from unshard.errors import ParameterError
from unshard.optim import flat


def build(is_flat: bool, weights: nn.Module | None = None) -> tuple[nn.Module, Any]:
    model = sharded()
    if weights is not None:
        model.load_state_dict(weights.state_dict())
    optimizer = optim.AdamW(by_decay(model), lr=0.01, foreach=True)
    return model, flat(optimizer) if is_flat else optimizer


@world(2, 3)
def test_from_flat_to_plain_and_back() -> None:
    """Each continues from the other's state dict as the first one does by itself."""
    first = build(True)
    train(*first, steps=range(3), loss=loss_of_some_layers)
    second, third = build(False, first[0]), build(True, first[0])
    saved = first[1].state_dict()
    counters = [entry["step"] for entry in saved["state"].values()]
    assert len({id(each) for each in counters}) == len(counters)  # the other optimizer advances each by itself
    second[1].load_state_dict(copy.deepcopy(saved))
    train(*second, steps=range(3, 5), loss=loss_of_some_layers)
    third[1].load_state_dict(copy.deepcopy(second[1].state_dict()))
    third[0].load_state_dict(second[0].state_dict())
    train(*first, steps=range(3, 7), loss=loss_of_some_layers)
    for each in (second, third):
        train(*each, steps=range(5, 7), loss=loss_of_some_layers)
        assert_equal(each, first)
    assert len(ranges(third[1])) < len(list(third[0].parameters()))
    assert {float(each) for each in counters} == {2.0, 3.0}  # and nobody has advanced those that were saved


@quiet
@pytest.mark.parametrize("back", [False, True])
@world(2)
def test_distributed_checkpoints(back: bool, tmp_path: Path) -> None:
    """Saved from one kind of optimizer, loaded into the other, which has taken no step yet."""
    first = build(not back)
    train(*first, steps=range(3))
    dcp.save({"optimizer": get_optimizer_state_dict(*first)}, checkpoint_id=tmp_path)
    second = build(back, first[0])
    state = {"optimizer": get_optimizer_state_dict(*second)}
    dcp.load(state, checkpoint_id=tmp_path)
    set_optimizer_state_dict(*second, state["optimizer"])
    assert_equal(second, first)
    for each in (first, second):
        train(*each, steps=range(3, 5))
    assert_equal(second, first)


@world(2)
def test_saved_to_a_file_and_copied() -> None:
    """The entries can be saved by themselves, and a copied optimizer steps the copied model."""
    model, optimizer = build(True)
    train(model, optimizer, steps=range(2))
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    assert file.tell() < 200_000
    file.seek(0)
    again = build(True, model)
    again[1].load_state_dict(torch.load(file, weights_only=False))
    copied = copy.deepcopy((model, optimizer))
    assert type(copied[1]) is type(optimizer)
    for each in (again, copied, (model, optimizer)):
        train(*each, steps=range(2, 4))
    assert_equal(again, (model, optimizer))
    assert_equal(copied, (model, optimizer))
    assert all(a is not b for a, b in zip(copied[0].parameters(), model.parameters(), strict=True))
    assert len(ranges(copied[1])) == len(ranges(optimizer))


@world(1)
def test_a_pickled_optimizer() -> None:
    """It steps the parameters that were pickled with it, each by itself: no unit manages them."""
    model, optimizer = build(True)
    train(model, optimizer, steps=range(2))
    file = io.BytesIO()
    torch.save(optimizer, file)
    file.seek(0)
    read = torch.load(file, weights_only=False)
    assert type(read) is type(optimizer) and len(read.state) == len(optimizer.state)
    pairs = list(zip(*([p for g in each.param_groups for p in g["params"]] for each in (read, optimizer)), strict=True))
    plain_loss(model, 2).backward()
    for mine, theirs in pairs:
        mine.grad = theirs.grad.clone()
    read.step()
    optimizer.step()
    assert all(torch.equal(local(mine), local(theirs)) for mine, theirs in pairs)


@world(2)
def test_state_that_was_changed_by_hand() -> None:
    """Written in place, replaced, removed and cleared: the next step sees it, as any optimizer's would."""
    model, optimizer = build(True)
    mirror = Mirror(optimizer, foreach=True)
    train(model, optimizer, mirror, steps=range(2))
    weight, bias = model.odd.weight, model.odd.bias
    for state, (one, two) in (
        (optimizer.state, (weight, bias)),
        (mirror.optimizer.state, map(mirror.copies.get, (weight, bias))),
    ):
        state[one]["exp_avg"].zero_()
        state[two]["exp_avg_sq"] = state[two]["exp_avg_sq"] * 4
    train(model, optimizer, mirror, steps=range(2, 4))
    mirror.check()
    for state, one in ((optimizer.state, weight), (mirror.optimizer.state, mirror.copies[weight])):
        del state[one]
    train(model, optimizer, mirror, steps=range(4, 6))
    mirror.check()
    assert optimizer.state[weight]["step"] == 2
    for state in (optimizer.state, mirror.optimizer.state):
        state.clear()
    train(model, optimizer, mirror, steps=range(6, 8))
    mirror.check()


@world(2)
def test_what_entries_are() -> None:
    """DTensors like their parameters, over the memory that steps write, each with a storage of its own size."""
    model, optimizer = build(True)
    train(model, optimizer, steps=range(1))
    kept = {each: optimizer.state[each]["exp_avg"] for each in model.parameters()}
    train(model, optimizer, steps=range(1, 2))
    for each, average in kept.items():
        assert optimizer.state[each]["exp_avg"] is average and isinstance(average, DTensor)
        assert (average.shape, average.placements) == (each.shape, each.placements)
        assert local(average).untyped_storage().nbytes() == local(each).numel() * 4
        flats = [entry["exp_avg"] for key, entry in optimizer.flat_groups().state.items()]
        inside = [f.data_ptr() <= local(average).data_ptr() < f.data_ptr() + f.nbytes for f in flats]
        assert any(inside) or not local(each).numel()
    with pytest.raises(ParameterError, match=r"state 'exp_avg' of a parameter of shape \(7, 6\) should have"):
        optimizer.state[model.odd.weight]["exp_avg"] = DTensor.from_local(
            torch.zeros(7, 6), model.odd.weight.device_mesh, model.odd.weight.placements, run_check=False
        )
        train(model, optimizer, steps=range(1))


@quiet
@world(2)
def test_counters_are_shared_and_copied(tmp_path: Path) -> None:
    """What the documentation says of them: written in place for all, replaced for one, and loaded by loading."""
    model, optimizer = build(True)
    mirror = Mirror(optimizer, foreach=True)
    train(model, optimizer, mirror, steps=range(2))
    dcp.save({"optimizer": optimizer.state_dict()}, checkpoint_id=tmp_path)
    one, other = model.odd.weight, model.extra.weight
    assert optimizer.state[one]["step"] is optimizer.state[other]["step"]
    for state, key in ((optimizer.state, one), (mirror.optimizer.state, mirror.copies[one])):
        state[key]["step"] = torch.tensor(0.0)
    train(model, optimizer, mirror, steps=range(2, 4))
    mirror.check()
    assert (optimizer.state[one]["step"], optimizer.state[other]["step"]) == (2, 4)
    saved = {"optimizer": optimizer.state_dict()}
    dcp.load(saved, checkpoint_id=tmp_path)
    assert optimizer.state[other]["step"] == 4
    optimizer.load_state_dict(saved["optimizer"])
    assert {float(optimizer.state[each]["step"]) for each in model.parameters()} == {2.0}


def counting(model: nn.Module, is_flat: bool) -> Any:
    """A group for each parameter, so that some have a single element here."""
    optimizer = Counting([{"params": [each]} for each in model.parameters()])
    return flat(optimizer, elementwise=True) if is_flat else optimizer


def assert_shown_alike(mine: tuple[nn.Module, Any], theirs: tuple[nn.Module, Any]) -> None:
    for a, b in zip(mine[0].parameters(), theirs[0].parameters(), strict=True):
        assert torch.equal(local(a), local(b))
        one, two = mine[1].state[a], theirs[1].state[b]
        assert {key: type(value) for key, value in one.items()} == {key: type(value) for key, value in two.items()}
        assert all(
            torch.equal(local(value), local(two[key])) and value.shape == two[key].shape for key, value in one.items()
        )


@pytest.mark.parametrize(("before", "after"), [(True, False), (False, True), (True, True)])
@world(2)
def test_counters_that_have_a_dimension(before: bool, after: bool) -> None:
    """As a plain optimizer shows them, on every rank; and each parameter has its own when they were loaded."""
    model, reference = sharded(), sharded()
    plain, first, second = counting(reference, False), counting(model, before), counting(model, after)
    train(reference, plain, steps=range(6))
    train(model, first, steps=range(3))
    second.load_state_dict(first.state_dict())
    train(model, second, steps=range(3, 6))
    assert_shown_alike((model, second), (reference, plain))
    assert {float(second.state[each]["step"]) for each in model.parameters()} == {6.0}
    assert any(local(each).numel() == 1 for each in model.parameters()) or torch.distributed.get_rank()


@pytest.mark.parametrize("kind", [optim.Adam, optim.ASGD, optim.NAdam])
@world(2)
def test_a_parameter_without_dimensions(kind: Any) -> None:
    """Its moments and its counters have the same shape."""
    pairs = []
    for is_flat in (True, False):
        model = sharded()
        scalar = nn.Parameter(distribute_tensor(torch.tensor(2.0), init_device_mesh("cpu", (2,)), [Replicate()]))
        optimizer = kind([*model.parameters(), scalar], lr=0.1)
        optimizer = flat(optimizer) if is_flat else optimizer
        for step in range(3):
            scalar.grad = torch.ones_like(scalar)
            train(model, optimizer, steps=[step])
        model.register_parameter("scalar", scalar)
        pairs.append((model, optimizer))
    assert_shown_alike(*pairs)


@pytest.mark.parametrize("is_flat", [False, True])
@world(2)
def test_state_that_belongs_to_no_parameter(is_flat: bool) -> None:
    """Kept, saved, changed from outside and removed by the step, as without flat; and the class's own `zero_grad`."""
    model, loaded = sharded(), sharded()
    optimizer, other = counting(model, is_flat), counting(loaded, is_flat)
    train(model, optimizer, steps=range(3))
    assert optimizer.state["steps"] == optimizer.state_dict()["state"]["steps"] == optimizer.zeroed == 3
    optimizer.state["steps"], optimizer.state["fresh"] = 10, True
    train(model, optimizer, steps=range(3, 4))
    assert optimizer.state["steps"] == 11 and "fresh" not in optimizer.state
    del optimizer.state["steps"]
    train(model, optimizer, steps=range(4, 5))
    assert optimizer.state["steps"] == 1
    other.load_state_dict(optimizer.state_dict())
    train(loaded, other, steps=range(1))
    assert other.state["steps"] == 2 and other.zeroed == 1
    assert len(other.state) == len(list(loaded.parameters())) + 1
