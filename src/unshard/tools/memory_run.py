"""Runs two training steps of a program without computing, and finds the peak of the second one."""

from __future__ import annotations

import inspect
import logging
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from ..engine.api import ROOT, name_stages, observer
from ..errors import ArgumentError, UnshardError
from ..torch_private import run_backward
from .memory_allocator import Allocator
from .memory_job import simulated_job
from .memory_rows import ACTIVATIONS, GRADIENTS, KINDS, OTHER, REDUCTIONS, groups_of, held_by, total, unit_rows
from .memory_virtual import Recording, virtual_memory
from .program import Program, default_loss, first_layer, is_sharded, shard_blocks, sizes_in, tokens

WORKSPACES = 2 * 32 * 2**20
"""Bytes of cuBLAS on a CUDA device: one workspace for the thread of forward, and one for the thread of backward.

A workspace takes 32 MiB on Hopper and 8.1 MiB on earlier devices. `CUBLAS_WORKSPACE_CONFIG` changes this size.
"""
REDUCE_SCATTER_INPUT = "reduce-scatter input"
LARGEST = 12


@dataclass
class Point:
    """The largest sum of all kinds within a stage of the step, and how it is divided."""

    at: str
    bytes: dict[str, int]

    @property
    def total(self) -> int:
        return sum(self.bytes.values())


@dataclass
class Run:
    """Figures of the second step."""

    rest: dict[str, int]
    most: dict[str, int]
    """The largest size of each kind. These need not coincide."""
    timeline: list[Point]
    largest: list[dict[str, Any]]
    host: dict[str, int]
    units: list[dict[str, Any]]
    peak: Point = field(init=False)

    def __post_init__(self) -> None:
        self.peak = max(self.timeline, key=lambda point: point.total)


@dataclass(frozen=True)
class Changes:
    """What the advice changes in a program."""

    shard: Callable[[nn.Module], None] | None = None
    """Called with the model before the program shards it."""
    sharded: Callable[[nn.Module], None] | None = None
    """Called with the model after the program has sharded it."""
    options: Any = None
    """Arguments of every `fully_shard` call: `offload_policy` and `mp_policy`."""
    optimizer: Callable[[Any], Any] | None = None
    world: int = 1
    """Factor of the number of ranks."""

    def __add__(self, other: Changes) -> Changes:
        def both(mine: Any, theirs: Any) -> Any:
            if mine is None or theirs is None:
                return mine or theirs
            return lambda value: (mine(value), theirs(value))[1]

        return Changes(
            both(self.shard, other.shard),
            both(self.sharded, other.sharded),
            {**(self.options or {}), **(other.options or {})},
            self.optimizer or other.optimizer,
            self.world * other.world,
        )


@dataclass(frozen=True)
class Setting:
    """The arguments of `plan`."""

    program: Program
    world: int
    mesh: tuple[int, ...] | None
    policy: Any
    device: str

    def scaled(self, factor: int) -> tuple[int, tuple[int, ...] | None]:
        """Return the number of ranks and the mesh with `factor` times as many shards."""
        mesh = self.mesh if self.mesh is None else (*self.mesh[:-1], self.mesh[-1] * factor)
        return self.world * factor, mesh


def run(setting: Setting, changes: Changes | None = None, look: Callable[[nn.Module], None] | None = None) -> Run:
    """Run two steps. `look` is called with the model after the second one."""
    changes = changes or Changes()
    world, mesh = setting.scaled(changes.world)
    with (
        simulated_job(world, setting.device, {"mp_policy": setting.policy, **(changes.options or {})}),
        virtual_memory() as recording,
        torch.random.fork_rng(devices=[]),
        _stages(recording, _loss_of(setting.program)),
    ):
        return _run(setting, mesh, changes, recording, look)


