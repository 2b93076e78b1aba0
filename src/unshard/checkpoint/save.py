"""Saves a training run. All ranks write to a hidden folder, which rank 0 publishes with one rename."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from ..errors import CheckpointError, listed
from ..state.boxes import whole
from ..state.model import HeldTensor, ModelState, check_model_and_optimizer, model_state
from . import storage
from .files import host_pieces, write_file
from .folders import Unpublished, check_step, folder_name, keep_only
from .manifest import (
    BLOCK_BYTES,
    MANIFEST,
    UNCAST,
    FileEntry,
    Manifest,
    TensorEntry,
    best_algorithm,
    manifest_bytes,
)
from .optimizer import merged, optimizer_state
from .plan import Descriptions, describe, make_plan
from .ranks import begin, on_first_rank, pack, rank_and_size, refuse_different_parts, require_seen, together, unpacked
from .stored_boxes import StoredBoxes, aligned
from .values import encode, encode_apart, rng_state

_log = logging.getLogger("unshard")
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.complex64, torch.complex128)


def save(
    path: str | os.PathLike[str],
    *,
    model: nn.Module,
    step: int,
    optimizer: Optimizer | None = None,
    scheduler: Any = None,
    scaler: Any = None,
    data: Any = None,
    keep_last: int | None = None,
) -> Path:
    """Save a training run in the new folder `step_<step>` under `path`, and return the new folder.

    All ranks must call this function between steps, and must share the folder `path`. The checkpoint contains rank 0's
    `scheduler` and `scaler`, and the `data` and random number generators of every rank. `data` is any object with
    `state_dict`. After publishing the checkpoint, `save` deletes all but the latest `keep_last` checkpoints if
    `keep_last` is given. If saving fails on any rank, all ranks raise a CheckpointError and existing checkpoints stay
    unchanged.

    `model` and `optimizer` may be sharded or not. `step` is the number of finished steps.

    Raises:
        ArgumentError: an argument is invalid.
        CheckpointError: the checkpoint cannot be written, or exists.

    Example::

        checkpoint.save("checkpoints", step=1000, model=model, optimizer=optimizer, keep_last=3)
    """
    check_step(step, keep_last)
    check_model_and_optimizer(model, optimizer)
    begin("save a checkpoint", model)
    saving = Saving(f"Saving step {step} to {path}", Path(path), step, keep_last)
    saving.plan(model, optimizer, scheduler, scaler, data)
    try:
        saving.make_folder()
        files = together(saving.what, lambda: saving.write(saving.buffers()))
        on_first_rank(saving.what, lambda: saving.publish(files))
    finally:
        saving.clean_up()
    return saving.target


# -- saving -------------------------------------------------------------------------------------------------


@dataclass
class RankEntry:
    """One rank's contribution to the manifest. The ranks exchange these entries."""

    step: int
    tensors: Descriptions = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    shared: dict[str, Any] = field(default_factory=dict)
    """Encoded values that only rank 0 saves."""
    own: dict[str, Any] = field(default_factory=dict)
    """Encoded values that every rank saves."""
    optimizer: dict[str, Any] | None = None
    uncast: list[str] = field(default_factory=list)
    """Names of tensors that belong to quantized layers."""
    nonfinite: list[str] = field(default_factory=list)
    """Names of parameters with NaN or infinite elements on this rank."""


