"""Saving a run: all ranks write into a hidden folder, which one rename publishes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from ..errors import CheckpointError
from .checksums import BLOCK_BYTES, best_algorithm
from .files import host_buffers, padding_after, write_file
from .folders import Unpublished, check_step, keep_only, sync_folder
from .manifest import MANIFEST, FileEntry, Manifest, StoredBox, TensorEntry, manifest_bytes
from .model_state import HeldTensor, model_state
from .optimizer_state import merged, optimizer_state
from .parts import whole
from .plan import Described, Plan, describe, make_plan
from .ranks import on_first_rank, rank_and_size, together
from .rng import rng_state
from .values import encode


@dataclass
class RankState:
    """What one rank contributes to a checkpoint."""

    tensors: list[HeldTensor] = field(default_factory=list)
    aliases: dict[str, str] = field(default_factory=dict)
    shared: dict[str, Any] = field(default_factory=dict)
    """Values that are the same on all ranks; those of rank 0 are saved."""
    own: dict[str, Any] = field(default_factory=dict)
    """Values of this rank."""
    optimizer: dict[str, Any] | None = None

    def store(self, name: str, value: torch.Tensor) -> None:
        self.tensors.append(HeldTensor(name, whole(value.shape), value.dtype, value.detach(), plain=True))


@torch.no_grad()
def collect(model: nn.Module, optimizer: Optimizer | None, shared: dict[str, Any], data: Any, rank: int) -> RankState:
    """Everything that this rank has to save; tensors are not copied."""
    found, state = RankState(), model_state(model)
    found.tensors, found.aliases = state.tensors, state.aliases
    if optimizer is not None:
        tensors, found.optimizer = optimizer_state(optimizer, state)
        found.tensors += tensors
    if rank == 0:
        for name, each in shared.items():
            if each is not None:
                found.shared[name] = encode(_state_dict(each, name), name, found.store)
        extra = {name: module.get_extra_state() for name, module in state.extra.items()}
        found.shared["extra"] = {name: encode(each, f"extra/{name}", found.store) for name, each in extra.items()}
    found.own["rng"] = encode(rng_state(), f"rng/{rank}", found.store)
    if data is not None:
        found.own["data"] = encode(_state_dict(data, "data"), f"data/{rank}", found.store)
    return found


def _state_dict(value: Any, name: str) -> Any:
    if not callable(getattr(value, "state_dict", None)):
        raise CheckpointError(f"{name} must have the methods state_dict and load_state_dict, got {type(value)}.")
    return value.state_dict()


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
    """Save a run in the new folder `step_<step>` under `path`, which all ranks share; returns the folder.

    All ranks have to call, between steps. `scheduler` and `scaler` are saved as rank 0 has them; `data`, anything with
    `state_dict`, and the random number generators as each rank has them. Returns when the checkpoint is published. If
    saving fails on any rank, all ranks raise a CheckpointError and the checkpoints that exist stay as they are.
    `keep_last`: delete all but so many checkpoints afterwards.
    """
    check_step(step, keep_last)
    rank, size = rank_and_size()
    what, parent = f"Saving step {step} to {path}", Path(path)
    shared = {"scheduler": scheduler, "scaler": scaler}
    state: RankState | None = None

    def prepare() -> tuple[dict[str, Described], dict[str, str], dict[str, Any], dict[str, Any], Any, int]:
        nonlocal state
        state = collect(model, optimizer, shared, data, rank)
        return describe(state.tensors), state.aliases, state.shared, state.own, state.optimizer, step

    answers = together(what, prepare)
    assert state is not None
    if len({each[5] for each in answers}) > 1:
        raise CheckpointError(
            f"{what} failed. The ranks save different steps: {sorted({each[5] for each in answers})}."
        )
    plan = make_plan([each[0] for each in answers])
    unpublished: Unpublished | None = None

    def begin() -> tuple[str, str]:
        nonlocal unpublished
        unpublished = Unpublished(parent, step)
        return unpublished.folder.name, best_algorithm()

    name, algorithm = on_first_rank(what, begin)
    folder, held = parent / name, {each.name: each for each in state.tensors}
    try:
        files = together(what, lambda: _write_rank(folder, plan, held, rank, algorithm))
        values = {
            **answers[0][2],
            "optimizer": merged([each[4] for each in answers]),
            "ranks": [each[3] for each in answers],
        }
        aliases = {alias: target for each in answers for alias, target in each[1].items()}
        manifest = _manifest(plan, files, aliases, values, step, size, algorithm)
        on_first_rank(what, lambda: _publish(unpublished, manifest, keep_last))
    finally:
        if unpublished is not None:
            unpublished.remove()  # nothing is there if it was published
    return parent / f"step_{step:08d}"


def _write_rank(folder: Path, plan: Plan, held: dict[str, HeldTensor], rank: int, algorithm: str) -> FileEntry | None:
    """Write the boxes of this rank; None if it has none."""
    if not plan.nbytes[rank]:
        return None
    entry = write_file(folder / f"rank_{rank:05d}.bin", _buffers(plan, held, rank), algorithm)
    sync_folder(folder)
    if entry.nbytes != plan.nbytes[rank]:
        raise CheckpointError(f"{folder / entry.name} has {entry.nbytes} bytes, expected {plan.nbytes[rank]}.")
    return entry


def _buffers(plan: Plan, held: dict[str, HeldTensor], rank: int) -> Iterator[memoryview]:
    """The bytes of this rank's file, in the order in which the plan has numbered them."""
    for name, entry in plan.tensors.items():
        mine = [each.box for each in entry.boxes if each.file == rank]
        if mine:
            views = dict(zip(held[name].part.boxes, held[name].views(), strict=True))
            for box in mine:
                yield from host_buffers(views[box], held[name].dtype)
                yield padding_after(box.numel * entry.itemsize)


def _manifest(
    plan: Plan,
    files: list[FileEntry | None],
    aliases: dict[str, str],
    values: dict[str, Any],
    step: int,
    size: int,
    algorithm: str,
) -> Manifest:
    written = [rank for rank, each in enumerate(files) if each is not None]
    number = {rank: position for position, rank in enumerate(written)}
    tensors = {
        name: TensorEntry(
            entry.dtype,
            entry.shape,
            tuple(StoredBox(number[each.file], each.offset, each.box) for each in entry.boxes),
        )
        for name, entry in plan.tensors.items()
    }
    entries = [each for each in files if each is not None]
    return Manifest(step, size, algorithm, BLOCK_BYTES, entries, tensors, aliases, values)


def _publish(unpublished: Unpublished | None, manifest: Manifest, keep_last: int | None) -> None:
    assert unpublished is not None
    write_file(unpublished.folder / MANIFEST, [memoryview(manifest_bytes(manifest))], manifest.algorithm)
    unpublished.publish()
    if keep_last is not None:
        keep_only(unpublished.target.parent, keep_last, unpublished.target)
