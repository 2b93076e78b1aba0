"""Loading a run: everything is compared and verified on all ranks before anything is changed on any."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing
from functools import partial
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer

from ..errors import CheckpointError, listed
from ..state.boxes import full_box
from ..state.model import HeldTensor, ModelState, model_state
from ..state.optimizer import check_optimizer
from .differences import Differences
from .files import CheckpointFiles, copy_pieces
from .folders import later_than, resolve
from .manifest import Manifest, read_manifest
from .optimizer import OptimizerLoad
from .plan import TensorEntry
from .ranks import begin, error_text, on_first_rank, rank_and_size, refuse_different_parts, together
from .values import DTYPES, check_rng_state, decode, name_of_dtype, seed_new_rank, set_rng_state, stored_names

_log = logging.getLogger("unshard")
PARTS = ("optimizer", "scheduler", "scaler", "data")
_EXTRA = "extra/"
_TRIES = 5
"""To load the latest checkpoint while another job deletes it (`keep_last`)."""


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
    """Load a run that `save` wrote, with any number of ranks; returns its step.

    `path`: a checkpoint, or the folder with several, of which the latest is loaded. All ranks have to call. Each rank
    reads and verifies only the bytes that it needs. What is not passed is not loaded. If anything is missing,
    unexpected, damaged or of another shape or dtype, all ranks raise a CheckpointError and nothing is changed;
    `strict=False` loads what fits if only names are missing or unexpected.

    With another number of ranks, rank r gets the random number generators of rank r, and a new rank gets seeds made
    of the step and its number. `data` then has to be the same on all ranks, or to have `load_state_dicts`, which is
    called with the list of all ranks' states.
    """
    what, parts = f"Loading {path}", {"optimizer": optimizer, "scheduler": scheduler, "scaler": scaler, "data": data}
    check_optimizer(optimizer)
    given = {name: each for name, each in parts.items() if each is not None}
    begin("load a checkpoint", model)
    with torch.inference_mode(False):  # an optimizer could not change state that is made in it
        loading = _verified(what, Path(path), lambda loading: loading.compare(model, given, rng), strict)
        with closing(loading):
            on_first_rank(what, lambda: loading.warn(Path(path)))
            together(what, loading.apply_values)
            together(what, loading.apply_tensors)
    return loading.manifest.step


def _verified(what: str, path: Path, compare: Callable[[Loading], Comparison], strict: bool) -> Loading:
    """A load that has compared and verified everything, and changed nothing."""
    for tries_left in reversed(range(_TRIES)):
        loading = Loading(on_first_rank(what, lambda: resolve(path)))
        try:
            loading.refuse(together(what, partial(compare, loading)), strict)
            together(what, loading.verify)
            return loading
        except CheckpointError:
            loading.close()
            if loading.folder == path or not tries_left or on_first_rank(what, loading.folder.exists):
                raise
    raise AssertionError


class Comparison(NamedTuple):
    """What one rank has found; the ranks exchange these."""

    checksum: str
    """Of the manifest."""
    given: list[str]
    """What is to be loaded besides the model."""
    differences: Differences


class Loading:
    """One load on one rank."""

    manifest: Manifest
    files: CheckpointFiles

    def __init__(self, folder: Path):
        self.folder = folder
        self._opened = ExitStack()
        self._given: Mapping[str, Any] = {}
        self._differences = Differences()
        self._of_all_ranks = Differences()
        self._model = ModelState()
        self._targets: list[HeldTensor] = []
        self._optimizer: OptimizerLoad | None = None
        self._values: list[tuple[Callable[[Any], Any], str, Any]] = []
        """Methods to call, the name of what they get, and that, in JSON until it is decoded."""
        self._rng: Any = None
        """The states of the generators, in JSON until they are decoded."""
        self._new_rank: int | None = None

    # -- comparing ------------------------------------------------------------------------------------------

    def compare(self, model: nn.Module, given: Mapping[str, Any], rng: bool) -> Comparison:
        """Read the manifest and compare it with what is to be loaded."""
        self.manifest, self._given = read_manifest(self.folder), given
        self.files = self._opened.enter_context(CheckpointFiles(self.folder, self.manifest))
        self._compare_model(model)
        if "optimizer" in given:
            entry = self.manifest.values.get("optimizer")
            load = OptimizerLoad(given["optimizer"], self._model, entry, self.manifest.tensors, self._differences)
            self._optimizer = load if load.found else None
        self._compare_values()
        rank, size = rank_and_size()
        if "data" in given:
            self._compare_data(given["data"], rank, size)
        if rng and rank < self.manifest.ranks:
            self._rng = self.manifest.values["ranks"][rank].get("rng")
            if self._rng is None:
                self._differences.missing["random number generators"] = 0
        elif rng:
            self._new_rank = rank
        return Comparison(self.manifest.checksum, list(given), self._differences)

    def refuse(self, answers: list[Comparison], strict: bool) -> None:
        """Raise if the checkpoint does not fit on any rank."""
        if len({each.checksum for each in answers}) > 1:
            raise CheckpointError(
                f"The ranks read different manifests in {self.folder}. All ranks have to see the same disk."
            )
        refuse_different_parts([each.given for each in answers])
        look = f" `unshard checkpoint inspect {self.folder}` lists what it holds."
        self._of_all_ranks = Differences.of_all_ranks([each.differences for each in answers])
        self._of_all_ranks.refuse(self.folder, strict, look=look)

    def warn(self, path: Path) -> None:
        """Say what a reader may not expect. `path`: what was passed to `load`."""
        self._of_all_ranks.warn(self.folder)
        values = self.manifest.values
        left_out = (set(PARTS) & {*values, *values["ranks"][0]}) - set(self._given)
        if left_out and "optimizer" in self._given:  # else the model alone is wanted
            _log.warning("%s holds more than is loaded: %s. It was not passed.", self.folder, listed(sorted(left_out)))
        later = later_than(self.manifest.step, self.folder.parent) if path == self.folder else None
        if later is not None:
            _log.warning(
                "%s is a later checkpoint than %s. Before the run is saved there again, move the later ones away or "
                "delete them.",
                *(later, self.folder),
            )

    def close(self) -> None:
        self._opened.close()

    def _compare_model(self, model: nn.Module) -> None:
        self._model = model_state(model)
        taken = set()
        for held in self._model.tensors:
            entry, differences = self.manifest.find(held.name), self._differences
            if entry is None:
                differences.missing[held.name] = _nbytes(held)
                continue
            taken.add(self.manifest.aliases.get(held.name, held.name))
            dtype = name_of_dtype(held.dtype, held.name)
            held.expect(entry.shape)
            if entry.shape != held.part.shape:
                differences.wrong.append(f"{held.name} has the shape {entry.shape}, expected {held.part.shape}")
            elif entry.dtype != dtype:
                differences.wrong.append(f"{held.name} has the dtype {entry.dtype}, expected {dtype}")
            else:
                self._targets.append(held)
        for alias, name in self._model.aliases.items():
            if alias in self.manifest.tensors and name in self.manifest.tensors:
                self._differences.wrong.append(
                    f"{alias} and {name} are tied here, and are two tensors in the checkpoint"
                )
        if self._model.tensors and not taken:
            self._differences.wrong.append("no tensor of the model has its name in the checkpoint")
        for name, entry in self.manifest.tensors.items():
            if name.startswith("model/") and name not in taken:
                self._differences.unexpected[name] = entry.nbytes

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
                f"data was saved by {len(ranks)} ranks, each with a state of its own, and there are {size} now: give "
                f"{type(data).__name__} a method load_state_dicts(states) that takes the list of all, or pass no data"
            )

    # -- verifying ------------------------------------------------------------------------------------------

    def verify(self) -> None:
        """Compare the checksums of all blocks that this rank reads, and decode what is not a tensor of the model."""
        blocks: dict[int, set[int]] = {}
        needed = [(held.name, held.part.boxes) for held in self._targets]
        json = [self._rng, *(value for _, _, value in self._values)]
        if self._optimizer is not None:
            needed += [(name, part.boxes) for name, part in self._optimizer.needed()]
            json.append(self.manifest.values["optimizer"])
        needed += [(name, (full_box(self._entry(name).shape),)) for name in stored_names(json)]
        for name, boxes in needed:
            entry = self._entry(name)
            for stored in entry.boxes:
                for common in filter(None, map(stored.box.intersection, boxes)):
                    touched = self.files.blocks_of(entry, stored, *common.elements_in(stored.box))
                    blocks.setdefault(stored.file, set()).update(touched)
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
        """A tensor of the checkpoint, unsharded."""
        entry = self._entry(name)
        value = torch.empty(entry.shape, dtype=DTYPES[entry.dtype])
        for stored in entry.boxes:
            copy_pieces(value[stored.box.slices_in(full_box(entry.shape))], self.files.tensor(entry, stored))
        return value

    # -- applying -------------------------------------------------------------------------------------------

    def apply_values(self) -> None:
        """First, because methods of the program may raise: then the model and the optimizer are as before."""
        for method, path, value in self._values:
            if not path.startswith(_EXTRA):
                self._call(method, path, value, "The model and the optimizer were not changed.")

    def _call(self, method: Callable[[Any], Any], path: str, value: Any, then: str) -> None:
        try:
            method(value)
        except Exception as error:
            name = getattr(method, "__name__", "load_state_dict")
            raise CheckpointError(f"{name} of {path} has raised {error_text(error)} {then}") from error

    @torch.no_grad()
    def apply_tensors(self) -> None:
        for held in self._targets:
            self._fill(held)
        self._model.finish_loading(self._targets)
        if self._optimizer is not None:
            for held in self._optimizer.targets():
                self._fill(held)
            self._optimizer.finish()
        for method, path, value in self._values:
            if path.startswith(_EXTRA):  # it may be about the tensors
                self._call(method, path, value, "The model's tensors are loaded.")
        if self._rng is not None:
            set_rng_state(self._rng)
        elif self._new_rank is not None:
            seed_new_rank(self.manifest.step, self._new_rank)

    def _fill(self, held: HeldTensor) -> None:
        """Copy what this rank holds of a tensor from the files."""
        entry, views = self._entry(held.name), held.views()
        for stored in entry.boxes:
            source = None
            for box, view in zip(held.part.boxes, views, strict=True):
                common = box.intersection(stored.box)
                if common is not None:
                    source = self.files.tensor(entry, stored) if source is None else source
                    copy_pieces(view[common.slices_in(box)], source[common.slices_in(stored.box)])


def _nbytes(held: HeldTensor) -> int:
    return prod(held.part.shape) * held.dtype.itemsize
