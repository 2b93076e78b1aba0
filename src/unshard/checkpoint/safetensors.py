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
import stat
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from ..errors import CheckpointError, listed
from ..state.boxes import Box
from ..state.model import HeldTensor, ModelState, model_state, non_persistent_names
from .differences import Differences, LoadedNames
from .files import copy_pieces
from .manifest import Malformed, without_duplicates
from .ranks import begin, together
from .values import DTYPES

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
    except (Malformed, ValueError, RecursionError) as error:
        raise CheckpointError(f"The header of {path} is malformed: {error}.") from error


def _parse(header: bytes, data_bytes: int) -> tuple[dict[str, HeaderEntry], dict[str, str]]:
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


def _entry(name: str, value: Any) -> tuple[HeaderEntry, int, int]:
    shown = repr(name[:100])
    if type(value) is not dict or value.keys() != {"dtype", "shape", "data_offsets"}:
        raise Malformed(f"{shown} does not have dtype, shape and data_offsets alone")
    if not name.isprintable() or not 0 < len(name) <= 4096:
        raise Malformed(f"{shown} is not the name of a tensor")
    code, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if type(code) is not str or code not in CODES:
        raise Malformed(f"{shown} has the dtype {str(code)[:100]!r}; known: {', '.join(CODES)}")
    if not _are_integers(shape) or len(shape) > 64 or not _are_integers(offsets) or len(offsets) != 2:
        raise Malformed(f"the shape or the offsets of {shown}")
    entry = HeaderEntry(CODES[code], tuple(shape))
    if offsets[1] - offsets[0] != entry.nbytes:
        raise Malformed(
            f"{shown} has the offsets {offsets}, and {entry.nbytes} bytes by its dtype {code} and shape {shape}"
        )
    return entry, offsets[0], offsets[1]


def _are_integers(value: Any) -> bool:
    return type(value) is list and all(type(each) is int and 0 <= each <= _MAX for each in value)


def read_index(path: Path) -> dict[str, str]:
    """The file of each tensor."""
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            data = file.read(MAX_HEADER_BYTES + 1)
        if len(data) > MAX_HEADER_BYTES:
            raise Malformed(f"it has more than {MAX_HEADER_BYTES} bytes")
        value = json.loads(data, object_pairs_hook=without_duplicates)
        files = value.get("weight_map") if type(value) is dict else None
        if type(files) is not dict or not files:
            raise Malformed("it has no object weight_map")
        for name in files.values():
            # No separators: a name must not lead out of the folder.
            if type(name) is not str or not name.endswith(".safetensors") or {"/", "\\", "\0"} & set(name):
                raise Malformed(f"{str(name)[:100]!r} is not the name of a safetensors file in its folder")
        return files
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error.strerror}).") from error
    except (Malformed, ValueError, RecursionError) as error:
        raise CheckpointError(f"The index {path} is malformed: {error}.") from error


UNMAP_BYTES = 64 * 2**20
"""A file is closed after so many bytes: pages that were read stay in this process's memory as long as it is open."""


def load_safetensors(
    model: nn.Module, path: str | os.PathLike[str], *, strict: bool = True, prefix: str = ""
) -> LoadedNames:
    """Load a safetensors file, or a folder with `model.safetensors` or an index, into a model that may be sharded.

    All ranks have to call. Each rank reads only what it holds. A model on the meta device is given memory first, by
    `model.to_empty(device=...)`. Floating-point tensors are converted to the dtypes of the model. `prefix`: names in
    the files begin with it, and those of the model do not; other names in the files are left out. If names are missing
    or unexpected, or shapes or dtypes do not fit, all ranks raise a CheckpointError and nothing is changed;
    `strict=False` loads what fits if only names are missing or unexpected.
    """
    what, loading = f"Loading {path}", SafetensorsLoading(Path(path), prefix)
    begin("load safetensors files", model)
    answers = together(what, lambda: loading.compare(model))
    if len({checksum for checksum, _ in answers}) > 1:
        raise CheckpointError(f"The ranks read different files in {path}. All ranks have to see the same disk.")
    found = Differences.of_all_ranks([differences for _, differences in answers])
    found.refuse(Path(path), strict, what="files", look=loading.lost_ties(found))
    together(what, loading.apply)
    return LoadedNames(sorted(found.missing), sorted(found.unexpected), non_persistent_names(model))


@dataclass(frozen=True)
class FileTensor:
    path: Path
    name: str
    """In the file."""
    header: HeaderEntry


class OpenFile:
    """The file that is read at the moment, by the package safetensors."""

    def __init__(self) -> None:
        try:
            self._package: Any = importlib.import_module("safetensors")
        except ImportError as error:
            raise CheckpointError(
                "Reading safetensors files needs the package safetensors, which is not installed: "
                "pip install safetensors"
            ) from error
        self._path: Path | None = None
        self._file: Any = None
        self._nbytes = 0

    def part(self, tensor: FileTensor, box: Box) -> torch.Tensor:
        """A box as a tensor on the file itself: only what is read of it is read from the disk."""
        if tensor.path != self._path or self._nbytes > UNMAP_BYTES:
            self._path, self._nbytes = tensor.path, 0
            self._file = self._package.safe_open(tensor.path, framework="pt", device="cpu")
        self._nbytes += box.numel * tensor.header.dtype.itemsize
        slices = tuple(slice(first, first + length) for first, length in zip(box.begin, box.size, strict=True))
        found: torch.Tensor = self._file.get_slice(tensor.name)[slices]
        if found.dtype != tensor.header.dtype or tuple(found.shape) != box.size:
            raise CheckpointError(
                f"{tensor.path} gave {found.dtype} of shape {tuple(found.shape)} for {tensor.name!r}, expected "
                f"{tensor.header.dtype} of shape {box.size}. It was changed while it was read."
            )
        return found


