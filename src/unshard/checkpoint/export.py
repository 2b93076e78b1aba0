"""Export of a checkpoint's model to safetensors files. Tensors are read and written piece by piece."""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import torch

from ..errors import ArgumentError, CheckpointError, listed
from . import storage
from .files import CheckpointFiles, host_buffers, write_file
from .folders import resolve
from .manifest import UNCAST, Manifest, best_algorithm
from .plan import TensorEntry
from .safetensors import CODE_OF, INDEX, METADATA, header_bytes
from .values import DTYPES

_log = logging.getLogger("unshard")

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "MIB": 2**20, "GIB": 2**30}
_HIDDEN = ".exporting_"
_OWN = re.compile(rf"model(-\d{{5,}}-of-\d{{5,}})?\.safetensors|{re.escape(INDEX)}|{re.escape(_HIDDEN)}.*")
"""Names of files that an export writes, and replaces."""


class Exported(NamedTuple):
    """A tensor to write: its name, its entry in the checkpoint, and its entry in the file."""

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
    """Write the model of a checkpoint to safetensors files; returns their paths.

    `dtype`: cast floating-point tensors to it, except those of quantized layers. `max_file_size`: bytes, or a string
    such as "5GB"; a larger tensor gets its own file. `prefix`: precedes all names. A tied tensor is written once, under
    its name in `tied_names`, or else the first of its names in alphabetical order. If the folder contains files, it
    raises; `overwrite=True` replaces the files of an earlier export. Needs neither a process group nor a GPU, and only
    the memory of a few pieces of a tensor.
    """
    limit, target = _bytes(max_file_size), Path(folder)
    with CheckpointFiles(resolve(checkpoint)) as stored:
        names = _names(stored.manifest, prefix, tied_names)
        if stored.manifest.values.get("extra"):
            _log.warning("%s has extra state of modules, which safetensors files cannot hold.", stored.folder)
        uncast, target_dtype = set(stored.manifest.values.get(UNCAST, ())), _dtype(dtype)
        tensors = [
            _exported(name, stored.manifest.tensors[key], None if key in uncast else target_dtype)
            for key, name in names.items()
        ]
        if not tensors:
            raise CheckpointError(f"{stored.folder} holds no tensor of a model.")
        ties = _ties(stored.manifest, names)
        aliases = {prefix + _plain(name): names[pair[1]] for pair in ties for name in pair}
        return _Export(target, stored, _files(tensors, limit), aliases).run(overwrite)


def _bytes(size: int | str) -> int:
    match = re.fullmatch(r"(\d+(?:\.\d+)?) *([KMGT]?I?B?)", str(size).strip().upper())
    unit = match[2] if match is not None else "?"
    found = int(float(match[1]) * _UNITS[unit]) if match is not None and unit in _UNITS else 0
    if found < 1:
        raise ArgumentError(
            f"max_file_size must be a number of bytes, or a string such as '5GB' or '500MiB', got {size!r}."
        )
    return found


def _dtype(dtype: torch.dtype | str | None) -> str | None:
    known = [name for name, each in DTYPES.items() if each.is_floating_point and name in CODE_OF]
    name = str(dtype).removeprefix("torch.")
    if dtype is not None and name not in known:
        raise ArgumentError(f"dtype must be one of {', '.join(known)}, got {dtype!r}.")
    return None if dtype is None else name


def _plain(key: str) -> str:
    return key.removeprefix("model/")


def _ties(manifest: Manifest, names: Iterable[str]) -> Iterator[tuple[str, str]]:
    return ((alias, key) for alias, key in manifest.aliases.items() if key in names)


def _names(manifest: Manifest, prefix: str, tied_names: Iterable[str]) -> dict[str, str]:
    """Names in the files, by names in the checkpoint."""
    found = {key: prefix + _plain(key) for key in manifest.tensors if key.startswith("model/")}
    tied = {_plain(name): key for pair in _ties(manifest, found) for name in pair for key in pair[1:]}
    chosen: dict[str, str] = {}
    for name in tied_names:
        if name not in tied or chosen.setdefault(tied[name], name) != name:
            raise ArgumentError(
                f"tied_names has {name!r}, which is not a tied tensor of the checkpoint, or is the second name of the "
                f"same tensor. Tied tensors: {listed(tied, 8) or 'none'}."
            )
        found[tied[name]] = prefix + name
    if METADATA in found.values():
        raise CheckpointError(f"A tensor has the name {METADATA}, which safetensors files use for something else.")
    return found