class Saving:
    """Performs one save on one rank. `what` describes the save in error messages."""

    folder: Path
    """The folder that all ranks write to before the folder is renamed to `target`."""
    algorithm: str

    def __init__(self, what: str, path: Path, step: int, keep_last: int | None):
        self.what, self._path, self._step, self._keep_last = what, path, step, keep_last
        self.target = path / folder_name(step)
        self.rank, self.size = rank_and_size()
        self.tensors: dict[str, HeldTensor] = {}
        self._entries: list[RankEntry] = []
        self._plan: dict[str, TensorEntry] = {}
        self.nbytes, self.on_cuda = 0, False
        """`nbytes` is the size of this rank's file. `on_cuda` is True if any tensor is on a CUDA device."""
        self._unpublished: Unpublished | None = None

    def plan(self, model: nn.Module, optimizer: Any, scheduler: Any, scaler: Any, data: Any) -> None:
        """Collect what each rank saves, and decide which rank writes which box. All ranks must call this method."""
        given = {name: each for name, each in (("scheduler", scheduler), ("scaler", scaler)) if each is not None}
        packed = together(self.what, lambda: pack(vars(self.collect(model, optimizer, given, data)).values()))
        self._entries = [RankEntry(*fields) for fields in unpacked(packed)]
        steps = sorted({entry.step for entry in self._entries})
        if len(steps) > 1:
            raise CheckpointError(f"The ranks save different steps: {steps}.")
        refuse_different_parts([[name for name in ("data",) if name in entry.own] for entry in self._entries])
        self._plan, nbytes = make_plan([entry.tensors for entry in self._entries])
        self.nbytes = nbytes[self.rank]

    @torch.no_grad()
    def collect(self, model: nn.Module, optimizer: Optimizer | None, shared: dict[str, Any], data: Any) -> RankEntry:
        """Collect everything that this rank saves, without copying large tensors."""
        state = model_state(model)
        found, tensors = RankEntry(self._step, aliases=state.aliases), state.tensors
        found.nonfinite = nonfinite_parameters(state)
        found.uncast = [each.name for each in tensors if each.added or each.packed]

        def store(name: str, value: torch.Tensor) -> None:
            tensors.append(HeldTensor(name, whole(value.shape), value.dtype, value.detach(), plain=True))

        if optimizer is not None:
            of_optimizer, found.optimizer = optimizer_state(optimizer, state)
            tensors += of_optimizer
        if self.rank == 0:
            found.shared = {name: encode(_state_dict(each, name), name, store) for name, each in shared.items()}
            extra = {name: module.get_extra_state() for name, module in state.extra.items()}
            found.shared["extra"] = {name: encode(each, f"extra/{name}", store) for name, each in extra.items()}
        found.own["rng"] = encode_apart(rng_state(), f"rng/{self.rank}", store, self.size)
        if data is not None:
            found.own["data"] = encode(_state_dict(data, "data"), f"data/{self.rank}", store)
        found.tensors = describe(tensors)
        self.tensors = {each.name: each for each in tensors}
        self.on_cuda = any(each.local.is_cuda for each in tensors)
        return found

    def make_folder(self) -> None:
        """Create the folder to write to, and choose the checksum algorithm. All ranks must call this method."""
        if self.rank == 0:
            warn_of_nonfinite(self.what, self._entries)

        def make() -> tuple[Path, str]:
            self._unpublished = Unpublished(self._path, self._step)
            return self._unpublished.folder, best_algorithm()

        self.folder, self.algorithm = on_first_rank(self.what, make)

    def write(self, buffers: Iterator[memoryview]) -> FileEntry | None:
        """Write this rank's file and return its entry, or None if this rank has nothing to write."""
        require_seen(self.folder)
        if not self.nbytes:
            return None
        entry = write_file(self.folder / f"rank_{self.rank:05d}.bin", buffers, self.algorithm, self.nbytes)
        storage.sync_folder(self.folder)
        return entry

    def buffers(self) -> Iterator[memoryview]:
        """Yield the bytes of this rank's file in pieces. Each piece is copied to the host only when it is needed."""
        for view, dtype in self.views():
            yield from host_pieces(view, dtype)
            nbytes = view.numel() * dtype.itemsize
            yield memoryview(bytes(aligned(nbytes) - nbytes))

    def views(self) -> Iterator[tuple[torch.Tensor, torch.dtype]]:
        """Yield each box that this rank writes, in file order, as a view of the tensor and the dtype to store."""
        for name, entry in self._plan.items():
            mine = [each.box for each in entry.boxes.in_file(self.rank)]
            if mine:
                held = self.tensors[name]
                views = dict(zip(held.box_map.boxes, held.views(), strict=True))
                for box in mine:
                    yield views[box], held.dtype

    def publish(self, files: list[FileEntry | None]) -> None:
        """Write the manifest and publish the checkpoint. Call this on rank 0 after all files are written."""
        assert self._unpublished is not None
        content = memoryview(manifest_bytes(self._manifest(files)))
        write_file(self.folder / MANIFEST, [content], self.algorithm, len(content))
        self._unpublished.publish()
        if self._keep_last is not None:
            keep_only(self._path, self._keep_last, self.target)

    def _manifest(self, files: list[FileEntry | None]) -> Manifest:
        written = [rank for rank, each in enumerate(files) if each is not None]
        number = torch.zeros(self.size, dtype=torch.int64)
        number[written] = torch.arange(len(written))
        tensors = {
            name: replace(entry, boxes=StoredBoxes(entry.boxes.split, number[entry.boxes.files], entry.boxes.offsets))
            for name, entry in self._plan.items()
        }
        values = {
            **self._entries[0].shared,
            "optimizer": merged([entry.optimizer for entry in self._entries]),
            "ranks": [entry.own for entry in self._entries],
        }
        if uncast := {name for entry in self._entries for name in entry.uncast}:
            values[UNCAST] = sorted(uncast)
        aliases = {alias: name for entry in self._entries for alias, name in entry.aliases.items()}
        entries = [each for each in files if each is not None]
        return Manifest(self._step, self.size, self.algorithm, BLOCK_BYTES, entries, tensors, aliases, values)

    def clean_up(self) -> None:
        """Delete the folder unless it is published."""
        if self._unpublished is not None:
            self._unpublished.remove()


def _state_dict(value: Any, name: str) -> Any:
    if not callable(getattr(value, "state_dict", None)):
        raise CheckpointError(f"{name} must have the methods state_dict and load_state_dict, got {type(value)}.")
    return value.state_dict()


@torch.no_grad()
def nonfinite_parameters(state: ModelState) -> list[str]:
    """Return the names of parameters with NaN or infinite elements on this rank, without copying any parameter."""
    parameters = {f"model/{each.name}" for optimized in state.optimized.values() for each in optimized}
    by_device: dict[torch.device, list[tuple[str, torch.Tensor]]] = {}
    for held in state.tensors:
        local = held.local
        if held.name in parameters and local.dtype in _DTYPES and local.numel() and not held.packed:
            numbers = torch.view_as_real(local) if local.is_complex() else local
            # aminmax() returns NaN if any element is NaN, and is far faster than isfinite() on the CPU.
            extremes = torch.stack(numbers.aminmax()).double()
            by_device.setdefault(local.device, []).append((held.name.removeprefix("model/"), extremes))
    found: list[str] = []
    for each in by_device.values():
        finite = torch.stack([extremes for _, extremes in each]).isfinite().all(1)
        # One synchronization for all parameters of a device.
        found += [name for (name, _), good in zip(each, finite.tolist(), strict=True) if not good]
    return found


def warn_of_nonfinite(what: str, ranks: list[RankEntry]) -> None:
    where: dict[str, list[int]] = {}
    for rank, entry in enumerate(ranks):
        for name in entry.nonfinite:
            where.setdefault(name, []).append(rank)
    if where:
        found = [f"{name} (rank {listed(where[name], most=4)})" for name in sorted(where)]
        _log.warning(
            "%s: %d parameters are not finite (NaN or infinity): %s. They are saved unchanged. To resume from finite "
            "parameters, load an earlier checkpoint.",
            *(what, len(found), listed(found)),
        )
