"""Loading tensors into a model from a checkpoint, from safetensors files, or from a full state dict.

All three are a `Source`. `match` finds the tensors of the model in it before anything changes, and `fill` copies the
boxes that this rank holds. `Differences` is the report of all ranks on what does not match.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import NamedTuple, Protocol

import torch

from ..errors import CheckpointError, listed
from ..state.boxes import Box
from ..state.model import HeldTensor, ModelState
from .plan import TensorEntry
from .values import DTYPES

_log = logging.getLogger("unshard")


class LoadedNames(NamedTuple):
    """Names that were not loaded into a model."""

    missing: list[str]
    """Parameters and persistent buffers that the source lacks, with `strict=False`."""
    unexpected: list[str]
    """Names that the model lacks, with `strict=False`."""
    non_persistent: list[str]
    """Non-persistent buffers of the model, which no state dict or file contains."""


@dataclass
class Differences:
    missing: dict[str, int] = field(default_factory=dict)
    """Names that the checkpoint lacks, and their bytes."""
    unexpected: dict[str, int] = field(default_factory=dict)
    """Names that only the checkpoint has, and their bytes."""
    wrong: list[str] = field(default_factory=list)
    """Mismatches that `strict=False` does not allow, in words."""
    without_state: dict[str, int] = field(default_factory=dict)
    """Parameters without optimizer state while others have some, and their bytes. No error: they may be unused."""

    @staticmethod
    def of_all_ranks(each_rank: list[Differences]) -> Differences:
        """Combine the reports of all ranks."""
        return Differences(
            missing={name: nbytes for each in each_rank for name, nbytes in each.missing.items()},
            # With pipeline parallelism, another rank may need the name.
            unexpected={
                name: nbytes
                for name, nbytes in each_rank[0].unexpected.items()
                if all(name in each.unexpected for each in each_rank)
            },
            wrong=list(dict.fromkeys(text for each in each_rank for text in each.wrong)),
            without_state={name: nbytes for each in each_rank for name, nbytes in each.without_state.items()},
        )

    def refuse(self, where: Path | str, strict: bool, what: str = "checkpoint", look: str = "") -> None:
        """Raise if the checkpoint does not fit. `look`: advice to add to the error."""
        parts = []
        if strict and self.missing:
            parts.append(f"{_counted(self.missing)} missing in the {what}: {listed(self.missing)}.")
        if strict and self.unexpected:
            parts.append(f"{_counted(self.unexpected)} of the {what} unexpected here: {listed(self.unexpected)}.")
        if self.wrong:
            parts.append(f"{len(self.wrong)} cannot be loaded: {listed(self.wrong)}.")
        if parts:
            advice = "" if self.wrong else " Pass strict=False to load the rest."
            raise CheckpointError(f"{where} does not fit. {' '.join(parts)} Nothing was changed.{advice}{look}")

    def warn(self, where: Path) -> None:
        """Log what is not loaded. Call it after `refuse`."""
        for kind, names in (("missing in it", self.missing), ("of it unexpected here", self.unexpected)):
            if names:
                _log.warning("%s is partly loaded: %s %s: %s.", where, _counted(names), kind, listed(names))
        if self.without_state:
            _log.warning(
                "%s: the optimizer has no state for %s: %s. They start without state. If the saved run trained them, "
                "it lost their state.",
                *(where, _counted(self.without_state, "parameter", "parameters"), listed(self.without_state)),
            )


def _counted(names: dict[str, int], one: str = "entry", several: str = "entries") -> str:
    nbytes = sum(names.values())
    return f"{len(names)} {one if len(names) == 1 else several} ({nbytes} bytes)"


class Source(Protocol):
    """Tensors by the names that they have in the model's state dict."""

    prefix: str
    """Precedes names in reports."""
    casts: bool
    """Floating-point tensors are converted to the dtypes of the model."""
    entries: dict[str, TensorEntry]
    aliases: dict[str, str]
    """Entries that are other names of a tied tensor, and the name that it is stored under."""

    def copy(self, name: str, box: Box, target: torch.Tensor) -> None:
        """Copy a box of a tensor."""


def match(model: ModelState, source: Source, differences: Differences) -> list[tuple[HeldTensor, list[str]]]:
    """Find the tensors of a model in a source, and add what does not fit to `differences`.

    Returns the tensors that fit, each with the names that it is stored under. A tied tensor may have any of its names
    in the source. If it is stored under several of them, callers must make sure that these are equal.
    """
    names_of = {held.name: [held.name] for held in model.tensors}
    for alias, name in model.aliases.items():
        names_of[name].append(alias)
    found, used = [], set()
    for held in model.tensors:
        plain = [name.removeprefix("model/") for name in names_of[held.name]]
        names = list(dict.fromkeys(source.aliases.get(name, name) for name in plain if name in source.entries))
        used.update(names)
        if not names:
            differences.missing[source.prefix + plain[0]] = prod(held.part.shape) * held.dtype.itemsize
        elif wrong := list(filter(None, (_misfit(held, name, source) for name in names))):
            differences.wrong += wrong
        else:
            found.append((held, names))
    for name, entry in source.entries.items():
        if name not in used and name not in source.aliases:
            differences.unexpected[source.prefix + name] = entry.nbytes
    return found


def _misfit(held: HeldTensor, name: str, source: Source) -> str:
    entry = source.entries[name]
    dtype = DTYPES[entry.dtype]
    held.expect(entry.shape)
    if entry.shape != held.part.shape:
        return f"{source.prefix}{name} has the shape {entry.shape}, expected {held.part.shape}"
    if dtype != held.dtype and not (source.casts and dtype.is_floating_point and held.dtype.is_floating_point):
        return f"{source.prefix}{name} has the dtype {dtype}, expected {held.dtype}"
    return ""


@torch.no_grad()
def fill(held: HeldTensor, name: str, source: Source) -> None:
    """Copy the boxes of a tensor that this rank holds."""
    for box, view in zip(held.part.boxes, held.views(), strict=True):
        if box.numel:
            source.copy(name, box, view)
