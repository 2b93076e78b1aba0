"""Loads safetensors files into models, and exports the models in checkpoints to safetensors files.

A rank reads only the elements that it holds. An export handles about a million elements at a time. A file consists of
the length of the header (8 bytes), the header, and the tensors one after the other. The header is JSON:

    {"__metadata__": {"format": "pt"}, "bias": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}, ...}

Offsets count from the end of the header. Files are untrusted input, so `read_header` validates every field.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import logging
import os
import re
import socket
import struct
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from ..errors import ArgumentError, CheckpointError, listed
from ..sizes import bytes_in
from ..state.boxes import Box, full_box
from ..state.model import HeldTensor, ModelState, model_state, non_persistent_names
from . import storage
from .files import CheckpointFiles, copy_pieces, host_pieces, write_file
from .folders import resolve
from .load import LoadedNames, fill, match
from .manifest import UNCAST, Malformed, Manifest, TensorEntry, best_algorithm, without_duplicates
from .ranks import Differences, begin, refuse_different_files, together
from .values import DTYPES

_log = logging.getLogger("unshard")

_NAMES = (
    "F64=float64 F32=float32 F16=float16 BF16=bfloat16 I64=int64 I32=int32 I16=int16 I8=int8 U64=uint64 U32=uint32 "
    "U16=uint16 U8=uint8 BOOL=bool C64=complex64 F8_E4M3=float8_e4m3fn F8_E5M2=float8_e5m2 F8_E4M3FNUZ=float8_e4m3fnuz "
    "F8_E5M2FNUZ=float8_e5m2fnuz"
)
CODES: dict[str, str] = dict(pair.split("=") for pair in _NAMES.split())
"""Maps dtype codes of safetensors files to dtype names of checkpoints."""
CODE_OF = {name: code for code, name in CODES.items()}
MAX_HEADER_BYTES = 100_000_000
"""The package safetensors has the same limit."""
INDEX = "model.safetensors.index.json"
METADATA = "__metadata__"
_MAX = 2**60


def header_bytes(tensors: dict[str, TensorEntry], metadata: dict[str, str]) -> bytes:
    """Return the header, preceded by its length. Callers must write the tensors after it, in the order of `tensors`."""
    header: dict[str, Any] = {METADATA: metadata}
    end = 0
    for name, entry in tensors.items():
        begin, end = end, end + entry.nbytes
        header[name] = {"dtype": CODE_OF[entry.dtype], "shape": entry.shape, "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # tensors start at a multiple of 8, so they can be views of a mapped file
    if len(text) > MAX_HEADER_BYTES:
        raise CheckpointError(
            f"The header of a file has {len(text)} bytes, and the limit is {MAX_HEADER_BYTES}: it names too many "
            "tensors. Choose a smaller maximum file size."
        )
    return struct.pack("<Q", len(text)) + text


def read_header(path: Path) -> tuple[dict[str, TensorEntry], dict[str, str], bytes]:
    """Return a file's tensor entries, its metadata, and all bytes up to the end of its header."""
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
    are_lists = type(shape) is type(offsets) is list and len(shape) <= 64 and len(offsets) == 2
    if not are_lists or not all(type(each) is int and 0 <= each <= _MAX for each in (*shape, *offsets)):
        raise Malformed(f"{shown} has an invalid shape or invalid offsets")
    entry = TensorEntry(CODES[code], tuple(shape))
    if offsets[1] - offsets[0] != entry.nbytes:
        raise Malformed(
            f"{shown} has the offsets {offsets}, and {entry.nbytes} bytes by its dtype {code} and shape {shape}"
        )
    return entry, offsets[0], offsets[1]


def read_index(path: Path) -> dict[str, str]:
    """Read an index file and return the file name of each tensor."""
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
            # Refuse separators, because a name must not lead out of the folder.
            if type(name) is not str or not name.endswith(".safetensors") or {"/", "\\", "\0"} & set(name):
                raise Malformed(f"{str(name)[:100]!r} is not the name of a safetensors file in its folder")
        return files
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error.strerror}).") from error
    except (Malformed, ValueError, RecursionError) as error:
        raise CheckpointError(f"The index {path} is malformed: {error}.") from error


# -- loading ------------------------------------------------------------------------------------------------


UNMAP_BYTES = 64 * 2**20
"""Number of read bytes after which a file is reopened. Until a file is closed, pages that were read stay in memory."""


