"""Loading tensors into a model from a checkpoint, from safetensors files, or from a full state dict.

All three are a `Source`. `match` finds the tensors of the model in it before anything changes, and `fill` copies the
boxes that this rank holds.
"""

from __future__ import annotations

from math import prod
from typing import Protocol

import torch

from ..state.boxes import Box
from ..state.model import HeldTensor, ModelState
from .differences import Differences
from .plan import TensorEntry
from .values import DTYPES


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
