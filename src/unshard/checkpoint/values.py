"""Converts the state of optimizers, schedulers, scalers, data and random number generators to JSON and back.

State may contain dicts, lists, tuples, numbers, strings, bytes, None and tensors. NumPy numbers become Python numbers.
Small tensors are stored inside the JSON. Large tensors are stored as tensors of the checkpoint, and the JSON contains
their names. A JSON object with the key `$` represents a type that JSON does not have.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import random
import sys
from collections import Counter, OrderedDict
from collections.abc import Callable
from enum import Enum
from math import prod
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from ..errors import CheckpointError

_NAMES = (
    "bool uint8 uint16 uint32 uint64 int8 int16 int32 int64 float16 bfloat16 float32 float64 complex32 complex64 "
    "complex128 float8_e4m3fn float8_e5m2 float8_e4m3fnuz float8_e5m2fnuz float8_e8m0fnu"
)
DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in _NAMES.split()}
_BY_DTYPE = {dtype: name for name, dtype in DTYPES.items()}


def name_of_dtype(dtype: torch.dtype, where: str) -> str:
    if dtype not in _BY_DTYPE:
        raise CheckpointError(f"{where} has the dtype {dtype}, which a checkpoint cannot hold. Convert it first.")
    return _BY_DTYPE[dtype]


INLINE_BYTES = 8192
"""Tensors up to this size are stored inside the JSON, for example counters and states of random generators."""

MANY_RANKS = 64
"""In larger jobs, values of every rank are stored outside of the manifest."""

_MAPPINGS: dict[type, str] = {dict: "dict", OrderedDict: "OrderedDict", Counter: "Counter"}
_MAPPING_TYPES: dict[str, type] = {name: kind for kind, name in _MAPPINGS.items()}

Store = Callable[[str, torch.Tensor], None]
"""A function that takes the name and the value of a tensor that is too large for the JSON."""


def encode(value: Any, path: str, store: Store) -> Any:
    """Convert `value` to JSON, and pass large tensors to `store`. Tensor names and error messages contain `path`."""
    if value is None or isinstance(value, bool):
        return value
    if type(plain := as_plain(value)) in (str, float, int):
        return plain
    if isinstance(value, torch.Tensor):
        return _encode_tensor(value, path, store)
    if _is_scalar_of_numpy(value):
        return encode(value.item(), path, store)
    if type(value) in (list, tuple):
        items = [encode(each, f"{path}[{number}]", store) for number, each in enumerate(value)]
        return items if type(value) is list else {"$": "tuple", "items": items}
    if isinstance(value, bytes):
        return {"$": "bytes", "data": base64.b64encode(value).decode()}
    if type(value) in _MAPPINGS:
        if type(value) is dict and all(type(key) is str and key != "$" for key in value):
            return {key: encode(each, f"{path}.{key}", store) for key, each in value.items()}
        items = [
            [encode(key, f"a key of {path}", _refuse_tensor), encode(each, f"{path}.{key}", store)]
            for key, each in value.items()
        ]
        return {"$": _MAPPINGS[type(value)], "items": items}
    raise CheckpointError(
        f"{path} is a {type(value).__module__}.{type(value).__qualname__}, which a checkpoint cannot hold. To load "
        "without running code, it holds only dicts, lists, tuples, numbers, strings, bytes, None and tensors. Convert "
        "it in state_dict(), and back in load_state_dict()."
    )


def encode_apart(value: Any, path: str, store: Store, ranks: int) -> Any:
    """Convert one rank's `value` to JSON. In a large job, store the JSON as a tensor, which that rank's file contains.

    Otherwise, the manifest would consist of little else. Tensors in `value` must be small.
    """
    encoded = encode(value, path, store)
    if ranks <= MANY_RANKS:
        return encoded
    store(path, torch.frombuffer(bytearray(json.dumps(encoded).encode()), dtype=torch.uint8))
    return {"$": "json", "name": path}


def as_plain(value: Any) -> Any:
    """Convert an instance of a subclass of str, float or int (such as NumPy's float64) to str, float or int."""
    if not isinstance(value, Enum | bool):
        for kind in (str, float, int):
            if isinstance(value, kind):
                return kind(value)
    return value


def _is_scalar_of_numpy(value: Any) -> bool:
    numpy: Any = sys.modules.get("numpy")
    # Complex numbers and long doubles do not convert exactly to a Python int or float.
    return numpy is not None and isinstance(value, numpy.generic) and isinstance(value.item(), int | float)


def _encode_tensor(value: torch.Tensor, path: str, store: Store) -> Any:
    if isinstance(value, DTensor) or value.layout is not torch.strided or value.is_quantized:
        raise CheckpointError(
            f"{path} is a {type(value).__name__} of layout {value.layout}. State outside the model and its optimizer "
            "must be dense tensors. Convert it in state_dict()."
        )
    if value.nbytes > INLINE_BYTES:
        store(path, value)
        return {"$": "tensor", "name": path}
    flat = value.detach().cpu().resolve_conj().resolve_neg().reshape(-1).contiguous()
    data = bytes(flat.view(torch.uint8).numpy()) if flat.numel() else b""
    dtype = name_of_dtype(value.dtype, path)
    return {"$": "tensor", "dtype": dtype, "shape": list(value.shape), "data": base64.b64encode(data).decode()}


def _refuse_tensor(path: str, value: torch.Tensor) -> None:
    raise CheckpointError(f"{path} is a tensor, which cannot be a key.")


def stored_names(value: Any) -> list[str]:
    """Return the names of the tensors that the JSON `value` names but does not contain."""
    if isinstance(value, dict):
        if value.get("$") in ("tensor", "json") and isinstance(value.get("name"), str):
            return [value["name"]]
        value = list(value.values())
    return [name for each in value for name in stored_names(each)] if isinstance(value, list) else []


def decode(value: Any, path: str, stored: Callable[[str], torch.Tensor]) -> Any:
    """Convert untrusted JSON to the value that `encode` received. `stored(name)` returns a tensor outside the JSON."""
    try:
        return _decode(value, path, stored)
    except (KeyError, TypeError, ValueError, RuntimeError, RecursionError, binascii.Error) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"The checkpoint's value {path} is malformed: {error}.") from error


