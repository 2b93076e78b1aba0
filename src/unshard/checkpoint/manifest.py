"""Reads, validates and writes the manifest of a checkpoint, which a save writes last and a load reads first.

    {"checksum": "xxh3_64:8f0e...", "manifest": {
      "format": "unshard checkpoint", "version": 1, "step": 12, "ranks": 2, "algorithm": "xxh3_64",
      "block_bytes": 4194304,
      "files": [{"name": "rank_00000.bin", "bytes": 5120, "blocks": "<checksums of the blocks>"}, ...],
      "tensors": {"model/head.weight": {"dtype": "float32", "shape": [4, 8],
                  "boxes": [[0, 64, [0, 0], [2, 8]], [1, 0, [2, 0], [2, 8]]]}, ...},
      "aliases": {"model/tied.weight": "model/head.weight"},
      "values": {...}}}

A box is stored as [file number, offset in the file, first indices, lengths], with its elements in row-major order. The
checksum covers the bytes between `"manifest": ` and the last brace. Manifests are untrusted, so every field is
validated.

Tensors of more than 64 boxes share lists of boxes, and their files and offsets are runs of first value, step and
length. So the size of a manifest does not grow with the number of tensors times the number of ranks. The version is
then 2:

      "splits": [[[[0, 0], [2, 8]], [[2, 0], [2, 8]], ...], ...],
      "tensors": {"model/head.weight": {"dtype": "float32", "shape": [5632, 8],
                  "boxes": {"split": 0, "files": [0, 1, 2816], "offsets": [64, 0, 2816]}}, ...},

Each block of a file has its own checksum, so a rank verifies only the blocks that it reads. The algorithm is xxh3_64 if
the package xxhash is installed, and CRC-32 otherwise. Checksums detect damage, but not forgery.
"""

from __future__ import annotations

import importlib
import json
import re
import zlib
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ..errors import CheckpointError
from ..state.boxes import Box
from . import storage
from .stored_boxes import (
    ALIGNMENT,
    MOST,
    NONE,
    Split,
    StoredBox,
    StoredBoxes,
    integers,
    runs_of,
    stored_boxes,
    values_of,
)
from .values import DTYPES

BLOCK_BYTES = 4 * 2**20


class Crc32:
    """CRC-32 with the interface of checksum objects in hashlib and xxhash."""

    def __init__(self) -> None:
        self._value = 0

    def update(self, data: Any) -> None:
        self._value = zlib.crc32(data, self._value)

    def hexdigest(self) -> str:
        return f"{self._value:08x}"


DIGITS = {"xxh3_64": 16, "crc32": 8}
"""Number of hexadecimal digits in a checksum, by algorithm."""


def best_algorithm() -> str:
    try:
        importlib.import_module("xxhash")
    except ImportError:
        return "crc32"
    return "xxh3_64"


def maker_of(algorithm: str, where: object) -> Callable[[], Any]:
    """Return the constructor of checksum objects for `algorithm`. `where` names the file in error messages."""
    if algorithm == "crc32":
        return Crc32
    if algorithm != "xxh3_64":
        raise CheckpointError(f"{where} has checksums of the unknown kind {algorithm!r}; known: {', '.join(DIGITS)}.")
    try:
        xxhash: Any = importlib.import_module("xxhash")
    except ImportError as error:
        raise CheckpointError(
            f"{where} has checksums of the kind xxh3_64, which need the package xxhash: pip install xxhash"
        ) from error
    return xxhash.xxh3_64


def checksum_of(data: Any, algorithm: str, where: object) -> str:
    checksum = maker_of(algorithm, where)()
    checksum.update(data)
    return checksum.hexdigest()


