"""Tensors inside the arguments and results of forward."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, namedtuple

import pytest
import torch
from torch.nn.utils.rnn import pack_sequence, pad_packed_sequence

from unshard.engine.forward_tensors import cast_floats, map_tensors, tensors_in
from unshard.errors import StateError

Point = namedtuple("Point", "x y")


@dataclasses.dataclass(frozen=True)
class Inner:
    tensor: torch.Tensor
    name: str


@dataclasses.dataclass
class Outer:
    inner: Inner
    items: list


def test_containers_keep_their_type() -> None:
    """Contract MP-16, MP-17."""
    tensor, number = torch.ones(2), torch.ones(2, dtype=torch.int64)
    value = {
        "tuple": (tensor, 3, None),
        "list": [tensor, "text"],
        "named": Point(tensor, number),
        "ordered": OrderedDict(a=tensor),
        "data": Outer(Inner(tensor, "n"), [tensor]),
        "set": {1, 2},
    }
    cast = cast_floats(value, torch.bfloat16)
    assert {key: type(item) for key, item in cast.items()} == {key: type(item) for key, item in value.items()}
    assert [each.dtype for each in tensors_in(cast)].count(torch.bfloat16) == 6
    assert cast["named"].y is number
    assert cast["tuple"][1:] == (3, None) and cast["data"].inner.name == "n"


@dataclasses.dataclass
class Output(OrderedDict):
    """A dataclass that is a dict besides, as the outputs of transformers are."""

    loss: torch.Tensor
    hidden: tuple

    def __post_init__(self) -> None:
        self.update(loss=self.loss, hidden=self.hidden)


def test_a_dataclass_that_is_a_dict_stays_one() -> None:
    """Contract MP-17: else a model that reads `output.loss` would find a plain dict."""
    output = Output(torch.ones(2), (torch.ones(3), None))
    cast = cast_floats({"out": output}, torch.bfloat16)["out"]
    assert type(cast) is Output and output.loss.dtype == torch.float32
    assert cast.loss is cast["loss"] and cast.loss.dtype == torch.bfloat16
    assert cast.hidden is cast["hidden"] and cast.hidden[0].dtype == torch.bfloat16 and cast.hidden[1] is None
    assert [each.shape for each in tensors_in(output)] == [(2,), (3,)]


def test_the_same_dtype_is_the_same_tensor() -> None:
    tensor = torch.ones(2)
    assert cast_floats((tensor,), torch.float32)[0] is tensor
    assert cast_floats(tensor, None) is tensor


def test_the_cast_is_differentiable() -> None:
    """Contract MP-18."""
    tensor = torch.ones(2, requires_grad=True)
    cast_floats([tensor], torch.bfloat16)[0].sum().backward()
    assert tensor.grad.dtype == torch.float32


def test_a_value_that_contains_itself() -> None:
    """Contract RUN-06."""
    loop: list = []
    loop.append(loop)
    with pytest.raises(StateError, match="more than 128 levels"):
        map_tensors(lambda tensor: tensor, loop)
    with pytest.raises(StateError, match="more than 128 levels"):
        list(tensors_in(loop))


def test_packed_sequences_are_cast() -> None:
    """Contract MP-17, QK-14: their data; the batch sizes stay as they are."""
    packed = pack_sequence([torch.randn(2, 3), torch.randn(4, 3)], enforce_sorted=False)
    cast = cast_floats({"x": packed}, torch.float64)["x"]
    assert type(cast) is type(packed) and cast.data.dtype == torch.float64
    assert cast.batch_sizes is packed.batch_sizes and torch.equal(cast.sorted_indices, packed.sorted_indices)
    back, lengths = pad_packed_sequence(cast)
    assert back.shape == (4, 2, 3) and lengths.tolist() == [2, 4]
