"""An embedding and a head that share their weight, in different units."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from bed.models import Batch, Case, Tied, case
from torch import nn

from unshard import fully_shard


class EvenTied(Tied):
    ROWS = 24  # divisible by 1, 2, 3 and 4 ranks, which the usual 29 are not


def tied_case(even: bool = False) -> Case:
    usual = case("tied")
    return replace(usual, name="tied, even", build=_even, batch=_even_batch) if even else usual


def _even() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return EvenTied()


def _even_batch(step: int) -> Batch:
    inputs, targets = case("tied").batch(step)
    return inputs % EvenTied.ROWS, targets % EvenTied.ROWS


def untied(model: nn.Module) -> nn.Module:
    """With a weight of the head's own, whose values nobody should see."""
    model.head.weight = nn.Parameter(torch.full_like(model.head.weight, 7.0))
    return model


def tie(model: nn.Module, how: str = "setattr") -> None:
    if how == "setattr":
        model.head.weight = model.tokens.weight
    elif how == "register":
        model.head.register_parameter("weight", model.tokens.weight)
    else:
        model.head._parameters["weight"] = model.tokens._parameters["weight"]


def shard_tied(
    model: nn.Module, order: str = "tokens head", shard: Callable[..., object] = fully_shard, **options: object
) -> nn.Module:
    """`order`: which of the two modules are units, and in which order; the root has the other."""
    for name in order.split():
        shard(getattr(model, name), **options)
    for layer in model.hidden:
        shard(layer, **options)
    shard(model, **options)
    return model


def sharded_tied(
    order: str = "tokens head", after: str | None = None, even: bool = False, **options: object
) -> nn.Module:
    """`after`: how the weights are tied after sharding; None: they are tied before."""
    model = tied_case(even).build()
    if after is None:
        return shard_tied(model, order, **options)
    shard_tied(untied(model), order, **options)
    tie(model, after)
    return model
