"""Dtypes that do not match inside a user's forward: the message names the module, the dtypes and the remedy."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
from bed import world
from bed.stack import assert_at_rest
from torch import nn

from unshard import MixedPrecisionPolicy, fully_shard

F32, B16 = torch.float32, torch.bfloat16


class Block(nn.Module):
    def __init__(self, between: Callable[[torch.Tensor], torch.Tensor] = lambda x: x):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.between = between

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.between(self.first(x)))


class Model(nn.Module):
    def __init__(self, block: nn.Module):
        super().__init__()
        self.blocks = nn.ModuleList([block])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks[0](x)


def failing(model: nn.Module, *inputs: torch.Tensor) -> str:
    with pytest.raises(RuntimeError) as caught:
        model(*inputs)
    assert_at_rest(model)
    assert str(caught.value).count("unshard:") == 1
    assert not str(caught.value).startswith("\n")  # torch's own words come first
    return str(caught.value).split("unshard: ")[1]


def sharded(block: nn.Module, policy: MixedPrecisionPolicy, root: MixedPrecisionPolicy | None = None) -> nn.Module:
    model = Model(block)
    fully_shard(model.blocks[0], mp_policy=policy)
    return fully_shard(model, mp_policy=root)


@world(2)
def test_a_tensor_widened_inside_forward() -> None:
    model = sharded(Block(lambda x: x.float()), MixedPrecisionPolicy(B16))
    text = failing(model, torch.randn(2, 4))
    assert "Linear 'blocks.0.second'" in text
    assert "weight (bfloat16), bias (bfloat16)" in text and "input (float32)" in text
    assert 'overrides={"second.*": torch.float32}' in text and "output_dtype" in text
    mended = sharded(Block(lambda x: x.float()), MixedPrecisionPolicy(B16, overrides={"second.*": F32}))
    assert mended(torch.randn(2, 4)).dtype == B16


@world(2)
def test_inputs_that_are_not_cast() -> None:
    model = sharded(Block(), MixedPrecisionPolicy(B16, cast_forward_inputs=False))
    text = failing(model, torch.randn(2, 4))
    assert "'blocks.0.first'" in text and "cast_forward_inputs=False: set it to True" in text
    model = fully_shard(nn.Linear(4, 4).to(B16))
    text = failing(model, torch.randn(2, 4))
    assert "Linear, the root" in text and "set param_dtype=torch.bfloat16" in text


class Shifted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))
        self.register_buffer("shift", torch.randn(4, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight @ self.shift


@world(2)
def test_a_buffer_of_another_dtype() -> None:
    text = failing(sharded(Shifted(), MixedPrecisionPolicy(B16)), torch.randn(2, 4))
    assert "Shifted 'blocks.0'" in text and "buffers shift (float32)" in text
    assert "buffer_dtype=torch.bfloat16" in text
    mended = sharded(Shifted(), MixedPrecisionPolicy(B16, buffer_dtype=B16))
    assert mended(torch.randn(2, 4)).dtype == B16


@world(2)
def test_an_override_of_half_a_module() -> None:
    text = failing(sharded(Block(), MixedPrecisionPolicy(B16, overrides={"first.bias": F32})), torch.randn(2, 4))
    assert "bias (float32)" in text and "match all parameters" in text


class Odd(nn.Module):
    """Its author calls `self` something else, and uses a child's weight directly."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(this, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(this.left(x), this.right.weight)


@world(2)
def test_a_childs_weight_used_directly() -> None:
    text = failing(sharded(Odd(), MixedPrecisionPolicy(B16, overrides={"right.*": F32})), torch.randn(2, 4))
    assert "Odd 'blocks.0'" in text and "right.weight (float32)" in text and "outside its own module" in text


@world(2)
def test_a_batch_norm_is_to_be_overridden() -> None:
    """Where its statistics would be rounded, another remedy comes first."""
    model = sharded(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), MixedPrecisionPolicy(B16))
    text = failing(model, torch.randn(6, 4))
    assert 'overrides={"1.*": torch.float32}' in text and text.index("overrides") < text.index("buffer_dtype")


@world(2)
def test_a_value_that_is_not_in_sight() -> None:
    model = sharded(Block(lambda x: x), MixedPrecisionPolicy(B16))
    model.blocks[0].second.forward = lambda x: torch.nn.functional.linear(x.float(), model.blocks[0].second.weight)
    text = failing(model, torch.randn(2, 4))
    assert "Block 'blocks.0'" in text and "inside its forward" in text


class Broken(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("no such dtype, said the user")


@world(2)
def test_other_errors_are_left_alone() -> None:
    model = sharded(Broken(4, 4), MixedPrecisionPolicy(B16))
    with pytest.raises(RuntimeError) as caught:
        model(torch.randn(2, 4))
    assert str(caught.value) == "no such dtype, said the user"
    model = sharded(Block(), MixedPrecisionPolicy(B16))
    with pytest.raises(RuntimeError, match="shape") as caught:
        model(torch.randn(2, 5))
    assert not re.search("unshard", str(caught.value))
