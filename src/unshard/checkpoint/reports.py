"""Reports on checkpoints without a model (`verify`, `inspect`, `diff`), and the report of `prove_resume`."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from .files import CheckpointFiles
from .folders import resolve
from .manifest import read_manifest

_PROGRESS_BLOCKS = 512
"""Blocks between two calls of `progress`: 2 GiB with the default block size."""


def verify(path: str | os.PathLike[str], *, progress: Callable[[int, int], object] | None = None) -> Path:
    """Verify all checksums of a checkpoint and return its folder. Raise a CheckpointError if any file is damaged.

    `path` is a checkpoint, or a folder of checkpoints from which the latest is verified. No process group is needed.
    `progress` is called with the numbers of verified bytes and of all bytes.

    Example::

        folder = checkpoint.verify("checkpoints")
    """
    with CheckpointFiles(resolve(path)) as files:
        done, total = 0, sum(file.nbytes for file in files.manifest.files)
        for number, file in enumerate(files.manifest.files):
            blocks = range(len(file.blocks))
            at_once = _PROGRESS_BLOCKS if progress else max(len(blocks), 1)
            for first in range(0, len(blocks), at_once):
                files.verify(number, blocks[first : first + at_once])
                if progress:
                    progress(min(done + (first + at_once) * files.manifest.block_bytes, done + file.nbytes), total)
            done += file.nbytes
        return files.folder


def contents(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return what `inspect` prints as plain values. Only the manifest is read."""
    folder = resolve(path)
    manifest = read_manifest(folder)
    return {
        "kind": "checkpoint",
        "folder": str(folder),
        "step": manifest.step,
        "ranks": manifest.ranks,
        "checksums": manifest.algorithm,
        "files": [{"name": file.name, "bytes": file.nbytes} for file in manifest.files],
        "tensors": [
            {"name": name, "dtype": entry.dtype, "shape": list(entry.shape), "bytes": entry.nbytes}
            for name, entry in manifest.tensors.items()
        ],
        "aliases": dict(manifest.aliases),
    }


def inspect(path: str | os.PathLike[str]) -> str:
    """Return a printable table of a checkpoint's tensors. Only the manifest is read.

    `path` is a checkpoint, or a folder of checkpoints from which the latest is used. Raises a CheckpointError if there
    is none.

    Example::

        print(checkpoint.inspect("checkpoints"))
    """
    folder = resolve(path)
    manifest = read_manifest(folder)
    rows: list[tuple[str, ...]] = [("tensor", "dtype", "shape", "bytes", "boxes", "files")]
    for name, entry in manifest.tensors.items():
        shape = "x".join(map(str, entry.shape)) or "scalar"
        files = ",".join(str(number) for number in entry.boxes.files.unique().tolist()) or "-"
        rows.append((name, entry.dtype, shape, f"{entry.nbytes:,}", str(len(entry.boxes)), files))
    nbytes = sum(file.nbytes for file in manifest.files)
    others = [name for name in ("optimizer", "scheduler", "scaler") if manifest.values.get(name) is not None]
    heading = [
        str(folder),
        f"step {manifest.step}, saved by {manifest.ranks} rank{'' if manifest.ranks == 1 else 's'}; "
        f"{len(manifest.tensors)} tensors, {nbytes:,} bytes, checksums {manifest.algorithm}; "
        f"besides the model: {', '.join(others) or 'nothing'}",
        *(f"file {number}: {file.name}, {file.nbytes:,} bytes" for number, file in enumerate(manifest.files)),
    ]
    ties = (f"{alias} is tied to {name}" for alias, name in manifest.aliases.items())
    return "\n".join([*heading, "", *table(rows), *ties])


def table(rows: list[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in rows]


_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}
"""Integer types for bitwise comparisons, by element size in bytes."""
_SHOWN = 40
"""Maximum length of a printed value."""
_MOST = 5
"""Maximum number of names that a `ResumeReport` prints under each title."""


@dataclass
class TensorDifference:
    """Measures the differences between two tensors of the same name, shape and dtype."""

    name: str
    elements: int
    differing: int = 0
    """Number of elements whose bytes differ. So 0.0 and -0.0 differ, and NaNs with the same bytes are equal."""
    absolute: float = 0.0
    """The largest |a - b| of differing elements a and b, or infinity if one of them is NaN."""
    relative: float = 0.0
    """The largest |a - b| / max(|a|, |b|) of differing elements a and b, or infinity if one of them is NaN."""

    def add(self, a: torch.Tensor, b: torch.Tensor) -> None:
        """Add the differences between `a` and `b`, which are pieces at the same position in the two tensors."""
        differs = a.view(_BITS[a.itemsize]) != b.view(_BITS[b.itemsize])
        if a.itemsize == 16:  # each element is two integers
            differs = differs.view(-1, 2).any(1)
        count = int(differs.sum())
        if not count:
            return
        self.differing += count
        one, other = _exact(a)[differs], _exact(b)[differs]
        distance = (one - other).abs().nan_to_num(nan=torch.inf)
        size = torch.maximum(one.abs(), other.abs())
        relative = torch.where(distance == 0, 0.0, distance / size).nan_to_num(nan=torch.inf)
        self.absolute = max(self.absolute, distance.max().item())
        self.relative = max(self.relative, relative.max().item())