def _exported(name: str, entry: TensorEntry, dtype: str | None) -> Exported:
    is_float = DTYPES[entry.dtype].is_floating_point
    written = dtype if dtype is not None and is_float else entry.dtype
    if written not in CODE_OF:
        advice = " Pass a dtype to export." if is_float else ""
        raise CheckpointError(f"{name!r} has the dtype {entry.dtype}, which safetensors files cannot hold.{advice}")
    return Exported(name, entry, TensorEntry(written, entry.shape))


def _files(tensors: list[Exported], limit: int) -> list[list[Exported]]:
    """Assign tensors to files in alphabetical order. In a file, larger elements come first, so that all are aligned."""
    files: list[list[Exported]] = [[]]
    size = 0
    for each in sorted(tensors):
        if files[-1] and size + each.header.nbytes > limit:
            files.append([])
            size = 0
        files[-1].append(each)
        size += each.header.nbytes
    return [sorted(file, key=lambda each: (-each.header.itemsize, each.name)) for file in files]


class _Export:
    def __init__(self, folder: Path, stored: CheckpointFiles, files: list[list[Exported]], aliases: dict[str, str]):
        self._folder, self._stored, self._aliases = folder, stored, aliases
        count = len(files)
        names = [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]
        self._files = dict(zip(names if count > 1 else ["model.safetensors"], files, strict=True))

    def run(self, overwrite: bool) -> list[Path]:
        """Write hidden files, and rename them when all are on the disk."""
        made = not self._folder.exists()
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            present = os.listdir(self._folder)
        except OSError as error:
            raise CheckpointError(f"{self._folder} cannot be created or is not a folder ({error.strerror}).") from error
        if present and not overwrite:
            raise CheckpointError(
                f"{self._folder} is not empty: {listed(sorted(present))}. Choose a new folder, or pass overwrite "
                "(--overwrite) to replace the files of an earlier export."
            )
        hidden = {name: self._folder / f"{_HIDDEN}{os.urandom(8).hex()}" for name in (*self._files, INDEX)}
        try:
            for name, tensors in self._files.items():
                write_file(hidden[name], self._buffers(tensors), best_algorithm())
            if len(self._files) > 1:
                write_file(hidden[INDEX], [memoryview(self._index())], best_algorithm())
            self._publish({name: path for name, path in hidden.items() if path.exists()})
        except BaseException:
            for path in hidden.values():
                path.unlink(missing_ok=True)
            if made:
                with suppress(OSError):  # not empty: another program has written files
                    self._folder.rmdir()
            raise
        return [self._folder / name for name in self._files]

    def _publish(self, hidden: dict[str, Path]) -> None:
        # Delete the old index first and add the new one last, so that no index names files of two exports.
        (self._folder / INDEX).unlink(missing_ok=True)
        for name in os.listdir(self._folder):
            if _OWN.fullmatch(name) and name not in hidden and self._folder / name not in hidden.values():
                (self._folder / name).unlink()
        for name, path in hidden.items():
            os.rename(path, self._folder / name)
        storage.sync_folder(self._folder)

    def _buffers(self, tensors: list[Exported]) -> Iterator[memoryview]:
        names = {each.name for each in tensors}
        # `safetensors.torch.save_model` stores tied names in the same way.
        ties = {alias: name for alias, name in self._aliases.items() if name in names and alias != name}
        header = header_bytes(((each.name, each.header) for each in tensors), {**ties, "format": "pt"})
        yield memoryview(header)
        for each in tensors:
            for piece in self._stored.pieces(each.entry):
                yield from host_buffers(piece, DTYPES[each.header.dtype])

    def _index(self) -> bytes:
        files = {each.name: name for name, tensors in self._files.items() for each in tensors}
        size = sum(each.header.nbytes for tensors in self._files.values() for each in tensors)
        index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(files.items()))}
        return f"{json.dumps(index, indent=2)}\n".encode()
