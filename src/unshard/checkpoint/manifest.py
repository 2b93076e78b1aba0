"""The manifest of a checkpoint: what each file holds, and where each tensor is. Written last, read first.

    {"checksum": "xxh3_64:8f0e...", "manifest": {
      "format": "unshard checkpoint", "version": 1, "step": 12, "ranks": 2, "algorithm": "xxh3_64",
      "block_bytes": 4194304,
      "files": [{"name": "rank_00000.bin", "bytes": 5120, "blocks": "<checksums of the blocks>"}, ...],
      "tensors": {"model/head.weight": {"dtype": "float32", "shape": [4, 8],
                  "boxes": [[0, 64, [0, 0], [2, 8]], [1, 0, [2, 0], [2, 8]]]}, ...},
      "aliases": {"model/tied.weight": "model/head.weight"},
      "values": {...}}}

A box is [number of the file, offset in it, first indices, lengths]; its elements lie there in row-major order. The
checksum is that of the bytes between `"manifest": ` and the last brace. A manifest may come from anywhere, so `parse`
takes nothing for granted.
"""

from __future__ import annotations

import json
import os
import re
import stat
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import CheckpointError
from ..state.boxes import Box, first_overlap
from .checksums import DIGITS, checksum_of
from .dtypes import DTYPES

FORMAT, VERSION = "unshard checkpoint", 1
MANIFEST = "manifest.json"
UNCAST = "uncast"
"""The value that lists tensors of quantised layers, if there are any: an export to another dtype leaves them."""
MAX_MANIFEST_BYTES = 512 * 2**20
ALIGNMENT = 64
"""Boxes begin at multiples of so many bytes, so that they can be read as tensors where they lie."""
_FRAME = re.compile(rb'\{"checksum": "([a-z0-9_]{1,16}):([0-9a-f]{1,32})", "manifest": (.*)\}\n', re.DOTALL)
_FILE = re.compile(r"rank_[0-9]{5,10}\.bin")
_MAX = 2**60


class FileEntry(NamedTuple):
    name: str
    nbytes: int
    blocks: list[str]


class StoredBox(NamedTuple):
    file: int
    offset: int
    box: Box


@dataclass(frozen=True)
class TensorEntry:
    dtype: str
    shape: tuple[int, ...]
    boxes: tuple[StoredBox, ...]

    @property
    def itemsize(self) -> int:
        return DTYPES[self.dtype].itemsize

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.itemsize


@dataclass(frozen=True)
class Manifest:
    step: int
    ranks: int
    algorithm: str
    block_bytes: int
    files: list[FileEntry]
    tensors: dict[str, TensorEntry]
    aliases: dict[str, str]
    values: dict[str, Any]
    checksum: str = ""
    """Of the file that it was read from."""

    def find(self, name: str) -> TensorEntry | None:
        """The tensor with this name, or that another name of it has."""
        return self.tensors.get(self.aliases.get(name, name))

    def tensors_at(self, file: int, first: int, last: int) -> list[str]:
        """The names of the tensors that have bytes in this range of a file."""
        return [
            name
            for name, entry in self.tensors.items()
            for each in entry.boxes
            if each.file == file and each.offset < last and each.offset + each.box.numel * entry.itemsize > first
        ]


def manifest_bytes(manifest: Manifest) -> bytes:
    value = {
        "format": FORMAT,
        "version": VERSION,
        "step": manifest.step,
        "ranks": manifest.ranks,
        "algorithm": manifest.algorithm,
        "block_bytes": manifest.block_bytes,
        "files": [{"name": each.name, "bytes": each.nbytes, "blocks": "".join(each.blocks)} for each in manifest.files],
        "tensors": {
            name: {
                "dtype": entry.dtype,
                "shape": entry.shape,
                "boxes": [[each.file, each.offset, each.box.begin, each.box.size] for each in entry.boxes],
            }
            for name, entry in manifest.tensors.items()
        },
        "aliases": manifest.aliases,
        "values": manifest.values,
    }
    inner = json.dumps(value).encode()
    checksum = checksum_of(inner, manifest.algorithm, MANIFEST)
    return b'{"checksum": "%s:%s", "manifest": %s}\n' % (manifest.algorithm.encode(), checksum.encode(), inner)