def _decode(value: Any, path: str, stored: Callable[[str], torch.Tensor]) -> Any:
    if isinstance(value, list):
        return [_decode(each, path, stored) for each in value]
    if not isinstance(value, dict):
        return value
    kind = value.get("$")
    if kind is None:
        return {key: _decode(each, f"{path}.{key}", stored) for key, each in value.items()}
    if kind == "tuple":
        return tuple(_decode(each, path, stored) for each in value["items"])
    if kind == "bytes":
        return base64.b64decode(value["data"], validate=True)
    if kind == "tensor":
        return stored(value["name"]) if "name" in value else _decode_tensor(value)
    if kind == "json":
        return _decode(json.loads(stored(value["name"]).numpy().tobytes()), path, stored)
    if kind in _MAPPING_TYPES:
        items = [(_decode(key, path, stored), _decode(each, path, stored)) for key, each in value["items"]]
        return _MAPPING_TYPES[kind](dict(items))
    raise ValueError(f"unknown kind {kind!r}")


def _decode_tensor(value: dict[str, Any]) -> torch.Tensor:
    data, shape = base64.b64decode(value["data"], validate=True), value["shape"]
    if not all(type(length) is int and length >= 0 for length in shape):
        raise ValueError(f"shape {shape!r}")
    dtype = DTYPES[value["dtype"]]
    if len(data) != prod(shape) * dtype.itemsize:
        raise ValueError(f"{len(data)} bytes for a tensor of shape {shape} and dtype {dtype}")
    if not data:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).view(dtype).reshape(shape)


def rng_state() -> dict[str, Any]:
    state: dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state()  # for this rank's device
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        kind, keys, position, has_gauss, gauss = numpy.random.get_state()
        state["numpy"] = [kind, torch.from_numpy(keys.astype("int64")), position, has_gauss, gauss]
    return state


def check_rng_state(state: Any) -> None:
    """Set `state` on temporary generators, and raise a CheckpointError if `set_rng_state(state)` would fail."""
    try:
        torch.Generator().set_state(state["torch"])
        random.Random().setstate(state["python"])
        if "cuda" in state and torch.cuda.is_available():
            torch.Generator("cuda").set_state(state["cuda"])
        numpy: Any = sys.modules.get("numpy")
        if "numpy" in state and numpy is not None:
            numpy.random.RandomState().set_state(_numpy_state(state))
    except (AttributeError, KeyError, TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise CheckpointError(f"The state of the random number generators is malformed: {error}.") from error


def set_rng_state(state: dict[str, Any]) -> None:
    """Restore the random number generators in `state`. Generators that `state` does not contain stay unchanged."""
    torch.set_rng_state(state["torch"])
    random.setstate(state["python"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
    numpy: Any = sys.modules.get("numpy")
    if "numpy" in state and numpy is not None:
        numpy.random.set_state(_numpy_state(state))


def _numpy_state(state: dict[str, Any]) -> tuple[Any, ...]:
    kind, keys, *others = state["numpy"]
    return kind, keys.numpy().astype("uint32"), *others


def seed_new_rank(step: int, rank: int) -> None:
    """Seed the generators of a rank that the saving job did not have. The seed depends only on `step` and `rank`."""
    seed = int.from_bytes(hashlib.sha256(f"unshard {step} {rank}".encode()).digest()[:8], "big")
    torch.manual_seed(seed)
    random.seed(seed)
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed % 2**32)
