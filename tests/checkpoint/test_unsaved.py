"""What a run holds, by name: nested containers, attributes of objects, and what cannot be looked into."""

from __future__ import annotations

import random
from collections import OrderedDict
from typing import Any

import numpy as np
import torch
from torch import nn

from unshard.checkpoint.prove_resume import leaves, saved_state, unsaved_state


def found(value: Any, inside_objects: bool = False) -> dict[str, Any]:
    return dict(leaves(value, "x", inside_objects))


def test_containers() -> None:
    assert found({"a": [1, (2.5, None)], "b": OrderedDict(c=True)}) == {
        "x.a[0]": 1,
        "x.a[1][0]": 2.5,
        "x.a[1][1]": None,
        "x.b.c": True,
    }
    assert type(found(np.float64(2.5))["x"]) is float  # as it is after loading
    assert found(np.int64(3)) == {"x": 3} and found(np.array([1, 2])) == {"x[0]": 1, "x[1]": 2}
    assert found({2, 1}) == {"x": ["1", "2"]}


def test_a_list_with_two_names_and_a_cycle() -> None:
    once: list[Any] = [1]
    assert found({"a": once, "b": once}) == {"x.a[0]": 1, "x.b[0]": 1}
    once.append(once)
    assert found(once) == {"x[0]": 1}


def test_long_lists() -> None:
    numbers = found(list(range(1000)))
    assert torch.equal(numbers["x"], torch.arange(1000))
    assert found([2**80] * 101) != found([2**80] * 100 + [2**81])
    assert found(["a"] * 101) != found(["a"] * 100 + ["b"])
    dicts = [{"a": each} for each in range(101)]
    assert len(found(dicts)) == 101  # what is saved is compared wholly
    assert found(dicts, inside_objects=True) == {"x": "101 items"}


class Reader:
    def __init__(self) -> None:
        self.position, self.chance, self.self = 3, random.Random(1), self
        self.function, self.model = print, nn.Linear(1, 1)
        self.inner = [Inner()]


class Inner:
    name = "a class attribute"

    def __init__(self) -> None:
        self.epoch = 2


def test_attributes_of_objects() -> None:
    assert found(Reader()) == {}
    inside = found(Reader(), inside_objects=True)
    assert (inside.pop("x.position"), inside.pop("x.inner[0].epoch")) == (3, 2)
    assert all(name.startswith("x.chance") for name in inside) and inside["x.chance[1]"].numel() == 625


def test_tensors_without_memory_are_left_out() -> None:
    view = torch.arange(6.0)[2:4]
    assert torch.equal(found(view)["x"], torch.tensor([2.0, 3.0]))
    view.untyped_storage().resize_(0)  # as that of an unsharded parameter
    assert found(view) == found(torch.empty(2, device="meta")) == {}
    assert list(found(torch.empty(0))) == ["x"]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.second, self.first = nn.Linear(2, 2), nn.Linear(2, 2)
        self.register_buffer("kept", torch.ones(1))
        self.register_buffer("dropped", torch.ones(1), persistent=False)
        self.calls = 0


def test_what_is_saved_and_what_is_not() -> None:
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    model.second.weight.grad = torch.ones(2, 2)
    optimizer.step()
    run = {
        "model": model,
        "optimizer": optimizer,
        "reader": Reader(),
        "other": torch.optim.SGD(model.parameters(), 0.3),
    }
    saved, unsaved = saved_state(run), unsaved_state(run)
    tensors = [name for name in saved if name.startswith(("model/", "optimizer/momentum"))]
    weights = ["kept", "second.weight", "second.bias", "first.weight", "first.bias"]
    assert tensors == [*(f"model/{name}" for name in weights), "optimizer/momentum_buffer/second.weight"]
    assert saved["optimizer/param_groups[0].lr"] == 0.1 and "rng.torch" in saved
    assert unsaved["model.calls"] == 0 and unsaved["model.second.training"] is True
    assert "model.dropped" in unsaved and "model.kept" not in unsaved
    assert unsaved["gradients"] == "of 1 parameters" and unsaved["reader.position"] == 3
    assert unsaved["other.param_groups[0].lr"] == 0.3