def read_manifest(folder: Path) -> Manifest:
    """Read and check the manifest of a checkpoint; nothing else is opened."""
    path = folder / MANIFEST
    try:
        # A link could lead out of the checkpoint, a pipe would never end.
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise CheckpointError(
            f"{folder} is not a checkpoint: its {MANIFEST} cannot be opened ({error.strerror}). A checkpoint is a "
            "folder step_<number> that unshard.checkpoint.save wrote."
        ) from error
    with open(descriptor, "rb") as file:
        about = os.fstat(descriptor)
        if not stat.S_ISREG(about.st_mode) or about.st_size > MAX_MANIFEST_BYTES:
            raise CheckpointError(f"{path} is not a file of at most {MAX_MANIFEST_BYTES} bytes.")
        return parse(file.read(MAX_MANIFEST_BYTES + 1), path)


def parse(data: bytes, path: Path) -> Manifest:
    frame = _FRAME.fullmatch(data)
    if frame is None:
        raise CheckpointError(f"{path} is not a whole manifest; it is truncated, or of another format.")
    algorithm, expected, inner = frame[1].decode(), frame[2].decode(), frame[3]
    found = checksum_of(inner, algorithm, path)
    if found != expected:
        raise CheckpointError(f"{path} is damaged: its checksum is {found}, expected {expected}.")
    try:
        value = json.loads(inner, object_pairs_hook=_without_duplicates)
        if _field(value, "format", str) != FORMAT or _integer(_field(value, "version", int)) != VERSION:
            raise _Wrong(f"format {value['format']!r}, version {value['version']}; expected {FORMAT!r}, {VERSION}")
        return _Parser(value, algorithm).manifest(found)
    except (_Wrong, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is malformed: {error}.") from error


class _Wrong(Exception):
    """What is wrong with a manifest, without its path."""


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise _Wrong("an object has the same key twice")
    return found


def _field(value: Any, key: str, kind: type) -> Any:
    if type(value) is not dict or type(value.get(key)) is not kind:
        raise _Wrong(f"{key!r} is missing, or is not a {kind.__name__}")
    return value[key]


def _integer(value: Any, most: int = _MAX) -> int:
    if type(value) is not int or not 0 <= value <= most:
        raise _Wrong(f"{value!r} is not an integer from 0 to {most}")
    return value


def _integers(value: Any) -> tuple[int, ...]:
    if type(value) is not list or len(value) > 64:
        raise _Wrong(f"{str(value)[:100]} is not a list of indices")
    return tuple(_integer(each) for each in value)


def _name(value: Any) -> str:
    if type(value) is not str or not 0 < len(value) <= 4096 or not value.isprintable():
        raise _Wrong(f"{str(value)[:100]!r} is not the name of a tensor")
    return value


class _Parser:
    def __init__(self, value: dict[str, Any], algorithm: str):
        self._value = value
        if _field(value, "algorithm", str) != algorithm:
            raise _Wrong("the algorithms of the manifest's checksum and of the blocks differ")
        self._algorithm = algorithm
        self._block_bytes = _integer(_field(value, "block_bytes", int))
        if not 4096 <= self._block_bytes <= 2**30:
            raise _Wrong(f"blocks of {self._block_bytes} bytes")

    def manifest(self, checksum: str) -> Manifest:
        files = [self._file(each) for each in _field(self._value, "files", list)]
        if len({each.name for each in files}) != len(files):
            raise _Wrong("two files have the same name")
        tensors = {
            _name(key): self._tensor(key, each, files) for key, each in _field(self._value, "tensors", dict).items()
        }
        _refuse_shared_bytes(tensors, files)
        aliases = _field(self._value, "aliases", dict)
        for alias, name in aliases.items():
            if _name(alias) in tensors or type(name) is not str or name not in tensors:
                raise _Wrong(f"the alias {alias!r} of {str(name)[:100]!r}")
        step, ranks = _integer(_field(self._value, "step", int)), _integer(_field(self._value, "ranks", int))
        values = _field(self._value, "values", dict)
        of_ranks = _field(values, "ranks", list)
        if not ranks or len(of_ranks) != ranks or not all(type(each) is dict for each in of_ranks):
            raise _Wrong(f"values of {len(of_ranks)} ranks, for {ranks} ranks")
        if type(values.get("extra", {})) is not dict:
            raise _Wrong("extra state that is not an object")
        if type(values.get(UNCAST, [])) is not list or not all(type(each) is str for each in values.get(UNCAST, [])):
            raise _Wrong("a list of tensors that are not cast, which is not one of names")
        return Manifest(step, ranks, self._algorithm, self._block_bytes, files, tensors, aliases, values, checksum)

    def _file(self, value: Any) -> FileEntry:
        name, nbytes, blocks = _field(value, "name", str), _integer(_field(value, "bytes", int)), value.get("blocks")
        if not _FILE.fullmatch(name):
            raise _Wrong(f"the file name {name[:100]!r}")
        digits = DIGITS[self._algorithm]
        if type(blocks) is not str or not re.fullmatch("[0-9a-f]*", blocks):
            raise _Wrong(f"the checksums of {name}")
        if len(blocks) != -(-nbytes // self._block_bytes) * digits:
            raise _Wrong(f"{len(blocks) // digits} checksums of {name}, which has {nbytes} bytes")
        return FileEntry(name, nbytes, [blocks[at : at + digits] for at in range(0, len(blocks), digits)])

    def _tensor(self, name: str, value: Any, files: list[FileEntry]) -> TensorEntry:
        dtype, shape = _field(value, "dtype", str), _integers(value.get("shape"))
        if dtype not in DTYPES:
            raise _Wrong(f"{name!r} has the dtype {dtype[:100]!r}")
        numel, itemsize, boxes = prod(shape), DTYPES[dtype].itemsize, []
        for each in _field(value, "boxes", list):
            if type(each) is not list or len(each) != 4:
                raise _Wrong(f"a box of {name!r}")
            file, offset, box = _integer(each[0]), _integer(each[1]), Box(_integers(each[2]), _integers(each[3]))
            if not len(box.begin) == len(box.size) == len(shape):
                raise _Wrong(f"a box of {name!r} has another number of dimensions")
            if any(a + n > length or not n for a, n, length in zip(box.begin, box.size, shape, strict=True)):
                raise _Wrong(f"the box {box.begin} of size {box.size} of {name!r}, which has the shape {shape}")
            if file >= len(files) or offset % ALIGNMENT or offset + box.numel * itemsize > files[file].nbytes:
                raise _Wrong(f"a box of {name!r} is at {offset} of file {file}, outside of it or not aligned")
            boxes.append(StoredBox(file, offset, box))
        if sum(each.box.numel for each in boxes) != numel:
            raise _Wrong(f"the boxes of {name!r} do not have its {numel} elements")
        if overlap := first_overlap([each.box for each in boxes]):
            raise _Wrong(f"two boxes of {name!r} overlap: {overlap[0]} and {overlap[1]}")
        return TensorEntry(dtype, shape, tuple(boxes))


def _refuse_shared_bytes(tensors: dict[str, TensorEntry], files: list[FileEntry]) -> None:
    ranges = sorted(
        (each.file, each.offset, each.offset + each.box.numel * entry.itemsize, name)
        for name, entry in tensors.items()
        for each in entry.boxes
    )
    for (file, _, end, one), (other_file, begin, _, other) in pairwise(ranges):
        if file == other_file and begin < end:
            raise _Wrong(f"{one!r} and {other!r} share bytes of {files[file].name}")