def _run(setting: Setting, mesh: Any, changes: Changes, recording: Recording, look: Any) -> Run:
    program = setting.program
    model = program.model()
    if changes.shard is not None:
        changes.shard(model)
    model = _shard(setting, model, mesh)
    if changes.sharded is not None:
        changes.sharded(model)
    optimizer = program.optimizer_of(model)
    if changes.optimizer is not None:
        optimizer = changes.optimizer(optimizer)
    _mark_host(recording, model, optimizer)
    begins = []
    for step in range(2):
        begins.append(len(recording.events))
        failed = "batch(rank, step) raised"
        try:
            batch = program.batch_of(0, step)
            if isinstance(batch, str):
                batch = _drawn(model, batch)
            failed = "The model fails on this batch:"
            if isinstance(batch, dict) and program.loss is default_loss:
                failed = "The model fails on this batch, whose entries are passed as keyword arguments:"
            recording.in_forward = True
            recording.enter("forward")
            loss = program.loss(model, batch)
            _require_loss(loss)
            recording.in_forward = False
            recording.enter(f"backward {_loss_of(program)}")
            run_backward(loss)
        except UnshardError:
            raise
        except Exception as error:
            text = str(error).strip().partition("\n")[0].rstrip(".")
            remedy = "Pass a batch that fits the model, or define functions batch(rank, step) and loss(model, batch)."
            raise ArgumentError(f"{failed} {type(error).__name__}: {text}. {remedy}") from error
        del loss, batch
        recording.enter("optimizer")
        optimizer.step()
        _mark_host(recording, model, optimizer)
        optimizer.zero_grad()
    _name(recording, model, optimizer)
    result = _replayed(recording, begins[0], begins[1], setting.device != "cpu", unit_rows(model))
    if look is not None:
        look(model)
    return result


def _loss_of(program: Program) -> str:
    return "default loss" if program.loss is default_loss else "loss"


def _drawn(model: nn.Module, shape: str) -> torch.Tensor:
    """Return random tokens that every table of the model has, or floats if the model has layers but no table."""
    tables = [each.num_embeddings for each in model.modules() if isinstance(each, nn.Embedding | nn.EmbeddingBag)]
    if not tables and first_layer(model) is not None:
        return torch.randn(sizes_in(shape))
    return tokens(shape, min([256, *tables]))


def _require_loss(loss: Any) -> None:
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        shape = tuple(loss.shape) if isinstance(loss, torch.Tensor) else type(loss).__name__
        raise ArgumentError(f"loss() returned {shape}. Return a tensor with one element.")
    if not loss.requires_grad:
        raise ArgumentError("loss() returned a tensor without a graph, so no parameter of the model is trained.")


def _shard(setting: Setting, model: nn.Module, mesh: tuple[int, ...] | None) -> nn.Module:
    program, options = setting.program, {}
    if mesh is not None:
        if program.shard is not shard_blocks and "mesh" not in inspect.signature(program.shard).parameters:
            raise ArgumentError(
                "The mesh has no effect: the program's shard function has no argument mesh. Define "
                "shard(model, mesh=None) and pass the mesh to fully_shard, or leave the mesh out."
            )
        names = ("replicate", "shard") if len(mesh) == 2 else ("shard",)
        options["mesh"] = init_device_mesh("cpu", mesh, mesh_dim_names=names)
    sharded = program.sharded(model, **options)
    if not is_sharded(sharded):
        raise ArgumentError("shard() has sharded no module. Call fully_shard or FullyShardedDataParallel in it.")
    if any(parameter.is_meta for parameter in sharded.parameters()):
        sharded.to_empty(device="cpu")
    return sharded


@contextmanager
def _stages(recording: Recording, loss: str) -> Iterator[None]:
    """Enter a stage of `recording` when a unit enters one."""

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            stage, _, unit = str(record.args[0]).removeprefix("plan::").partition(" ")  # type: ignore[index]
            unit = unit[1:-1]
            now = recording.stage.partition(" ")[0]
            if stage == "pre_forward":
                recording.enter(f"{'forward' if recording.in_forward else 'recompute'} {unit}")
            elif stage == "post_forward" and recording.in_forward:
                recording.enter(loss if unit == ROOT else f"forward {ROOT}")
            elif stage == "root_post_backward":
                recording.enter("end of backward")
            elif stage == "pre_backward" and now != "recompute":
                recording.enter(f"backward {unit}")

    before = observer._prefix, observer._second_log
    logger = logging.Logger("unshard.plan", logging.DEBUG)
    logger.addHandler(Handler())
    name_stages("plan", logger)
    try:
        yield
    finally:
        name_stages(*before)


# -- from the recording to figures ---------------------------------------------------------------------------------


def _mark_host(recording: Recording, model: nn.Module, optimizer: Any) -> None:
    for each in held_by(model, optimizer):
        number = recording.number(each.storage)
        if each.on_host and number is not None:
            recording.blocks[number].host = True


