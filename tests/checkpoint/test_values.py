"""State that is not a tensor of the model, as JSON and back."""

from __future__ import annotations

import json
import math
from collections import Counter, OrderedDict, defaultdict
from enum import IntEnum
from typing import Any

import numpy as np
import pytest
import torch

from unshard import CheckpointError
from unshard.checkpoint.values import INLINE_BYTES, decode, encode, stored_names


class Color(IntEnum):
    RED = 1


def round_trip(value: Any) -> Any:
    stored: dict[str, torch.Tensor] = {}
    text = json.dumps(encode(value, "x", stored.__setitem__))
    assert sorted(stored_names(json.loads(text))) == sorted(stored)
    return decode(json.loads(text), "x", stored.__getitem__)


@pytest.mark.parametrize(
    "value",
    [
        *(None, True, False, 0, -(2**70), 0.1, 1e-320, math.inf, -0.0, "a\n\0é", b"\0\xff", [], (), {}, [[], ()]),
        {"$": "tuple", "items": [1]},
        {1: "a", (2, 3): {"b": (1,)}, None: 2},
        OrderedDict(b=1, a=2),
        Counter({3: 1, 5: 2}),
        {"nested": [({"deep": [1.5, (None,)]},)]},
    ],
)
def test_values_come_back_with_their_types(value: Any) -> None:
    found = round_trip(value)
    assert found == value and type(found) is type(value)
    assert repr(found) == repr(value)


def test_nan_and_numpy_floats() -> None:
    assert math.isnan(round_trip(math.nan))
    assert round_trip(np.float64(0.1)) == 0.1
    for number in (np.float32(0.1), np.float16(0.5), np.int64(-3), np.uint8(200), np.bool_(True)):
        found = round_trip({"n": [number]})["n"][0]
        assert found == number and type(found) is type(number.item())
    for refused in (np.zeros(1), np.complex64(1), np.longdouble(1), np.datetime64("2020-01-01")):
        with pytest.raises(CheckpointError, match="cannot hold"):
            round_trip(refused)


DTYPES = [torch.float32, torch.bfloat16, torch.complex64, torch.float8_e4m3fn, torch.bool, torch.int64, torch.uint16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (0,), (3, 2), (100, 100)])
def test_tensors(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    value = (torch.rand(shape) * 5).to(dtype)
    found = round_trip({"t": [value]})["t"][0]
    assert found.dtype == dtype and found.shape == value.shape
    assert torch.equal(found.reshape(-1).view(torch.uint8), value.reshape(-1).view(torch.uint8))


def test_large_tensors_are_stored_beside() -> None:
    stored: dict[str, torch.Tensor] = {}
    value = [torch.zeros(INLINE_BYTES, dtype=torch.uint8), torch.zeros(INLINE_BYTES + 1, dtype=torch.uint8)]
    assert "data" in encode(value, "x", stored.__setitem__)[0]
    assert list(stored) == ["x[1]"]


def test_strided_and_conjugated_tensors() -> None:
    value = torch.randn(4, 6)[::2, ::3].T
    assert torch.equal(round_trip(value), value)
    value = torch.randn(5, dtype=torch.complex64).conj()
    assert torch.equal(round_trip(value), value)


@pytest.mark.parametrize("value", [object(), {1, 2}, defaultdict(int), Color.RED, np.zeros(1), torch.float32, len])
def test_other_types_are_refused_with_their_place(value: Any) -> None:
    with pytest.raises(CheckpointError, match=r"scheduler\.a\[1\]\.b is a "):
        encode({"a": [0, {"b": value}]}, "scheduler", lambda *_: None)


@pytest.mark.parametrize(
    "value",
    [
        {"$": "code", "data": "x"},
        {"$": "tuple"},
        {"$": "tuple", "items": 3},
        {"$": "dict", "items": [[1]]},
        {"$": "dict", "items": [[[], 1]]},
        {"$": "bytes", "data": "not base64!"},
        {"$": "tensor", "dtype": "object", "shape": [], "data": ""},
        {"$": "tensor", "dtype": "float32", "shape": [2], "data": "AAAA"},
        {"$": "tensor", "dtype": "float32", "shape": [-1], "data": "AAAAAA=="},
        {"$": "tensor", "dtype": "float32", "shape": [10**12], "data": "AAAAAA=="},
        {"$": ["tensor"]},
        {"$": "Counter", "items": [[1, {"$": "?"}]]},
    ],
)
def test_malformed_json_is_refused(value: Any) -> None:
    with pytest.raises(CheckpointError, match="malformed"):
        decode([value], "data", lambda name: torch.zeros(()))