def load_safetensors(
    model: nn.Module, path: str | os.PathLike[str], *, strict: bool = True, prefix: str = ""
) -> LoadedNames:
    """Load safetensors files into a model, which may be sharded. Example: `load_safetensors(model, "weights")`.

    `path` is a file, or a folder with `model.safetensors` or an index. All ranks must call this function, and each
    reads only the elements that it holds. If the model is on the meta device, call `model.to_empty(device=...)` first.
    Floating-point tensors are converted to the dtypes of the model. Only tensors whose names start with `prefix` are
    loaded, under names without `prefix`. If names are missing or unexpected, or if shapes or dtypes do not match, all
    ranks raise a CheckpointError and nothing changes. `strict=False` allows missing and unexpected names.
    """
    what, state = f"Loading {path}", ModelState()
    targets: list[tuple[HeldTensor, str]] = []
    source: SafetensorsSource

    def compare() -> tuple[str, str, Differences]:
        """Compare the file headers with the model. Return a hash of the headers, this host, and the differences."""
        nonlocal source, state
        differences, source, state = Differences(), SafetensorsSource(Path(path), prefix), model_state(model)
        for held, names in match(state, source.entries, differences):
            for name in names:
                for box in held.box_map.boxes:
                    source.read(name, box)  # only maps the file, so a rejected file fails before any change
            differences.wrong += [
                f"{names[0]} and {other} are tied here, and are two different tensors in the files"
                for other in names[1:]
                if not source.equal(held, names[0], other)
            ]
            targets.append((held, names[0]))
        return source.hash.hexdigest(), socket.gethostname(), differences

    def apply() -> None:
        for held, name in targets:
            fill(held, partial(source.copy, name))
        state.finish_loading(held for held, _ in targets)

    begin("load safetensors files", model)
    answers = together(what, compare)
    refuse_different_files([each[:2] for each in answers], f"files in {path}")
    found = Differences.of_all_ranks([differences for *_, differences in answers])
    lost = [f"{name} is tied to {source.ties[name]}" for name in found.missing if name in source.ties]
    look = f" The files say that {listed(lost)}. Tie them in the model first; `to_empty` may have untied them."
    found.refuse(Path(path), strict, what="files", look=look if lost else "")
    together(what, apply)
    return LoadedNames(sorted(found.missing), sorted(found.unexpected), non_persistent_names(model))


class SafetensorsSource:
    """Reads tensors from safetensors files with the package safetensors."""

    def __init__(self, path: Path, prefix: str):
        try:
            self._package: Any = importlib.import_module("safetensors")
        except ImportError as error:
            raise CheckpointError(
                "Reading safetensors files needs the package safetensors, which is not installed: "
                "pip install safetensors"
            ) from error
        self._prefix = prefix
        self.entries: dict[str, TensorEntry] = {}
        self._paths: dict[str, Path] = {}
        self.ties: dict[str, str] = {}
        """Maps each tied name that the files omit to the name under which its tensor is stored."""
        self.hash = hashlib.sha256()
        """Hash of all headers."""
        for file, expected in _files(path).items():
            tensors, metadata, raw = read_header(file)
            self.hash.update(raw)
            ties = {alias: name for alias, name in metadata.items() if alias not in tensors and name in tensors}
            self.ties |= {alias.removeprefix(prefix): name for alias, name in ties.items()}
            if expected is not None and (lost := expected - tensors.keys()):
                raise CheckpointError(f"{file} does not hold {listed(sorted(lost))}, which the index says it does.")
            for name, entry in tensors.items():
                if name.startswith(prefix):
                    plain = name.removeprefix(prefix)
                    if plain in self.entries:
                        raise CheckpointError(f"{file} and {self._paths[plain]} both hold {name!r}.")
                    self.entries[plain], self._paths[plain] = entry, file
        self._open: tuple[Path, Any] | None = None
        self._nbytes = 0

    def copy(self, name: str, box: Box, target: torch.Tensor) -> None:
        copy_pieces(target, self.read(name, box))

    def read(self, name: str, box: Box) -> torch.Tensor:
        """Return a box as a view of the mapped file. The system reads each page on first access."""
        path, entry = self._paths[name], self.entries[name]
        if self._open is None or self._open[0] != path or self._nbytes > UNMAP_BYTES:
            self._open, self._nbytes = (path, self._package.safe_open(path, framework="pt", device="cpu")), 0
        self._nbytes += box.numel * entry.itemsize
        found: torch.Tensor = self._open[1].get_slice(self._prefix + name)[box.slices_in(full_box(entry.shape))]
        if found.dtype != DTYPES[entry.dtype] or tuple(found.shape) != box.size:
            raise CheckpointError(
                f"{path} gave {found.dtype} of shape {tuple(found.shape)} for {name!r}, expected {entry.dtype} of "
                f"shape {box.size}. The file changed while it was read."
            )
        return found

    def equal(self, held: HeldTensor, one: str, other: str) -> bool:
        """Return True if tensors `one` and `other` have the same dtype and the same bytes in this rank's boxes."""
        return self.entries[one].dtype == self.entries[other].dtype and all(
            torch.equal(*(self.read(name, box).contiguous().reshape(-1).view(torch.uint8) for name in (one, other)))
            for box in held.box_map.boxes
            if box.numel
        )