def _name(recording: Recording, model: nn.Module, optimizer: Any) -> None:
    """Set the kind and the description of each block."""
    for each in held_by(model, optimizer):
        number = recording.number(each.storage)
        if number is not None:
            block = recording.blocks[number]
            block.kind, block.what, block.host = each.kind, each.what, each.on_host
    names: dict[tuple[str, tuple[int, ...]], list[str]] = {}
    for group in groups_of(model):
        for param in group.params:
            names.setdefault((group.unit_name, tuple(param.sharding.shape)), []).append(param.name)
    for target, sources in recording.sources:
        if recording.blocks[target].kind != REDUCTIONS:
            continue
        unit = recording.blocks[target].what.partition(" of ")[2]
        copied: Counter[tuple[int, ...]] = Counter()
        for number in sources:
            block = recording.blocks[number]
            if not block.kind:  # the gradients of equal shapes are copied in the order of their parameters
                named, position = names.get((unit, block.shape), []), copied[block.shape]
                name = named[position] if position < len(named) else str(list(block.shape))
                copied[block.shape] += 1
                block.kind, block.what = GRADIENTS, f"{name} gradient"
    for block in recording.blocks:
        if not block.kind:
            outside = block.stage in ("build", "optimizer")
            block.kind = ACTIVATIONS if block.in_forward and not outside else OTHER
        if not block.what:
            operator = block.operator.removeprefix("aten::").strip("_")
            block.what = f"{operator} {list(block.shape)} in {block.stage}"


class _Sizes:
    """The current size of each block of a recording: bytes on the host, and allocated bytes on a device."""

    def __init__(self, recording: Recording, on_device: bool):
        self._blocks = recording.blocks
        self.allocator = Allocator() if on_device else None
        self._taken: dict[int, tuple[Any, int]] = {}

    def change(self, index: int, nbytes: int) -> int:
        """Return by how much a block grows if its storage gets `nbytes` bytes."""
        block, allocator = self._blocks[index], self.allocator
        place, before = self._taken.pop(index, (None, 0))
        if allocator is None or block.host:
            self._taken[index] = None, nbytes
            return nbytes - before
        if place is not None:
            allocator.free(place)
        if nbytes:
            # The reduce stream allocates the reduce-scatter inputs.
            taken = allocator.take(nbytes, int(block.what.startswith(REDUCE_SCATTER_INPUT)))
            self._taken[index] = taken, taken.size
            nbytes = taken.size
        return nbytes - before


def _replayed(recording: Recording, first: int, begin: int, on_device: bool, units: list[dict[str, Any]]) -> Run:
    """Return the figures of the step that begins at event `begin`. `first` is the event at which the first one does."""
    sizes, host, held = _Sizes(recording, on_device), {"at_rest": 0, "at_peak": 0}, 0
    now = dict.fromkeys(KINDS, 0)
    now[OTHER] = WORKSPACES if on_device else 0
    rest, each_most, timeline = dict(now), dict(now), [Point("", dict(now))]
    most, most_at = -1, 0
    marks = iter([*recording.marks, (len(recording.events) + 1, "")])
    mark = next(marks)
    for number, (index, nbytes) in enumerate([*recording.events, (-1, 0)]):
        if number == first and sizes.allocator is not None:
            sizes.allocator.empty_cache()
        if number == begin:
            rest, each_most, host["at_rest"] = dict(now), dict(now), held
            timeline, most = [Point("", dict(now))], -1
        while mark[0] <= number:
            if number >= begin and mark[0] >= begin and timeline[-1].at != mark[1]:
                timeline.append(Point(mark[1], dict(now)))
            mark = next(marks)
        if index < 0:
            break
        change = sizes.change(index, nbytes)
        if recording.blocks[index].host:
            held += change
            host["at_peak"] = max(host["at_peak"], held) if number >= begin else 0
            continue
        kind = recording.blocks[index].kind
        now[kind] += change
        if number >= begin:
            each_most[kind] = max(each_most[kind], now[kind])
            if total(now) > timeline[-1].total:
                timeline[-1].bytes = dict(now)
            if total(now) > most:
                most, most_at = total(now), number
    largest = _largest(recording, most_at)
    return Run(rest, each_most, [point for point in timeline if point.at], largest, host, units)


def _largest(recording: Recording, until: int) -> list[dict[str, Any]]:
    sizes: dict[int, int] = {}
    for index, nbytes in recording.events[: until + 1]:
        sizes[index] = nbytes
    alive = [(nbytes, index) for index, nbytes in sizes.items() if nbytes and not recording.blocks[index].host]
    found = []
    for nbytes, index in sorted(alive, reverse=True)[:LARGEST]:
        block = recording.blocks[index]
        found.append({"what": block.what, "kind": block.kind, "bytes": nbytes})
    return found
