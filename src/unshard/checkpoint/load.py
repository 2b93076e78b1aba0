"""Loads a training run from a checkpoint. All ranks compare and verify everything before any rank changes anything.

`match` compares a model with named tensors of a checkpoint, safetensors files or a full state dict. `fill` copies the
boxes that this rank holds.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer

from ..errors import CheckpointError, listed
from ..state.boxes import Box, full_box
from ..state.model import HeldTensor, ModelState, check_model_and_optimizer, model_state
from . import storage
from .files import CheckpointFiles
from .folders import folder_name, later_than, published, resolve
from .manifest import MANIFEST, Manifest, TensorEntry
from .optimizer import OptimizerLoad
from .ranks import (
    SHARE,
    Differences,
    begin,
    error_text,
    on_first_rank,
    rank_and_size,
    refuse_different_files,
    refuse_different_parts,
    require_seen,
    together,
)
from .values import DTYPES, check_rng_state, decode, seed_new_rank, set_rng_state, stored_names

_log = logging.getLogger("unshard")
PARTS = ("optimizer", "scheduler", "scaler", "data")
_EXTRA = "extra/"
_TRIES = 5
"""Maximum number of attempts to load the latest checkpoint, which another job may delete in the meantime."""


def load(
    path: str | os.PathLike[str],
    *,
    model: nn.Module,
    optimizer: Optimizer | None = None,
    scheduler: Any = None,
    scaler: Any = None,
    data: Any = None,
    rng: bool = True,
    strict: bool = True,
) -> int:
    """Load a training run that `save` wrote, on any number of ranks, and return its step.

    All ranks must call this function. `path` is a checkpoint, or a folder of checkpoints from which the latest is
    loaded. Only the objects that you pass are loaded, and each rank reads and verifies only the bytes that it needs. If
    anything is missing, unexpected or damaged, or has a different shape or dtype, all ranks raise a CheckpointError and
    nothing changes. `strict=False` allows missing and unexpected names and loads the rest.

    If the number of ranks has changed, the saved states of `data` must be equal on all ranks, or `data` must have a
    method `load_state_dicts` that takes the list of all ranks' states. If `rng` is True, each rank restores the random
    number generators of the saved rank with the same number, and new ranks derive a seed from the step and their rank.

    `model`, `optimizer`, `scheduler`, `scaler` and `data` are the objects that were saved, built again.

    Raises:
        ArgumentError: an argument is invalid.
        CheckpointError: the checkpoint is missing or damaged, or does not fit.

    Example::

        step = checkpoint.load("checkpoints", model=model, optimizer=optimizer)
    """
    what, parts = f"Loading {path}", {"optimizer": optimizer, "scheduler": scheduler, "scaler": scaler, "data": data}
    check_model_and_optimizer(model, optimizer)
    given = {name: each for name, each in parts.items() if each is not None}
    begin("load a checkpoint", model)
    with torch.inference_mode(False):  # optimizers cannot update state that is created in inference mode
        loading = _verified(what, Path(path), strict, partial(Loading, model, given, rng))
        with loading.opened:
            on_first_rank(what, lambda: loading.warn(Path(path)))
            together(what, loading.apply_values)
            together(what, loading.apply_tensors)
    return loading.manifest.step


def _verified(what: str, path: Path, strict: bool, make: Callable[[Path], Loading]) -> Loading:
    """Return a `Loading` that has compared and verified a checkpoint. Retry if another job deletes the checkpoint."""
    for tries_left in reversed(range(_TRIES)):
        # Rank 0 chooses for all ranks, because a host whose view is out of date would choose another checkpoint.
        folder, is_given, is_there = on_first_rank(what, lambda: _chosen(path))
        loading = make(folder)
        try:
            views = together(what, partial(_view, path, folder, is_given, is_there))
            refuse_different_files([(each.name, each.host) for each in views], "checkpoints")
            newest = max(views)
            if newest.step > views[0].step:
                if tries_left:
                    continue  # another job may have published a checkpoint in between
                raise CheckpointError(
                    f"{newest.host} sees {folder_name(newest.step)} in {path}, and rank 0 on {views[0].host} does not. "
                    f"{SHARE}"
                )
            loading.refuse(together(what, loading.compare), strict)
            together(what, loading.verify)
            return loading
        except CheckpointError:
            loading.opened.close()
            if is_given or not tries_left or on_first_rank(what, folder.exists):
                raise
    raise AssertionError


def _chosen(path: Path) -> tuple[Path, bool, bool]:
    folder = resolve(path)
    return folder, folder == path, storage.exists(folder / MANIFEST)


class _View(NamedTuple):
    """What one rank sees before it loads. `step` is the highest one in `path`, or -1 if `path` is a checkpoint."""

    step: int
    host: str
    name: str


def _view(path: Path, folder: Path, is_given: bool, is_there: bool) -> _View:
    if is_there:
        require_seen(folder / MANIFEST)
    return _View(-1 if is_given else published(folder.parent)[0][0], socket.gethostname(), path.name)


# -- loading tensors into a model, from any source ----------------------------------------------------------


class LoadedNames(NamedTuple):
    """The result of a load, which lists the names that were not loaded."""

    missing: list[str]
    """Parameters and persistent buffers that the source lacks. Always empty with `strict=True`."""
    unexpected: list[str]
    """Names in the source that the model lacks. Always empty with `strict=True`."""
    non_persistent: list[str]
    """Non-persistent buffers of the model, which no state dict or file contains."""


def match(
    model: ModelState,
    entries: Mapping[str, TensorEntry],
    differences: Differences,
    *,
    aliases: Mapping[str, str] | None = None,
    prefix: str = "",
    casts: bool = True,
) -> list[tuple[HeldTensor, list[str]]]:
    """Find the tensors of a model in `entries`, and add all mismatches to `differences`.

    Returns the tensors that match, each with its names in `entries`. If `entries` contains a tied tensor under several
    names, the caller must check that the values are equal. `aliases` maps each other name of a tied tensor in `entries`
    to its stored name. `prefix` is added to names in error messages. If `casts` is True, the model and `entries` may
    have different floating-point dtypes.
    """
    aliases = aliases or {}
    names_of = {held.name: [held.name] for held in model.tensors}
    for alias, name in model.aliases.items():
        names_of[name].append(alias)
    found, used = [], set()
    for held in model.tensors:
        plain = [name.removeprefix("model/") for name in names_of[held.name]]
        names = list(dict.fromkeys(aliases.get(name, name) for name in plain if name in entries))
        used.update(names)
        wrong = []
        for name in names:
            shape, dtype = entries[name].shape, DTYPES[entries[name].dtype]
            held.expect(shape)
            if shape != held.box_map.shape:
                wrong.append(f"{prefix}{name} has the shape {shape}, expected {held.box_map.shape}")
            elif dtype != held.dtype and not (casts and dtype.is_floating_point and held.dtype.is_floating_point):
                wrong.append(f"{prefix}{name} has the dtype {dtype}, expected {held.dtype}")
        differences.wrong += wrong
        if not names:
            differences.missing[prefix + plain[0]] = prod(held.box_map.shape) * held.dtype.itemsize
        elif not wrong:
            found.append((held, names))
    for name, entry in entries.items():
        if name not in used and name not in aliases:
            differences.unexpected[prefix + name] = entry.nbytes
    return found


@torch.no_grad()
def fill(held: HeldTensor, copy: Callable[[Box, torch.Tensor], None]) -> None:
    """Fill this rank's boxes of `held`. `copy(box, view)` copies one box of the source to a view of `held`."""
    for box, view in zip(held.box_map.boxes, held.views(), strict=True):
        if box.numel:
            copy(box, view)