def _files(path: Path) -> Mapping[Path, set[str] | None]:
    """Map each file to read to the names that the index lists for it, or to None if there is no index."""
    given = path
    if path.is_dir():
        single = path / "model.safetensors"
        path = single if single.exists() else path / INDEX
        if not path.exists():
            raise CheckpointError(f"{given} holds neither {single.name} nor {INDEX}. Pass the file itself.")
    if path.suffix != ".json":
        return {path: None}
    found: defaultdict[Path, set[str]] = defaultdict(set)
    for name, file in read_index(path).items():
        found[path.parent / file].add(name)
    return found


# -- exporting ----------------------------------------------------------------------------------------------

_HIDDEN = ".exporting_"
_OWN = re.compile(rf"model(-\d{{5,}}-of-\d{{5,}})?\.safetensors|{re.escape(INDEX)}|{re.escape(_HIDDEN)}.*")
"""Matches the names of files that an export writes. `overwrite=True` replaces or deletes these files."""


class Exported(NamedTuple):
    """A tensor to export. `entry` describes the tensor in the checkpoint, and `header` describes it in the file."""

    name: str
    entry: TensorEntry
    header: TensorEntry


def export(
    checkpoint: str | os.PathLike[str],
    folder: str | os.PathLike[str],
    *,
    dtype: torch.dtype | str | None = None,
    max_file_size: int | str = "5GB",
    prefix: str = "",
    tied_names: Iterable[str] = (),
    overwrite: bool = False,
) -> list[Path]:
    """Export the model of a checkpoint to safetensors files in `folder`, and return the paths of the files.

    Floating-point tensors are cast to `dtype` if it is given, except tensors of quantized layers. `max_file_size` is a
    number of bytes or a string such as "5GB". A larger tensor gets its own file. `prefix` is added to all names. A tied
    tensor is written once, under its name in `tied_names` or else the first of its names in alphabetical order. If the
    folder is not empty, a CheckpointError is raised unless `overwrite=True`, which replaces an earlier export. Other
    wrong arguments raise an ArgumentError. Example: `export("checkpoints", "exported", dtype=torch.bfloat16)`.
    """
    try:
        limit = bytes_in(max_file_size)
    except ValueError as error:
        raise ArgumentError(f"The largest file size is wrong: {error}.") from None
    target, cast = Path(folder), None
    if dtype is not None:
        cast = str(dtype).removeprefix("torch.")
        known = [name for name, each in DTYPES.items() if each.is_floating_point and name in CODE_OF]
        if cast not in known:
            raise ArgumentError(f"dtype must be one of {', '.join(known)}, got {dtype!r}.")
    with CheckpointFiles(resolve(checkpoint)) as stored:
        manifest = stored.manifest
        pairs = [(alias, key) for alias, key in manifest.aliases.items() if key.startswith("model/")]
        tied = {name.removeprefix("model/"): pair[1] for pair in pairs for name in pair}
        names = _names(manifest, prefix, tied, tied_names)
        if manifest.values.get("extra"):
            _log.warning("%s has extra state of modules, which safetensors files cannot hold.", stored.folder)
        uncast, tensors = set(manifest.values.get(UNCAST, ())), []
        for key, name in names.items():
            entry = manifest.tensors[key]
            is_float = DTYPES[entry.dtype].is_floating_point
            written = cast if cast is not None and is_float and key not in uncast else entry.dtype
            if written not in CODE_OF:
                advice = " Pass a dtype to export." if is_float else ""
                raise CheckpointError(
                    f"{name!r} has the dtype {entry.dtype}, which safetensors files cannot hold.{advice}"
                )
            tensors.append(Exported(name, entry, TensorEntry(written, entry.shape)))
        if not tensors:
            raise CheckpointError(f"{stored.folder} holds no tensor of a model.")
        files = _in_files(tensors, limit)
        ties = {prefix + name: names[key] for name, key in tied.items()}
        contents = {name: _buffers(stored, inside, ties) for name, inside in files.items()}
        if len(files) > 1:
            size = sum(each.header.nbytes for each in tensors)
            file_of = {each.name: name for name, inside in files.items() for each in inside}
            index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(file_of.items()))}
            contents[INDEX] = iter([memoryview(f"{json.dumps(index, indent=2)}\n".encode())])
        _write(target, contents, overwrite)
    return [target / name for name in files]