class BlockChecksums:
    """Splits the bytes that are passed to `update` into blocks, and computes the checksum of each block."""

    def __init__(self, algorithm: str, where: object):
        self._make = maker_of(algorithm, where)
        self._blocks: list[Any] = []
        self._left = 0
        """Number of bytes that still fit in the last block."""

    def update(self, data: memoryview) -> None:
        while data:
            if not self._left:
                self._blocks.append(self._make())
                self._left = BLOCK_BYTES
            now = data[: self._left]
            self._blocks[-1].update(now)
            self._left -= len(now)
            data = data[len(now) :]

    def hexdigests(self) -> list[str]:
        return [each.hexdigest() for each in self._blocks]


FORMAT, VERSION, VERSION_WITH_SPLITS = "unshard checkpoint", 1, 2
MOST_INLINE = 64
"""A tensor of more boxes refers to one of the manifest's splits."""
MANIFEST = "manifest.json"
UNCAST = "uncast"
"""Key in the manifest's values that lists tensors of quantized layers. `export` does not cast these tensors."""
MAX_MANIFEST_BYTES = 512 * 2**20
_FRAME = re.compile(rb'\{"checksum": "([a-z0-9_]{1,16}):([0-9a-f]{1,32})", "manifest": (.*)\}\n', re.DOTALL)
_FILE = re.compile(r"rank_[0-9]{5,10}\.bin")


@dataclass(frozen=True)
class TensorEntry:
    dtype: str
    shape: tuple[int, ...]
    boxes: StoredBoxes = NONE

    @property
    def itemsize(self) -> int:
        return DTYPES[self.dtype].itemsize

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.itemsize


class FileEntry(NamedTuple):
    name: str
    nbytes: int
    blocks: list[str]


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
    """Checksum of the manifest itself. Empty if the manifest was not read from a file."""

    def find(self, name: str) -> TensorEntry | None:
        """Return the entry of the tensor with this name or alias, or None."""
        return self.tensors.get(self.aliases.get(name, name))

    def tensors_at(self, file: int, first: int, last: int) -> list[str]:
        """Return the names of the tensors that have bytes between `first` and `last` in a file."""
        return [
            name
            for name, entry in self.tensors.items()
            for each in entry.boxes.in_file(file)
            if each.offset < last and each.offset + each.box.numel * entry.itemsize > first
        ]


def manifest_bytes(manifest: Manifest) -> bytes:
    splits: dict[Split, int] = {}

    def boxes_of(boxes: StoredBoxes) -> Any:
        if len(boxes) <= MOST_INLINE:
            return [[each.file, each.offset, each.box.begin, each.box.size] for each in boxes]
        split = splits.setdefault(boxes.split, len(splits))
        return {"split": split, "files": runs_of(boxes.files), "offsets": runs_of(boxes.offsets)}

    tensors = {
        name: {"dtype": entry.dtype, "shape": entry.shape, "boxes": boxes_of(entry.boxes)}
        for name, entry in manifest.tensors.items()
    }
    value = {
        "format": FORMAT,
        "version": VERSION_WITH_SPLITS if splits else VERSION,
        "step": manifest.step,
        "ranks": manifest.ranks,
        "algorithm": manifest.algorithm,
        "block_bytes": manifest.block_bytes,
        "files": [{"name": each.name, "bytes": each.nbytes, "blocks": "".join(each.blocks)} for each in manifest.files],
        **({"splits": [split.boxes for split in splits]} if splits else {}),
        "tensors": tensors,
        "aliases": manifest.aliases,
        "values": manifest.values,
    }
    inner = json.dumps(value).encode()
    checksum = checksum_of(inner, manifest.algorithm, MANIFEST)
    return b'{"checksum": "%s:%s", "manifest": %s}\n' % (manifest.algorithm.encode(), checksum.encode(), inner)


