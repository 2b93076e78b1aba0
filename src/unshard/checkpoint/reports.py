"""Checkpoints looked at without a model: are they whole, and what do they hold."""

from __future__ import annotations

import os
from pathlib import Path

from .files import CheckpointFiles
from .folders import resolve
from .manifest import Manifest, read_manifest


def verify(path: str | os.PathLike[str]) -> Path:
    """Read all of a checkpoint and compare all checksums; returns its folder, or raises a CheckpointError.

    `path`: a checkpoint, or the folder with several, of which the latest is verified. Needs no process group.
    """
    folder = resolve(path)
    manifest = read_manifest(folder)
    with CheckpointFiles(folder, manifest) as files:
        for number, file in enumerate(manifest.files):
            files.verify(number, range(len(file.blocks)))
    return folder


def inspect(path: str | os.PathLike[str]) -> str:
    """A table of the tensors of a checkpoint, from its manifest alone."""
    folder = resolve(path)
    manifest = read_manifest(folder)
    rows: list[tuple[str, ...]] = [("tensor", "dtype", "shape", "bytes", "boxes", "files")]
    for name, entry in manifest.tensors.items():
        shape = "x".join(map(str, entry.shape)) or "scalar"
        files = ",".join(str(number) for number in sorted({each.file for each in entry.boxes})) or "-"
        rows.append((name, entry.dtype, shape, f"{entry.nbytes:,}", str(len(entry.boxes)), files))
    return "\n".join([*_heading(folder, manifest), "", *table(rows), *_footer(manifest)])


def _heading(folder: Path, manifest: Manifest) -> list[str]:
    nbytes = sum(file.nbytes for file in manifest.files)
    others = [name for name in ("optimizer", "scheduler", "scaler") if manifest.values.get(name) is not None]
    return [
        str(folder),
        f"step {manifest.step}, saved by {manifest.ranks} rank{'' if manifest.ranks == 1 else 's'}; "
        f"{len(manifest.tensors)} tensors, {nbytes:,} bytes, checksums {manifest.algorithm}; "
        f"besides the model: {', '.join(others) or 'nothing'}",
        *(f"file {number}: {file.name}, {file.nbytes:,} bytes" for number, file in enumerate(manifest.files)),
    ]


def _footer(manifest: Manifest) -> list[str]:
    return [f"{alias} is tied to {name}" for alias, name in manifest.aliases.items()]


def table(rows: list[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in rows]