def _names(manifest: Manifest, prefix: str, tied: dict[str, str], tied_names: Iterable[str]) -> dict[str, str]:
    """Map names in the checkpoint to names in the files. `tied` maps each name of a tied tensor to its stored name."""
    found = {key: prefix + key.removeprefix("model/") for key in manifest.tensors if key.startswith("model/")}
    chosen: dict[str, str] = {}
    for name in tied_names:
        if name not in tied or chosen.setdefault(tied[name], name) != name:
            raise ArgumentError(
                f"The tied name {name!r} is not a tied tensor of the checkpoint, or is the second name of the same "
                f"tensor. Tied tensors: {listed(tied, 8) or 'none'}."
            )
        found[tied[name]] = prefix + name
    if METADATA in found.values():
        raise CheckpointError(f"A tensor has the name {METADATA}, which safetensors files use for something else.")
    return found


def _in_files(tensors: list[Exported], limit: int) -> dict[str, list[Exported]]:
    """Assign tensors to files in alphabetical order. In a file, larger dtypes come first, which aligns all tensors."""
    files: list[list[Exported]] = [[]]
    size = 0
    for each in sorted(tensors):
        if files[-1] and size + each.header.nbytes > limit:
            files.append([])
            size = 0
        files[-1].append(each)
        size += each.header.nbytes
    count = len(files)
    names = [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]
    inside = (sorted(file, key=lambda each: (-each.header.itemsize, each.name)) for file in files)
    return dict(zip(names if count > 1 else ["model.safetensors"], inside, strict=True))


def _buffers(stored: CheckpointFiles, tensors: list[Exported], aliases: dict[str, str]) -> Iterator[memoryview]:
    entries = {each.name: each.header for each in tensors}
    # `safetensors.torch.save_model` stores tied names in the same way.
    ties = {alias: name for alias, name in aliases.items() if name in entries and alias != name}
    yield memoryview(header_bytes(entries, {**ties, "format": "pt"}))
    for each in tensors:
        for piece in stored.pieces(each.entry):
            yield from host_pieces(piece, DTYPES[each.header.dtype])


def _write(folder: Path, contents: dict[str, Iterator[memoryview]], overwrite: bool) -> None:
    """Write all files under hidden names, and rename the files after all of them are on the disk."""
    made = not folder.exists()
    try:
        storage.make_folder(folder, exist_ok=True)
        present = storage.names_in(folder)
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be created or is not a folder ({error.strerror}).") from error
    if present and not overwrite:
        raise CheckpointError(
            f"{folder} is not empty: {listed(sorted(present))}. Choose a new folder, or pass overwrite "
            "(--overwrite) to replace the files of an earlier export."
        )
    hidden = {name: folder / f"{_HIDDEN}{os.urandom(8).hex()}" for name in contents}
    try:
        for name, buffers in contents.items():
            write_file(hidden[name], buffers, best_algorithm())
        # Delete the old index first and add the new one last, so no index names files of two exports.
        (folder / INDEX).unlink(missing_ok=True)
        for name in storage.names_in(folder):
            if _OWN.fullmatch(name) and name not in hidden and folder / name not in hidden.values():
                (folder / name).unlink()
        for name, path in hidden.items():
            storage.rename(path, folder / name)
        storage.sync_folder(folder)
    except BaseException:
        for path in hidden.values():
            path.unlink(missing_ok=True)
        if made:
            with suppress(OSError):  # not empty, because another program has written files
                folder.rmdir()
        raise
