"""Parameters that came to a model after it was sharded, or that were shared with a module outside it."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable

import pytest
import torch
from bed import world
from bed.stack import Stack, batch, sharded
from torch import nn

from unshard import FullyShardedDataParallel as FSDP
from unshard import fully_shard

UNMANAGED = r"No unit manages these parameters: {}\. .*each of the 2 ranks trains its own"


def add_layer(model: nn.Module) -> str:
    model.extra = nn.Linear(2, 2, bias=False)
    return r"extra\.weight"


def add_to_a_list(model: nn.Module) -> str:
    model.blocks.append(nn.Linear(2, 2, bias=False))
    return rf"blocks\.{len(model.blocks) - 1}\.weight"


def add_parameter(model: nn.Module) -> str:
    model.blocks[0].register_parameter("gain", nn.Parameter(torch.ones(2)))
    return r"blocks\.0\.gain"


def replace_layer(model: nn.Module) -> str:
    model.head = nn.Linear(model.head.in_features, model.head.out_features)
    return r"head\.weight, head\.bias"


def wrap_layer(model: nn.Module) -> str:
    """As adapters are put around layers that are sharded."""
    model.head = nn.Sequential(model.head, nn.Linear(2, 2, bias=False))
    return r"head\.1\.weight"


def wrap_in_a_list(model: nn.Module) -> str:
    model.blocks[0] = nn.Sequential(model.blocks[0], nn.Linear(2, 2, bias=False))
    return r"blocks\.0\.1\.weight"


def add_below_a_layer(model: nn.Module) -> str:
    model.blocks[0].first.add_module("adapter", nn.Linear(2, 2, bias=False))
    return r"blocks\.0\.first\.adapter\.weight"


@pytest.mark.parametrize(
    "add",
    [add_layer, add_to_a_list, add_parameter, replace_layer, wrap_layer, wrap_in_a_list, add_below_a_layer],
)
@pytest.mark.parametrize("trained", [False, True], ids=["before", "trained"])
@world(2)
def test_what_came_after_sharding_is_named_once(add: object, trained: bool) -> None:
    model = sharded(Stack(1))
    if trained:
        model(batch()).sum().backward()
    model.forward = lambda x: x * next(model.head.parameters()).sum()  # not through the modules, which change
    names = add(model)
    with torch.no_grad():
        model(batch())  # nothing is trained here
    with pytest.warns(UserWarning, match=UNMANAGED.format(names)) as caught:
        model(batch())
    assert [each.filename for each in caught] == [__file__]
    model(batch())
    model.other = nn.Linear(1, 1, bias=False)
    with pytest.warns(UserWarning, match=UNMANAGED.format(r"other\.weight")):
        model(batch())


@world(2)
def test_what_is_trained_later() -> None:
    """An adapter that is frozen until the rest has been trained."""
    model = sharded(Stack(1))
    model.adapter = nn.Linear(2, 2, bias=False).requires_grad_(False)
    for _ in range(3):
        model(batch()).sum().backward()
    model.adapter.requires_grad_(True)
    with pytest.warns(UserWarning, match=UNMANAGED.format(r"adapter\.weight")):
        model(batch())
    model(batch())


@pytest.mark.parametrize("how", ["units", "flat", "originals"])
@world(2)
def test_what_comes_past_the_hooks_of_torch(how: str) -> None:
    """Libraries that quantise models write to `_modules`. The next forward whose number is a power of two finds it."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    top = fully_shard(model) if how == "units" else FSDP(model, use_orig_params=how == "originals")
    for _ in range(2):
        top(torch.ones(1, 2)).sum().backward()
    model._modules["1"] = nn.Sequential(model[1], nn.Linear(2, 2, bias=False))
    top(torch.ones(1, 2)).sum().backward()
    with pytest.warns(UserWarning, match=UNMANAGED.format(r"\S*1\.1\.weight")):
        top(torch.ones(1, 2))


@world(2)
def test_nothing_is_said_of_what_is_known_or_not_trained() -> None:
    """Ignored parameters, also of a copy and under other objects; frozen ones; a layer that is sharded itself."""
    model = Stack(1)
    fully_shard(model.blocks[0])
    fully_shard(model, ignored_params={model.head.bias})
    twin = copy.deepcopy(model)
    for each in (model, twin):
        each.head.bias = nn.Parameter(torch.zeros_like(each.head.bias))
        each.frozen = nn.Linear(2, 2).requires_grad_(False)
        each.own = fully_shard(nn.Linear(2, 2))
        each(batch()).sum().backward()


@world(1)
def test_one_rank_has_nothing_to_reduce() -> None:
    model = sharded(Stack(1))
    add_layer(model)
    model(batch()).sum().backward()


@pytest.mark.parametrize("originals", [False, True], ids=["flat", "originals"])
@world(2)
def test_what_came_after_wrapping(originals: bool) -> None:
    layer = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2))
    inner = FSDP(layer[1], use_orig_params=originals)
    layer[1] = inner
    model = FSDP(layer, use_orig_params=originals, ignored_modules=[layer[2]])
    model(torch.ones(1, 2)).sum().backward()
    inner.module.extra = nn.Linear(2, 2, bias=False)
    with pytest.warns(UserWarning, match=r"No unit manages these parameters: .*extra\.weight\."):
        model(torch.ones(1, 2))


@world(1, 2)
def test_weights_that_are_shared_with_a_module_outside() -> None:
    embedding, head = nn.Embedding(4, 3), nn.Linear(3, 4, bias=False)
    head.weight = embedding.weight
    fully_shard(head)
    with pytest.warns(UserWarning, match=r"'weight' of Unit '\(root\)'.*'weight' of a Embedding that no unit contains"):
        head(torch.ones(1, 3))
    head(torch.ones(1, 3))


@world(2)
def test_an_original_parameter_that_no_module_has_is_nobodys_loss() -> None:
    model = nn.Linear(3, 4)
    before = list(model.parameters())
    fully_shard(model)(torch.ones(1, 3))
    frozen, head = nn.Embedding(4, 3).requires_grad_(False), nn.Linear(3, 4, bias=False)
    head.weight = frozen.weight
    fully_shard(head)(torch.ones(1, 3))
    assert len(before) == 2


@pytest.mark.parametrize("front_end", [fully_shard, FSDP])
@world(2)
def test_a_root_that_was_never_sharded(front_end: Callable[..., nn.Module]) -> None:
    """Its own parameters are trained by each rank alone. Said once per optimizer, and not of frozen parameters."""
    model = Stack()
    for number, block in enumerate(model.blocks):
        model.blocks[number] = front_end(block)
    outside = [name for name, _ in model.named_parameters() if not name.startswith("blocks.")]
    assert outside
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model(batch()).sum().backward()
    with pytest.warns(UserWarning, match=UNMANAGED.format(re.escape(", ".join(outside)))):
        optimizer.step()
    optimizer.step()
    for name in outside:
        model.get_parameter(name).requires_grad_(False)
    torch.optim.SGD(model.parameters(), 0.1).step()


@world(2)
def test_parameters_of_another_model() -> None:
    """No module contains both: they may be reduced in another way."""
    model, other = sharded(), nn.Linear(2, 2)
    optimizer = torch.optim.SGD([*model.parameters(), *other.parameters()], 0.1)
    model(batch()).sum().backward()
    optimizer.step()