class SafetensorsLoading:
    """One load on one rank."""

    def __init__(self, path: Path, prefix: str):
        self._path, self._prefix = path, prefix
        self._model = ModelState()
        self._targets: list[tuple[HeldTensor, FileTensor]] = []
        self._differences = Differences()
        self._hash = hashlib.sha256()
        self._ties: dict[str, str] = {}
        """Names that the files do not hold, and the names of the tensors that they say these are."""

    # -- comparing ------------------------------------------------------------------------------------------

    def compare(self, model: nn.Module) -> tuple[str, Differences]:
        """Read the headers and compare them with the model; returns their checksum and the differences."""
        self._open = OpenFile()
        tensors = self._tensors()
        self._model = model_state(model)
        names: dict[str, list[str]] = {held.name: [held.name] for held in self._model.tensors}
        for alias, name in self._model.aliases.items():
            names[name].append(alias)
        for held in self._model.tensors:
            found = [name for key in names[held.name] if (name := key.removeprefix("model/")) in tensors]
            if not found:
                self._differences.missing[held.name.removeprefix("model/")] = _nbytes(held)
                continue
            sources = [tensors.pop(name) for name in found]
            if all(self._fits(held, source) for source in sources):
                self._require_equal(held, sources)
                self._targets.append((held, sources[0]))
        self._differences.unexpected = {name: tensor.header.nbytes for name, tensor in tensors.items()}
        return self._hash.hexdigest(), self._differences

    def _tensors(self) -> dict[str, FileTensor]:
        """What the files hold for this model, by the model's names."""
        found: dict[str, FileTensor] = {}
        for path, expected in self._files().items():
            entries, metadata, raw = read_header(path)
            self._hash.update(raw)
            ties = {alias: name for alias, name in metadata.items() if alias not in entries and name in entries}
            self._ties |= {alias.removeprefix(self._prefix): name for alias, name in ties.items()}
            if expected is not None and (lost := expected - entries.keys()):
                raise CheckpointError(f"{path} does not hold {listed(sorted(lost))}, which the index says it does.")
            for name, entry in entries.items():
                if not name.startswith(self._prefix):
                    continue
                if (plain := name.removeprefix(self._prefix)) in found:
                    raise CheckpointError(f"{path} and {found[plain].path} both hold {name!r}.")
                found[plain] = FileTensor(path, name, entry)
        return found

    def lost_ties(self, differences: Differences) -> str:
        """Advice, if the files say that a missing tensor is tied to one that they hold."""
        lost = [f"{name} is tied to {self._ties[name]}" for name in differences.missing if name in self._ties]
        if not lost:
            return ""
        return f" The files say that {listed(lost)}: tie them in the model before; `to_empty` has perhaps untied them."

    def _files(self) -> dict[Path, set[str] | None]:
        """The files to read, and the names that the index says each of them holds."""
        path = self._path
        if path.is_dir():
            single = path / "model.safetensors"
            path = single if single.exists() else path / INDEX
            if not path.exists():
                raise CheckpointError(f"{self._path} holds neither {single.name} nor {INDEX}. Pass the file itself.")
        if path.suffix != ".json":
            return {path: None}
        found: dict[Path, set[str] | None] = {}
        for name, file in read_index(path).items():
            names = found.setdefault(path.parent / file, set())
            assert names is not None
            names.add(name)
        return found

    def _fits(self, held: HeldTensor, source: FileTensor) -> bool:
        found, wrong = source.header, self._differences.wrong
        held.expect(found.shape)
        if found.shape != held.part.shape:
            wrong.append(f"{source.name} has the shape {found.shape}, expected {held.part.shape}")
        elif found.dtype != held.dtype and not (found.dtype.is_floating_point and held.dtype.is_floating_point):
            wrong.append(f"{source.name} has the dtype {found.dtype}, expected {held.dtype}")
        else:
            for box in held.part.boxes:
                self._open.part(source, box)  # reads nothing; what the package refuses is refused before any change
            return True
        return False

    def _require_equal(self, held: HeldTensor, sources: list[FileTensor]) -> None:
        """A tensor that is tied here may be in the files under several names if its bytes are the same."""
        for other in sources[1:]:
            same = other.header.dtype == sources[0].header.dtype and all(
                torch.equal(_bits(self._open.part(sources[0], box)), _bits(self._open.part(other, box)))
                for box in held.part.boxes
                if box.numel
            )
            if not same:
                self._differences.wrong.append(
                    f"{sources[0].name} and {other.name} are tied here, and are two different tensors in the files"
                )

    # -- applying -------------------------------------------------------------------------------------------

    @torch.no_grad()
    def apply(self) -> None:
        for held, source in self._targets:
            for box, view in zip(held.part.boxes, held.views(), strict=True):
                if box.numel:
                    copy_pieces(view, self._open.part(source, box))
        self._model.finish_loading(held for held, _ in self._targets)


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _nbytes(held: HeldTensor) -> int:
    return HeaderEntry(held.dtype, held.part.shape).nbytes
