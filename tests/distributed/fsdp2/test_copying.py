"""`copy.deepcopy` of a sharded model; contract CLS-06 improved."""

from __future__ import annotations

import copy

import torch
from bed import world
from bed.models import case
from bed.parity import each_unit, train
from bed.stack import Stack, assert_at_rest, assert_gradients, loss_of, sharded, units
from torch import nn
from torch.distributed.tensor import DTensor

from unshard import FSDPModule, MixedPrecisionPolicy, fully_shard


@world(1, 2, 3)
def test_a_copy_trains_on_its_own() -> None:
    model, reference = sharded(), Stack()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss_of(model).backward()
    twin = copy.deepcopy(model)
    before = {name: p.detach().full_tensor().clone() for name, p in twin.named_parameters()}
    optimizer.step()
    optimizer.zero_grad()
    for name, parameter in twin.named_parameters():
        assert isinstance(parameter, DTensor) and parameter.grad is None
        torch.testing.assert_close(parameter.detach().full_tensor(), before[name], rtol=0, atol=0)
    assert isinstance(twin, FSDPModule) and isinstance(twin.blocks[0], FSDPModule)
    assert not {id(unit) for unit in units(twin)} & {id(unit) for unit in units(model)}
    for _ in range(2):
        loss_of(twin).backward()
        loss_of(reference).backward()
    assert_gradients(twin, reference)
    assert_at_rest(twin)
    assert all(parameter.grad is None for parameter in model.parameters())


@world(2)
def test_an_average_of_the_weights() -> None:
    """What EMA implementations do: copy once, then lerp shard by shard."""
    model = sharded(mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    average, optimizer = copy.deepcopy(model), torch.optim.SGD(model.parameters(), lr=0.1)
    for seed in range(2):
        loss_of(model, seed).backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for mine, theirs in zip(average.parameters(), model.parameters(), strict=True):
                mine.lerp_(theirs, 0.5)
    with torch.no_grad():
        assert loss_of(average).dtype == torch.bfloat16
    before, after = Stack().head.weight, model.head.weight.detach().full_tensor()
    between = average.head.weight.detach().full_tensor()
    assert (between - before).norm() < (after - before).norm()


@world(2)
def test_copies_of_models_with_special_parameters() -> None:
    """Tied weights stay tied, recurrent layers follow, lists of modules stay one unit; inside a plain module too."""
    for name in ("tied", "recurrent"):
        each = case(name)
        model = each.build()
        each_unit(each, fully_shard)(model)
        train(model, each, 1)
        twin = copy.deepcopy(nn.ModuleDict({"model": model}))["model"]
        first, second = train(model, each, 2), train(twin, each, 2)
        assert first.losses == second.losses
        if name == "tied":
            assert twin.head.weight is twin.tokens.weight and twin.head.weight is not model.head.weight
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    fully_shard([model[0], model[1]])
    fully_shard(model)
    twin = copy.deepcopy(model)
    assert fully_shard.state(twin[0]) is fully_shard.state(twin[1]) is not fully_shard.state(model[0])
    twin(torch.ones(2, 4)).sum().backward()
    assert twin[1].weight.grad is not None and model[1].weight.grad is None


@world(2, 3)
def test_copies_of_single_parameters_and_of_optimizers() -> None:
    """On every rank, whatever of the parameter lies there."""
    model = fully_shard(nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 4)))
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(2, 5)).sum().backward()
    optimizer.step()
    for parameter in model.parameters():
        assert parameter.storage_offset() == 0
        assert torch.equal(copy.deepcopy(parameter).full_tensor(), parameter.full_tensor())
    copied = copy.deepcopy(optimizer)
    for mine, theirs in zip(copied.param_groups[0]["params"], model.parameters(), strict=True):
        assert torch.equal(
            copied.state[mine]["exp_avg"].full_tensor(), optimizer.state[theirs]["exp_avg"].full_tensor()
        )
