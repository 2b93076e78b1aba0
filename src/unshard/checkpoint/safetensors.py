"""Safetensors files: their headers, and loading them into a model. Each rank reads only the elements that it holds.

A file has 8 bytes with the length of the header, the header, and the tensors one after the other:

    {"__metadata__": {"format": "pt"}, "bias": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}, ...}

Offsets count from the end of the header. Files are untrusted input: `read_header` validates every field.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..errors import CheckpointError, listed
from ..state.boxes import Box, full_box
from ..state.model import HeldTensor, ModelState, model_state, non_persistent_names
from . import storage
from .files import copy_pieces
from .manifest import Malformed, without_duplicates
from .matching import Differences, LoadedNames, fill, match
from .plan import TensorEntry
from .ranks import begin, together
from .values import DTYPES

_NAMES = (
    "F64=float64 F32=float32 F16=float16 BF16=bfloat16 I64=int64 I32=int32 I16=int16 I8=int8 U64=uint64 U32=uint32 "
    "U16=uint16 U8=uint8 BOOL=bool C64=complex64 F8_E4M3=float8_e4m3fn F8_E5M2=float8_e5m2 F8_E4M3FNUZ=float8_e4m3fnuz "
    "F8_E5M2FNUZ=float8_e5m2fnuz"
)
CODES: dict[str, str] = dict(pair.split("=") for pair in _NAMES.split())
"""The names of dtypes in a checkpoint, by their codes in safetensors files."""
CODE_OF = {name: code for code, name in CODES.items()}
MAX_HEADER_BYTES = 100_000_000
"""The limit of the package safetensors."""
INDEX = "model.safetensors.index.json"
METADATA = "__metadata__"
_MAX = 2**60


def header_bytes(tensors: Iterable[tuple[str, TensorEntry]], metadata: dict[str, str]) -> bytes:
    """The start of a file. The tensors must follow in this order."""
    header: dict[str, Any] = {METADATA: metadata}
    end = 0
    for name, entry in tensors:
        begin, end = end, end + entry.nbytes
        header[name] = {"dtype": CODE_OF[entry.dtype], "shape": entry.shape, "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # tensors start at a multiple of 8, so a mapped file can be viewed as tensors
    if len(text) > MAX_HEADER_BYTES:
        raise CheckpointError(
            f"The header of a file has {len(text)} bytes, and the limit is {MAX_HEADER_BYTES}: it names too many "
            "tensors. Choose a smaller maximum file size."
        )
    return struct.pack("<Q", len(text)) + text


def read_header(path: Path) -> tuple[dict[str, TensorEntry], dict[str, str], bytes]:
    """Read only the header of a file; returns the tensors, the metadata and the bytes of the header."""
    try:
        file = storage.open_file(path, links=True)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be opened ({error.strerror}).") from error
    with file:
        nbytes = storage.size_of(file)
        if nbytes is None:
            raise CheckpointError(f"{path} is not a file.")
        start = file.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else _MAX
        if length > min(MAX_HEADER_BYTES, nbytes - 8):
            raise CheckpointError(
                f"{path} is not a complete safetensors file: it has {nbytes} bytes and starts with "
                f"{start.hex() or 'nothing'}, which is not the length of a header in the file of at most "
                f"{MAX_HEADER_BYTES} bytes."
            )
        header = file.read(length)
    try:
        return *_parse(header, nbytes - 8 - length), start + header
    except (Malformed, ValueError, RecursionError) as error:
        raise CheckpointError(f"The header of {path} is malformed: {error}.") from error


def _parse(header: bytes, data_bytes: int) -> tuple[dict[str, TensorEntry], dict[str, str]]:
    value = json.loads(header, object_pairs_hook=without_duplicates)
    if type(value) is not dict:
        raise Malformed("it is not a JSON object")
    metadata = value.pop(METADATA, {})
    if type(metadata) is not dict or not all(type(each) is str for each in metadata.values()):
        raise Malformed(f"{METADATA} is not an object of strings")
    found, ranges = {}, []
    for name, each in value.items():
        found[name], begin, end = _entry(name, each)
        ranges.append((begin, end, name))
    place = 0
    for begin, end, name in sorted(ranges):
        if begin != place:
            raise Malformed(f"{name[:100]!r} begins at {begin}, expected {place}: tensors overlap, or have gaps")
        place = end
    if place != data_bytes:
        raise Malformed(f"the tensors have {place} bytes, and the file has {data_bytes} bytes after the header")
    return found, metadata


def _entry(name: str, value: Any) -> tuple[TensorEntry, int, int]:
    shown = repr(name[:100])
    if type(value) is not dict or value.keys() != {"dtype", "shape", "data_offsets"}:
        raise Malformed(f"{shown} does not have exactly dtype, shape and data_offsets")
    if not name.isprintable() or not 0 < len(name) <= 4096:
        raise Malformed(f"{shown} is not the name of a tensor")
    code, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if type(code) is not str or code not in CODES:
        raise Malformed(f"{shown} has the dtype {str(code)[:100]!r}; known: {', '.join(CODES)}")
    if not _are_integers(shape) or len(shape) > 64 or not _are_integers(offsets) or len(offsets) != 2:
        raise Malformed(f"{shown} has an invalid shape or invalid offsets")
    entry = TensorEntry(CODES[code], tuple(shape))
    if offsets[1] - offsets[0] != entry.nbytes:
        raise Malformed(
            f"{shown} has the offsets {offsets}, and {entry.nbytes} bytes by its dtype {code} and shape {shape}"
        )
    return entry, offsets[0], offsets[1]


def _are_integers(value: Any) -> bool:
    return type(value) is list and all(type(each) is int and 0 <= each <= _MAX for each in value)


def read_index(path: Path) -> dict[str, str]:
    """Read an index; returns the file of each tensor."""
    try:
        with storage.open_file(path, links=True) as file:
            data = file.read(MAX_HEADER_BYTES + 1)
        if len(data) > MAX_HEADER_BYTES:
            raise Malformed(f"it has more than {MAX_HEADER_BYTES} bytes")
        value = json.loads(data, object_pairs_hook=without_duplicates)
        files = value.get("weight_map") if type(value) is dict else None
        if type(files) is not dict or not files:
            raise Malformed("it has no object weight_map")
        for name in files.values():
            # Without separators, so that a name cannot lead out of the folder.
            if type(name) is not str or not name.endswith(".safetensors") or {"/", "\\", "\0"} & set(name):
                raise Malformed(f"{str(name)[:100]!r} is not the name of a safetensors file in its folder")
        return files
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error.strerror}).") from error
    except (Malformed, ValueError, RecursionError) as error:
        raise CheckpointError(f"The index {path} is malformed: {error}.") from error


UNMAP_BYTES = 64 * 2**20
"""A file is reopened after this many bytes: pages that were read stay in memory as long as it is open."""


def load_safetensors(
    model: nn.Module, path: str | os.PathLike[str], *, strict: bool = True, prefix: str = ""
) -> LoadedNames:
    """Load a safetensors file, or a folder with `model.safetensors` or an index, into a model that may be sharded.

    All ranks must call it, and each rank reads only what it holds. Allocate a model on the meta device first, with
    `model.to_empty(device=...)`. Floating-point tensors are converted to the dtypes of the model. `prefix`: load only
    names with this prefix, which the names of the model lack. If names are missing or unexpected, or shapes or dtypes
    do not match, all ranks raise a CheckpointError and nothing changes. `strict=False` allows missing and unexpected
    names and loads the rest.
    """
    what, loading = f"Loading {path}", SafetensorsLoading(Path(path), prefix)
    begin("load safetensors files", model)
    answers = together(what, lambda: loading.compare(model))
    if len({checksum for checksum, _ in answers}) > 1:
        raise CheckpointError(f"The ranks read different files in {path}. All ranks must see the same disk.")
    found = Differences.of_all_ranks([differences for _, differences in answers])
    found.refuse(Path(path), strict, what="files", look=loading.lost_ties(found))
    together(what, loading.apply)
    return LoadedNames(sorted(found.missing), sorted(found.unexpected), non_persistent_names(model))


class SafetensorsSource:
    """The tensors of safetensors files, which the package safetensors reads."""

    casts = True

    def __init__(self, path: Path, prefix: str):
        try:
            self._package: Any = importlib.import_module("safetensors")
        except ImportError as error:
            raise CheckpointError(
                "Reading safetensors files needs the package safetensors, which is not installed: "
                "pip install safetensors"
            ) from error
        self.prefix, self._in_files = "", prefix
        self.aliases: dict[str, str] = {}
        self.entries: dict[str, TensorEntry] = {}
        self._paths: dict[str, Path] = {}
        self.ties: dict[str, str] = {}
        """Names that the files do not hold, and the names of the tensors that they are tied to, by the metadata."""
        self._hash = hashlib.sha256()
        for file, names in _files(path).items():
            self._add(file, names)
        self._open: tuple[Path, Any] | None = None
        self._nbytes = 0

    def _add(self, path: Path, expected: set[str] | None) -> None:
        tensors, metadata, raw = read_header(path)
        self._hash.update(raw)
        ties = {alias: name for alias, name in metadata.items() if alias not in tensors and name in tensors}
        self.ties |= {alias.removeprefix(self._in_files): name for alias, name in ties.items()}
        if expected is not None and (lost := expected - tensors.keys()):
            raise CheckpointError(f"{path} does not hold {listed(sorted(lost))}, which the index says it does.")
        for name, entry in tensors.items():
            if name.startswith(self._in_files):
                plain = name.removeprefix(self._in_files)
                if plain in self.entries:
                    raise CheckpointError(f"{path} and {self._paths[plain]} both hold {name!r}.")
                self.entries[plain], self._paths[plain] = entry, path

    @property
    def checksum(self) -> str:
        """Covers all headers."""
        return self._hash.hexdigest()

    def copy(self, name: str, box: Box, target: torch.Tensor) -> None:
        copy_pieces(target, self.read(name, box))

    def read(self, name: str, box: Box) -> torch.Tensor:
        """Return a box as a view of the mapped file: pages are read from the disk when elements are used."""
        path, entry = self._paths[name], self.entries[name]
        if self._open is None or self._open[0] != path or self._nbytes > UNMAP_BYTES:
            self._open, self._nbytes = (path, self._package.safe_open(path, framework="pt", device="cpu")), 0
        self._nbytes += box.numel * entry.itemsize
        found: torch.Tensor = self._open[1].get_slice(self._in_files + name)[box.slices_in(full_box(entry.shape))]
        if found.dtype != DTYPES[entry.dtype] or tuple(found.shape) != box.size:
            raise CheckpointError(
                f"{path} gave {found.dtype} of shape {tuple(found.shape)} for {name!r}, expected {entry.dtype} of "
                f"shape {box.size}. The file changed while it was read."
            )
        return found


def _files(path: Path) -> dict[Path, set[str] | None]:
    """The files to read, and the names that the index says each of them holds."""
    given = path
    if path.is_dir():
        single = path / "model.safetensors"
        path = single if single.exists() else path / INDEX
        if not path.exists():
            raise CheckpointError(f"{given} holds neither {single.name} nor {INDEX}. Pass the file itself.")
    if path.suffix != ".json":
        return {path: None}
    found: dict[Path, set[str] | None] = {}
    for name, file in read_index(path).items():
        names = found.setdefault(path.parent / file, set())
        assert names is not None
        names.add(name)
    return found


class SafetensorsLoading:
    """One load on one rank."""

    _source: SafetensorsSource

    def __init__(self, path: Path, prefix: str):
        self._path, self._prefix = path, prefix
        self._model = ModelState()
        self._targets: list[tuple[HeldTensor, str]] = []

    def compare(self, model: nn.Module) -> tuple[str, Differences]:
        """Read the headers and match them with the model; returns their checksum and the differences."""
        differences = Differences()
        self._source, self._model = SafetensorsSource(self._path, self._prefix), model_state(model)
        for held, names in match(self._model, self._source, differences):
            for name in names:
                for box in held.part.boxes:
                    self._source.read(name, box)  # only maps: what the package rejects fails before any change
            differences.wrong += [
                f"{names[0]} and {other} are tied here, and are two different tensors in the files"
                for other in names[1:]
                if not self._equal(held, names[0], other)
            ]
            self._targets.append((held, names[0]))
        return self._source.checksum, differences

    def _equal(self, held: HeldTensor, *names: str) -> bool:
        """Return True if the boxes of this rank have the same bytes under both names."""
        one, other = names
        return self._source.entries[one].dtype == self._source.entries[other].dtype and all(
            torch.equal(_bits(self._source.read(one, box)), _bits(self._source.read(other, box)))
            for box in held.part.boxes
            if box.numel
        )

    def lost_ties(self, differences: Differences) -> str:
        """Advice if the files say that a missing tensor is tied to one that they hold."""
        ties = self._source.ties
        lost = [f"{name} is tied to {ties[name]}" for name in differences.missing if name in ties]
        if not lost:
            return ""
        return f" The files say that {listed(lost)}. Tie them in the model first; `to_empty` may have untied them."

    def apply(self) -> None:
        for held, name in self._targets:
            fill(held, name, self._source)
        self._model.finish_loading(held for held, _ in self._targets)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)