def _exact(piece: torch.Tensor) -> torch.Tensor:
    return piece.to(torch.complex128 if piece.is_complex() else torch.float64)


@dataclass
class CheckpointDiff:
    """The result of `diff`. `str()` returns a printable report."""

    a: Path
    b: Path
    only_a: list[str] = field(default_factory=list)
    """Names of tensors that only checkpoint `a` has."""
    only_b: list[str] = field(default_factory=list)
    other: list[str] = field(default_factory=list)
    """Descriptions of tensors with different shapes, dtypes or ties."""
    tensors: list[TensorDifference] = field(default_factory=list)
    values: list[str] = field(default_factory=list)
    """Descriptions of differences in the step, the number of ranks, and other values such as optimizer options."""
    same: int = 0
    """Number of tensors that are bitwise equal."""

    @property
    def equal(self) -> bool:
        return not (self.only_a or self.only_b or self.other or self.tensors or self.values)

    def __str__(self) -> str:
        lines = [f"a: {self.a}", f"b: {self.b}", f"{_tensors(self.same)} bitwise equal."]
        if self.equal:
            return "\n".join([*lines, "The checkpoints are equal."])
        rows: list[tuple[str, ...]] = [("tensor", "elements", "differing", "largest |a-b|", "largest relative")]
        for each in self.tensors:
            counts = (f"{each.elements:,}", f"{each.differing:,}")
            rows.append((each.name, *counts, f"{each.absolute:.3g}", f"{each.relative:.3g}"))
        for title, found in (
            (f"{_tensors(len(self.only_a))} only in a:", self.only_a),
            (f"{_tensors(len(self.only_b))} only in b:", self.only_b),
            (f"{_tensors(len(self.other))} different in shape or dtype, or tied in one only:", self.other),
            (f"{_tensors(len(self.tensors))} different:", table(rows) if self.tensors else []),
            ("Values that differ:", self.values),
        ):
            if found:
                lines += ["", title, *(f"  {text}" for text in found)]
        return "\n".join(lines)


def _tensors(count: int) -> str:
    return f"{count} tensor is" if count == 1 else f"{count} tensors are"


def diff(a: str | os.PathLike[str], b: str | os.PathLike[str]) -> CheckpointDiff:
    """Compare two checkpoints, using an amount of memory that does not depend on their size.

    `a` and `b` are checkpoints, or folders of checkpoints from which the latest is used. Tensors are compared
    unsharded, so two tensors can be equal even if different numbers of ranks saved them. No process group is needed.

    Raises a CheckpointError if a checkpoint is missing or damaged.

    Example::

        assert checkpoint.diff("checkpoints", "other").equal
    """
    with CheckpointFiles(resolve(a)) as one, CheckpointFiles(resolve(b)) as other:
        found = CheckpointDiff(one.folder, other.folder)
        names = {name for each in (one.manifest, other.manifest) for name in (*each.tensors, *each.aliases)}
        for name in sorted(names):
            _compare(name, one, other, found)
        for name in ("step", "ranks", "values"):
            _compare_values(name, getattr(one.manifest, name), getattr(other.manifest, name), found.values)
    return found


def _compare(name: str, one: CheckpointFiles, other: CheckpointFiles, found: CheckpointDiff) -> None:
    a, b = one.manifest.find(name), other.manifest.find(name)
    if a is None or b is None:
        (found.only_b if a is None else found.only_a).append(name)
        return
    ties = (one.manifest.aliases.get(name), other.manifest.aliases.get(name))
    if ties[0] != ties[1]:
        texts = ("not tied" if tie is None else f"tied to {tie}" for tie in ties)
        found.other.append(f"{name}: {' in a, '.join(texts)} in b")
    if (a.shape, a.dtype) != (b.shape, b.dtype):
        found.other.append(f"{name}: {a.dtype} of shape {a.shape} in a, {b.dtype} of shape {b.shape} in b")
    elif None in ties:  # tensors that are tied in both checkpoints are compared under their stored names
        difference = TensorDifference(name, a.boxes.split.numel)
        for mine, theirs in zip(one.pieces(a), other.pieces(b), strict=True):
            difference.add(mine, theirs)
        if difference.differing:
            found.tensors.append(difference)
        else:
            found.same += 1