# -- loading a checkpoint -----------------------------------------------------------------------------------


Comparison = tuple[str, str, list[str], Differences]
"""One rank's manifest checksum, its host, the argument names of the objects to load besides the model, and the
differences."""


class Loading:
    """Performs one load on one rank. `given` maps argument names to the objects to load besides the model."""

    manifest: Manifest
    files: CheckpointFiles

    def __init__(self, model: nn.Module, given: Mapping[str, Any], rng: bool, folder: Path):
        self._module, self._given, self._loads_rng, self.folder = model, given, rng, folder
        self.opened = ExitStack()
        self._differences = Differences()
        self._of_all_ranks = Differences()
        self._model = ModelState()
        self._targets: list[tuple[HeldTensor, TensorEntry]] = []
        """Tensors to fill, each with its entry in the checkpoint."""
        self._optimizer: OptimizerLoad | None = None
        self._values: list[tuple[Callable[[Any], Any], str, Any]] = []
        """(method, path, argument) of each call that loads a value. `verify` decodes the arguments from JSON."""
        self._rng: Any = None
        """State of this rank's random number generators, as JSON until `verify` decodes the state."""

    # -- comparing ------------------------------------------------------------------------------------------

    def compare(self) -> Comparison:
        """Read the manifest and compare it with the arguments of `load`."""
        self.files = self.opened.enter_context(CheckpointFiles(self.folder))
        self.manifest, given = self.files.manifest, self._given
        self._compare_model()
        if "optimizer" in given:
            entry = self.manifest.values.get("optimizer")
            load = OptimizerLoad(given["optimizer"], self._model, entry, self.manifest.tensors, self._differences)
            self._optimizer = None if entry is None else load
        self._compare_values()
        rank, size = rank_and_size()
        if "data" in given:
            self._compare_data(given["data"], rank, size)
        if self._loads_rng and rank < self.manifest.ranks:
            self._rng = self.manifest.values["ranks"][rank].get("rng")
            if self._rng is None:
                self._differences.missing["random number generators"] = 0
        return self.manifest.checksum, socket.gethostname(), list(given), self._differences

    def refuse(self, answers: list[Comparison], strict: bool) -> None:
        refuse_different_files([each[:2] for each in answers], f"manifests in {self.folder}")
        refuse_different_parts([given for *_, given, _ in answers])
        look = f" `unshard checkpoint inspect {self.folder}` lists what it holds."
        self._of_all_ranks = Differences.of_all_ranks([differences for *_, differences in answers])
        self._of_all_ranks.refuse(self.folder, strict, look=look)

    def warn(self, path: Path) -> None:
        """Log warnings about state that is not loaded and about later checkpoints. `path` is the argument of `load`."""
        self._of_all_ranks.warn(self.folder)
        values = self.manifest.values
        left_out = (set(PARTS) & {*values, *values["ranks"][0]}) - set(self._given)
        if left_out and "optimizer" in self._given:  # without an optimizer, the caller wants only the model
            _log.warning("%s also holds %s, not loaded because not passed.", self.folder, listed(sorted(left_out)))
        later = later_than(self.manifest.step, self.folder.parent) if path == self.folder else None
        if later is not None:
            _log.warning(
                "%s is a later checkpoint than %s. Move or delete the later ones before you save this run there again.",
                *(later, self.folder),
            )

    def _compare_model(self) -> None:
        self._model, differences = model_state(self._module), self._differences
        entries = {
            name.removeprefix("model/"): entry
            for name, entry in self.manifest.tensors.items()
            if name.startswith("model/")
        }
        ties = self.manifest.aliases.items()
        aliases = {alias.removeprefix("model/"): name.removeprefix("model/") for alias, name in ties}
        entries |= {alias: entries[name] for alias, name in aliases.items() if name in entries}
        for held, names in match(self._model, entries, differences, aliases=aliases, prefix="model/", casts=False):
            self._targets.append((held, entries[names[0]]))
            differences.wrong += [
                f"model/{names[0]} and model/{other} are tied here, and are two tensors in the checkpoint"
                for other in names[1:]
            ]
        if self._model.tensors and len(differences.missing) == len(self._model.tensors):
            differences.wrong.append("no tensor of the model has its name in the checkpoint")

    def _compare_values(self) -> None:
        values = self.manifest.values
        for name in ("scheduler", "scaler"):
            if name in self._given:
                self._compare_value(name, values, self._given[name], "load_state_dict", name)
        extra = values.get("extra", {})
        for name, module in self._model.extra.items():
            self._compare_value(name, extra, module, "set_extra_state", f"{_EXTRA}{name}")
        for name in extra.keys() - self._model.extra.keys():
            self._differences.unexpected[f"extra state of {name!r}"] = 0

    def _compare_value(self, name: str, values: Any, target: Any, method: str, path: str) -> None:
        if not callable(getattr(target, method, None)):
            self._differences.wrong.append(f"{path} is a {type(target).__name__} here, without {method}")
        elif name not in values:
            self._differences.missing[path] = 0
        else:
            self._values.append((getattr(target, method), path, values[name]))

    def _compare_data(self, data: Any, rank: int, size: int) -> None:
        ranks = self.manifest.values["ranks"]
        if any("data" not in each for each in ranks):
            self._differences.missing["data"] = 0
        elif size == len(ranks):
            self._compare_value("data", ranks[rank], data, "load_state_dict", f"data/{rank}")
        elif hasattr(data, "load_state_dicts"):
            self._values.append((data.load_state_dicts, "data", [each["data"] for each in ranks]))
        elif all(each["data"] == ranks[0]["data"] for each in ranks):
            self._compare_value("data", ranks[0], data, "load_state_dict", "data/0")
        else:
            self._differences.wrong.append(
                f"data was saved by {len(ranks)} ranks with different states, and there are {size} ranks now: give "
                f"{type(data).__name__} a method load_state_dicts(states) that takes all of them, or pass no data"
            )

    # -- verifying ------------------------------------------------------------------------------------------

    def verify(self) -> None:
        """Verify the checksums of all blocks that this rank reads, and decode all values."""
        blocks: dict[int, set[int]] = {}
        needed = [(entry, held.box_map.boxes) for held, entry in self._targets]
        json = [self._rng, *(value for _, _, value in self._values)]
        if self._optimizer is not None:
            needed += [(self._entry(name), part.boxes) for name, part in self._optimizer.needed()]
            json.append(self.manifest.values["optimizer"])
        needed += [(entry, (full_box(entry.shape),)) for entry in map(self._entry, stored_names(json))]
        for entry, boxes in needed:
            for box in boxes:
                for file, touched in self.files.blocks_of(entry, box):
                    blocks.setdefault(file, set()).update(touched)
        for file in sorted(blocks):
            self.files.verify(file, blocks[file])
        self._values = [(target, path, decode(value, path, self._stored)) for target, path, value in self._values]
        if self._optimizer is not None:
            self._optimizer.decode(self._stored)
        if self._rng is not None:
            self._rng = decode(self._rng, "rng", self._stored)
            check_rng_state(self._rng)

    def _entry(self, name: str) -> TensorEntry:
        entry = self.manifest.find(name)
        if entry is None:
            raise CheckpointError(f"The checkpoint has no tensor {name!r}, which one of its values names.")
        return entry

    def _stored(self, name: str) -> torch.Tensor:
        entry = self._entry(name)
        value = torch.empty(entry.shape, dtype=DTYPES[entry.dtype])
        self.files.copy(entry, full_box(entry.shape), value)
        return value

    # -- applying -------------------------------------------------------------------------------------------

    def apply_values(self, extra: bool = False) -> None:
        """Load the scheduler, the scaler and the data. If `extra` is True, load the modules' extra states instead."""
        then = "The model's tensors are loaded." if extra else "The model and the optimizer were not changed."
        for method, path, value in self._values:
            if path.startswith(_EXTRA) == extra:
                try:
                    method(value)
                except Exception as error:
                    name = getattr(method, "__name__", "load_state_dict")
                    raise CheckpointError(f"{name} of {path} raised {error_text(error)} {then}") from error

    @torch.no_grad()
    def apply_tensors(self) -> None:
        for held, entry in self._targets:
            fill(held, partial(self.files.copy, entry))
        self._model.finish_loading(held for held, _ in self._targets)
        if self._optimizer is not None:
            for held in self._optimizer.targets():
                fill(held, partial(self.files.copy, self._entry(held.name)))
            self._optimizer.finish()
        self.apply_values(extra=True)  # after the tensors, because extra states may depend on them
        rank, _ = rank_and_size()
        if self._rng is not None:
            set_rng_state(self._rng)
        elif self._loads_rng and rank >= self.manifest.ranks:
            seed_new_rank(self.manifest.step, rank)