def read_manifest(folder: Path) -> Manifest:
    """Read and validate the manifest of a checkpoint, without opening other files."""
    path = folder / MANIFEST
    try:
        file = storage.open_file(path)
    except OSError as error:
        raise CheckpointError(
            f"{folder} is not a checkpoint: its {MANIFEST} cannot be opened ({error.strerror}). A checkpoint is a "
            "folder step_<number> that unshard.checkpoint.save wrote."
        ) from error
    with file:
        nbytes = storage.size_of(file)
        if nbytes is None or nbytes > MAX_MANIFEST_BYTES:
            raise CheckpointError(f"{path} is not a file of at most {MAX_MANIFEST_BYTES} bytes.")
        frame = _FRAME.fullmatch(file.read(MAX_MANIFEST_BYTES + 1))
    if frame is None:
        raise CheckpointError(f"{path} is not a valid manifest: it is truncated, or has another format.")
    algorithm, expected, inner = frame[1].decode(), frame[2].decode(), frame[3]
    found = checksum_of(inner, algorithm, path)
    if found != expected:
        raise CheckpointError(f"{path} is damaged: its checksum is {found}, expected {expected}.")
    try:
        return _manifest(json.loads(inner, object_pairs_hook=without_duplicates), algorithm, found)
    except (Malformed, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is malformed: {error}.") from error


class Malformed(Exception):
    """Raised for a malformed manifest or safetensors header. Callers add the file's path to the message."""


def without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise Malformed("an object has the same key twice")
    return found


def _field(value: Any, key: str, kind: type) -> Any:
    if type(value) is not dict or type(value.get(key)) is not kind:
        raise Malformed(f"{key!r} is missing, or is not a {kind.__name__}")
    return _integer(value[key]) if kind is int else value[key]


def _integer(value: Any) -> int:
    if type(value) is not int or not 0 <= value <= MOST:
        raise Malformed(f"{value!r} is not an integer from 0 to {MOST}")
    return value


def _integers(value: Any) -> tuple[int, ...]:
    if type(value) is not list or len(value) > 64:
        raise Malformed(f"{str(value)[:100]} is not a list of indices")
    return tuple(map(_integer, value))


def _name(value: str) -> str:
    if not 0 < len(value) <= 4096 or not value.isprintable():
        raise Malformed(f"{value[:100]!r} is not the name of a tensor")
    return value


def _manifest(value: Any, algorithm: str, checksum: str) -> Manifest:
    known = VERSION, VERSION_WITH_SPLITS
    if _field(value, "format", str) != FORMAT or _field(value, "version", int) not in known:
        raise Malformed(f"format {value['format']!r}, version {value['version']}; expected {FORMAT!r}, {known}")
    if _field(value, "algorithm", str) != algorithm:
        raise Malformed("the algorithms of the manifest's checksum and of the blocks differ")
    block_bytes = _field(value, "block_bytes", int)
    if not 4096 <= block_bytes <= 2**30:
        raise Malformed(f"a block size of {block_bytes} bytes is not allowed")
    files = [_file(each, DIGITS[algorithm], block_bytes) for each in _field(value, "files", list)]
    if len({each.name for each in files}) != len(files):
        raise Malformed("two files have the same name")
    splits = list(map(_split, _field(value, "splits", list))) if "splits" in value else []
    sizes = integers([each.nbytes for each in files])
    tensors = {_name(key): _tensor(key, each, sizes, splits) for key, each in _field(value, "tensors", dict).items()}
    _refuse_shared_bytes(tensors, files)
    aliases = _field(value, "aliases", dict)
    for alias, name in aliases.items():
        if _name(alias) in tensors or type(name) is not str or name not in tensors:
            raise Malformed(f"the alias {alias!r} of {str(name)[:100]!r} is invalid")
    step, ranks, values = _field(value, "step", int), _field(value, "ranks", int), _field(value, "values", dict)
    of_ranks = _field(values, "ranks", list)
    if not ranks or len(of_ranks) != ranks or not all(type(each) is dict for each in of_ranks):
        raise Malformed(f"it has values of {len(of_ranks)} ranks, expected {ranks}")
    if type(values.get("extra", {})) is not dict:
        raise Malformed("the extra state is not an object")
    uncast = values.get(UNCAST, [])
    if type(uncast) is not list or not all(type(each) is str for each in uncast):
        raise Malformed(f"{UNCAST!r} is not a list of names")
    return Manifest(step, ranks, algorithm, block_bytes, files, tensors, aliases, values, checksum)


def _file(value: Any, digits: int, block_bytes: int) -> FileEntry:
    name, nbytes, blocks = _field(value, "name", str), _field(value, "bytes", int), value.get("blocks")
    if not _FILE.fullmatch(name):
        raise Malformed(f"the file name {name[:100]!r} is invalid")
    if type(blocks) is not str or not re.fullmatch("[0-9a-f]*", blocks):
        raise Malformed(f"the checksums of {name} are invalid")
    if len(blocks) != -(-nbytes // block_bytes) * digits:
        raise Malformed(f"{name} has {len(blocks) // digits} checksums for {nbytes} bytes")
    return FileEntry(name, nbytes, [blocks[at : at + digits] for at in range(0, len(blocks), digits)])


def _box(value: Any) -> Box:
    if type(value) is not list or len(value) != 2:
        raise Malformed(f"{str(value)[:100]} is not a box")
    return Box(_integers(value[0]), _integers(value[1]))


def _split(value: Any) -> Split:
    if type(value) is not list:
        raise Malformed(f"{str(value)[:100]} is not a split")
    return Split(map(_box, value))


def _boxes(value: Any, splits: list[Split]) -> StoredBoxes:
    if type(value) is list:
        if not all(type(each) is list and len(each) == 4 for each in value):
            raise Malformed("a box is invalid")
        return stored_boxes(StoredBox(_integer(file), _integer(offset), _box(box)) for file, offset, *box in value)
    number = _field(value, "split", int)
    if number >= len(splits):
        raise Malformed(f"there is no split {number}")
    split = splits[number]
    length = len(split.boxes)
    return StoredBoxes(split, values_of(value.get("files"), length), values_of(value.get("offsets"), length))


def _tensor(name: str, value: Any, sizes: torch.Tensor, splits: list[Split]) -> TensorEntry:
    """Return a tensor's entry. `sizes` are those of the files."""
    dtype, shape = _field(value, "dtype", str), _integers(value.get("shape"))
    if dtype not in DTYPES:
        raise Malformed(f"{name!r} has the dtype {dtype[:100]!r}")
    if prod(shape) * DTYPES[dtype].itemsize > MOST:
        raise Malformed(f"{name!r} has the shape {shape}")
    try:
        boxes = _boxes(value.get("boxes"), splits)
        boxes.split.check(shape)
    except (Malformed, ValueError) as error:
        raise Malformed(f"{name!r}: {error}") from error
    files, offsets = boxes.files, boxes.offsets
    ends = offsets + boxes.split.numels * DTYPES[dtype].itemsize
    wrong = (files >= len(sizes)) | (offsets % ALIGNMENT != 0)
    if not wrong.any():
        wrong = ends > sizes[files]
    if wrong.any():
        first = boxes[int(wrong.nonzero()[0])]
        raise Malformed(f"a box of {name!r} is at {first.offset} of file {first.file}, outside of it or not aligned")
    return TensorEntry(dtype, shape, boxes)


def _refuse_shared_bytes(tensors: dict[str, TensorEntry], files: list[FileEntry]) -> None:
    entries = list(tensors.values())
    if not entries:
        return
    file, begin = (torch.cat([getattr(each.boxes, key) for each in entries]) for key in ("files", "offsets"))
    end = begin + torch.cat([each.boxes.split.numels * each.itemsize for each in entries])
    order = begin.argsort(stable=True)
    order = order[file[order].argsort(stable=True)]
    file, begin, end = file[order], begin[order], end[order]
    shared = (file[1:] == file[:-1]) & (begin[1:] < end[:-1])
    if shared.any():
        at = int(shared.nonzero()[0])
        ends, names = list(accumulate(len(each.boxes) for each in entries)), list(tensors)
        one, other = (names[bisect_right(ends, int(order[place]))] for place in (at, at + 1))
        raise Malformed(f"{one!r} and {other!r} share bytes of {files[int(file[at])].name}")
