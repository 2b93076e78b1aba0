"""The header of a safetensors file.

8 bytes with the length of the header, the header, the tensors one after the other:

    {"__metadata__": {"format": "pt"}, "bias": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}, ...}

Offsets count from the end of the header. A file may come from anywhere, so `read_header` takes nothing for granted.
"""

from __future__ import annotations

import json
import os
import stat
import struct
from collections.abc import Iterable
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ..errors import CheckpointError
from .dtypes import DTYPES

_NAMES = (
    "F64=float64 F32=float32 F16=float16 BF16=bfloat16 I64=int64 I32=int32 I16=int16 I8=int8 U64=uint64 U32=uint32 "
    "U16=uint16 U8=uint8 BOOL=bool C64=complex64 F8_E4M3=float8_e4m3fn F8_E5M2=float8_e5m2 F8_E4M3FNUZ=float8_e4m3fnuz "
    "F8_E5M2FNUZ=float8_e5m2fnuz"
)
CODES: dict[str, torch.dtype] = {code: DTYPES[name] for code, name in (pair.split("=") for pair in _NAMES.split())}
CODE_OF = {dtype: code for code, dtype in CODES.items()}
MAX_HEADER_BYTES = 100_000_000
"""As the package safetensors has it."""
INDEX = "model.safetensors.index.json"
METADATA = "__metadata__"
_MAX = 2**60


class HeaderEntry(NamedTuple):
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


class Header(NamedTuple):
    tensors: dict[str, HeaderEntry]
    metadata: dict[str, str]
    raw: bytes
    """As it is in the file."""


def header_bytes(tensors: Iterable[tuple[str, HeaderEntry]], metadata: dict[str, str]) -> bytes:
    """What a file begins with. The tensors have to follow in this order."""
    header: dict[str, Any] = {METADATA: metadata}
    end = 0
    for name, entry in tensors:
        begin, end = end, end + entry.nbytes
        header[name] = {"dtype": CODE_OF[entry.dtype], "shape": entry.shape, "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the tensors begin at a multiple of 8, and can be read where they lie
    if len(text) > MAX_HEADER_BYTES:
        raise CheckpointError(
            f"The header of a file has {len(text)} bytes, of at most {MAX_HEADER_BYTES}: it names too many tensors. "
            "Choose a smaller maximum file size."
        )
    return struct.pack("<Q", len(text)) + text


def read_header(path: Path) -> Header:
    """The header of a file. Nothing else is read."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # a pipe would never end
    except OSError as error:
        raise CheckpointError(f"{path} cannot be opened ({error.strerror}).") from error
    with open(descriptor, "rb") as file:
        about = os.fstat(descriptor)
        if not stat.S_ISREG(about.st_mode):
            raise CheckpointError(f"{path} is not a file.")
        start = file.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else _MAX
        if length > min(MAX_HEADER_BYTES, about.st_size - 8):
            raise CheckpointError(
                f"{path} is not a whole safetensors file: it has {about.st_size} bytes and begins with "
                f"{start.hex() or 'nothing'}, which is not the length of a header that is in the file and has at most "
                f"{MAX_HEADER_BYTES} bytes."
            )
        header = file.read(length)
    try:
        return Header(*_parse(header, about.st_size - 8 - length), start + header)
    except (_Wrong, ValueError, RecursionError) as error:
        raise CheckpointError(f"The header of {path} is malformed: {error}.") from error


class _Wrong(Exception):
    """What is wrong with a header, without its path."""


def _parse(header: bytes, data_bytes: int) -> tuple[dict[str, HeaderEntry], dict[str, str]]:
    value = json.loads(header, object_pairs_hook=without_duplicates)
    if type(value) is not dict:
        raise _Wrong("it is not a JSON object")
    metadata = value.pop(METADATA, {})
    if type(metadata) is not dict or not all(type(each) is str for each in metadata.values()):
        raise _Wrong(f"{METADATA} is not an object of strings")
    found, ranges = {}, []
    for name, each in value.items():
        found[name], begin, end = _entry(name, each)
        ranges.append((begin, end, name))
    place = 0
    for begin, end, name in sorted(ranges):
        if begin != place:
            raise _Wrong(f"{name[:100]!r} begins at {begin}, expected {place}: tensors overlap, or have gaps")
        place = end
    if place != data_bytes:
        raise _Wrong(f"the tensors have {place} bytes, and the file has {data_bytes} bytes after the header")
    return found, metadata


def _entry(name: str, value: Any) -> tuple[HeaderEntry, int, int]:
    shown = repr(name[:100])
    if type(value) is not dict or value.keys() != {"dtype", "shape", "data_offsets"}:
        raise _Wrong(f"{shown} does not have dtype, shape and data_offsets alone")
    if not name.isprintable() or not 0 < len(name) <= 4096:
        raise _Wrong(f"{shown} is not the name of a tensor")
    code, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if type(code) is not str or code not in CODES:
        raise _Wrong(f"{shown} has the dtype {str(code)[:100]!r}; known: {', '.join(CODES)}")
    if not _are_integers(shape) or len(shape) > 64 or not _are_integers(offsets) or len(offsets) != 2:
        raise _Wrong(f"the shape or the offsets of {shown}")
    entry = HeaderEntry(CODES[code], tuple(shape))
    if offsets[1] - offsets[0] != entry.nbytes:
        raise _Wrong(
            f"{shown} has the offsets {offsets}, and {entry.nbytes} bytes by its dtype {code} and shape {shape}"
        )
    return entry, offsets[0], offsets[1]


def _are_integers(value: Any) -> bool:
    return type(value) is list and all(type(each) is int and 0 <= each <= _MAX for each in value)


def without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise _Wrong("an object has the same key twice")
    return found


def read_index(path: Path) -> dict[str, str]:
    """The file of each tensor."""
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            data = file.read(MAX_HEADER_BYTES + 1)
        if len(data) > MAX_HEADER_BYTES:
            raise _Wrong(f"it has more than {MAX_HEADER_BYTES} bytes")
        value = json.loads(data, object_pairs_hook=without_duplicates)
        files = value.get("weight_map") if type(value) is dict else None
        if type(files) is not dict or not files:
            raise _Wrong("it has no object weight_map")
        for name in files.values():
            # No separators: a name must not lead out of the folder.
            if type(name) is not str or not name.endswith(".safetensors") or {"/", "\\", "\0"} & set(name):
                raise _Wrong(f"{str(name)[:100]!r} is not the name of a safetensors file in its folder")
        return files
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error.strerror}).") from error
    except (_Wrong, ValueError, RecursionError) as error:
        raise CheckpointError(f"The index {path} is malformed: {error}.") from error