def _compare_values(path: str, a: Any, b: Any, found: list[str]) -> None:
    if type(a) is dict and type(b) is dict and "$" not in a and "$" not in b:
        for key in sorted(a.keys() | b.keys()):
            where = f"{path}.{key}" if path != "values" else key
            if key not in a or key not in b:
                found.append(f"{where}: only in {'a' if key in a else 'b'}")
            else:
                _compare_values(where, a[key], b[key], found)
    elif type(a) is list and type(b) is list and len(a) == len(b):
        for number, (mine, theirs) in enumerate(zip(a, b, strict=True)):
            _compare_values(f"{path}[{number}]", mine, theirs, found)
    elif repr(a) != repr(b):  # equates NaNs
        found.append(f"{path}: {_shown(a)} in a, {_shown(b)} in b")


def _shown(value: Any) -> str:
    if type(value) is dict and value.get("$") == "tensor":
        return f"a tensor ({value.get('dtype', value.get('name'))})"
    if type(value) is list:
        return f"a list of {len(value)}"
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


# -- the report of `prove_resume` ----------------------------------------------------------------------------


@dataclass(frozen=True)
class ResumeDifference:
    """A tensor or value that differs between the uninterrupted and the resumed run."""

    name: str
    """`loss`, a name in the checkpoint (`model/head.weight`, `rng.torch`, `data.position`), or the location of unsaved
    state in the run (`model.blocks.0.calls`)."""
    step: int
    """The step after which the values differ. If they differ right after loading, this is the checkpoint's step."""
    rank: int
    text: str
    """Shows both values, or how much they differ."""


@dataclass(frozen=True)
class ResumeReport:
    """The report that `prove_resume` returns, which is the same on all ranks. `str()` returns a printable report.

    The uninterrupted run trained `before` steps, and both runs `steps` steps, of which `compared` were compared.
    `differences` lists the first tensors and values that differ, and `unsaved` state that no checkpoint holds.
    `repeatable` is False if a second resumed run differs from the first one.
    """

    before: int
    steps: int
    ranks: int
    compared: int
    """Number of tensors and values that rank 0 compares after each step."""
    differences: list[ResumeDifference] = field(default_factory=list)
    """Up to 20 differences per rank after the first step at which any rank differs."""
    unsaved: list[ResumeDifference] = field(default_factory=list)
    """Unsaved state that differs after loading. This state may cause the differences or have no effect."""
    repeatable: bool = True
    """False if a second resumed run differs from the first one."""

    @property
    def equal(self) -> bool:
        """True if losses and saved state are bitwise equal after each step on all ranks."""
        return not self.differences

    @property
    def first(self) -> ResumeDifference | None:
        return self.differences[0] if self.differences else None

    def __str__(self) -> str:
        ranks = f"{self.ranks} rank{'' if self.ranks == 1 else 's'}"
        if self.first is None:
            text = f"The resumed run is bitwise equal: {self.steps} steps after step {self.before}, with {ranks}; the "
            text += f"losses, and after each step {self.compared} tensors and values on rank 0."
            return "\n".join([text, *_lines("Not saved and different, without effect on these steps:", self.unsaved)])
        first = self.first
        at_once = [each for each in self.differences if each.name == first.name]
        others = [each for each in self.differences if each.name != first.name]
        when = f"step {first.step}" if first.step > self.before else "after loading, before the first step"
        lines = [f"The resumed run differs from the run that went on after step {self.before}, with {ranks}."]
        lines += _lines(f"First, {when}:", at_once) + _lines("At the same time:", others)
        lines += _lines("Not saved, and different after loading, so it may be the cause:", self.unsaved)
        if not self.repeatable:
            lines.append("A second resumed run differs from the first one, too. So the steps are not deterministic, or")
            lines.append("they use state that is neither saved nor rebuilt by make(): a global variable, a file.")
        elif not self.unsaved:
            lines.append("The cause is not in an attribute of the run's objects. Check state that functions and")
            lines.append("iterators hold, and state outside the dict that make() returns.")
        return "\n".join(lines)


def _lines(title: str, differences: list[ResumeDifference]) -> list[str]:
    by_name: dict[str, list[ResumeDifference]] = {}
    for each in differences:
        by_name.setdefault(each.name, []).append(each)
    lines = []
    for name, (first, *others) in list(by_name.items())[:_MOST]:
        also = f" (and {len(others)} other{'' if len(others) == 1 else 's'})" if others else ""
        lines.append(f"  {name} on rank {first.rank}{also}: {first.text}")
    more = [f"  and {len(by_name) - _MOST} more"] if len(by_name) > _MOST else []
    return [title, *lines, *more] if lines else []
