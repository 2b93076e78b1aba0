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

from ..engine.api import ROOT, name_stages, observer, state_of
from ..errors import ArgumentError, UnshardError
from ..torch_private import run_backward
from .memory_job import simulated_job
from .memory_rows import ACTIVATIONS, GRADIENTS, KINDS, OTHER, REDUCTIONS, groups_of, held_by, unit_rows
from .memory_virtual import Recording, virtual_memory
from .program import Program, shard_blocks

WORKSPACES = 2 * 32 * 2**20
"""Bytes of cuBLAS on a CUDA device: one workspace for the thread of forward, and one for the thread of backward.

A workspace takes 32 MiB on Hopper and 8.1 MiB on earlier devices. `CUBLAS_WORKSPACE_CONFIG` changes this size.
"""
ROUNDING = 512
"""The CUDA allocator rounds sizes up to multiples of this number of bytes."""
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
        _stages(recording),
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
    optimizer = program.optimizer(model)
    if changes.optimizer is not None:
        optimizer = changes.optimizer(optimizer)
    _mark_host(recording, model, optimizer)
    begin = 0
    for step in range(2):
        begin = len(recording.events)
        batch = program.batch_of(0, step)
        recording.in_forward = True
        recording.enter("forward")
        try:
            loss = program.loss(model, batch)
            _require_loss(loss)
            recording.in_forward = False
            recording.enter("backward loss")
            run_backward(loss)
        except UnshardError:
            raise
        except Exception as error:
            text = str(error).strip().partition("\n")[0]
            raise ArgumentError(f"The model fails on this batch: {type(error).__name__}: {text}") from error
        del loss, batch
        recording.enter("optimizer")
        optimizer.step()
        _mark_host(recording, model, optimizer)
        optimizer.zero_grad()
    _name(recording, model, optimizer)
    result = _replayed(recording, begin, setting.device != "cpu", unit_rows(model))
    if look is not None:
        look(model)
    return result


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
                "mesh= has no effect: the program's shard function has no argument mesh. Define "
                "shard(model, mesh=None) and pass the mesh to fully_shard, or leave mesh= out."
            )
        names = ("replicate", "shard") if len(mesh) == 2 else ("shard",)
        options["mesh"] = init_device_mesh("cpu", mesh, mesh_dim_names=names)
    sharded = program.shard(model, **options) or model
    if not any(state_of(module) is not None for module in sharded.modules()):
        raise ArgumentError("shard() has sharded no module. Call fully_shard or FullyShardedDataParallel in it.")
    if any(parameter.is_meta for parameter in sharded.parameters()):
        sharded.to_empty(device="cpu")
    return sharded


@contextmanager
def _stages(recording: Recording) -> Iterator[None]:
    """Enter a stage of `recording` when a unit enters one."""

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            stage, _, unit = str(record.args[0]).removeprefix("plan::").partition(" ")  # type: ignore[index]
            unit = unit[1:-1]
            now = recording.stage.partition(" ")[0]
            if stage == "pre_forward":
                recording.enter(f"{'forward' if recording.in_forward else 'recompute'} {unit}")
            elif stage == "post_forward" and recording.in_forward:
                recording.enter("loss" if unit == ROOT else f"forward {ROOT}")
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
                block.kind, block.what = GRADIENTS, f"{name if unit == ROOT else f'{unit}.{name}'} gradient"
    for block in recording.blocks:
        if not block.kind:
            outside = block.stage in ("build", "optimizer")
            block.kind = ACTIVATIONS if block.in_forward and not outside else OTHER
        if not block.what:
            operator = block.operator.removeprefix("aten::").strip("_")
            block.what = f"{operator} {list(block.shape)} in {block.stage}"


def _replayed(recording: Recording, begin: int, on_device: bool, units: list[dict[str, Any]]) -> Run:
    rounding = ROUNDING if on_device else 1
    blocks, sizes = recording.blocks, dict[int, int]()
    now = dict.fromkeys(KINDS, 0)
    host = {"at_rest": 0, "at_peak": 0}
    held = 0
    if on_device:
        now[OTHER] = WORKSPACES
    rest: dict[str, int] = {}
    each_most: dict[str, int] = {}
    marks = [*recording.marks, (len(recording.events) + 1, "")]
    timeline: list[Point] = []
    most, most_at, position = -1, 0, 0
    for number, (index, nbytes) in enumerate([*recording.events, (-1, 0)]):
        if number == begin:
            rest, host["at_rest"] = dict(now), held
            timeline.append(Point("", dict(now)))
            each_most = dict(now)
            most, most_at = total_of(now), number
        while number >= begin and position < len(marks) and marks[position][0] <= number:
            if marks[position][0] >= begin:
                _next_stage(timeline, marks[position][1], now)
            position += 1
        if index < 0:
            break
        block = blocks[index]
        nbytes = -(-nbytes // rounding) * rounding
        change, sizes[index] = nbytes - sizes.get(index, 0), nbytes
        if block.host:
            held += change
            if number >= begin:
                host["at_peak"] = max(host["at_peak"], held)
            continue
        now[block.kind] += change
        if number >= begin:
            each_most[block.kind] = max(each_most[block.kind], now[block.kind])
            current = total_of(now)
            if current > timeline[-1].total:
                timeline[-1].bytes = dict(now)
            if current > most:
                most, most_at = current, number
    largest = _largest(recording, most_at, rounding)
    return Run(rest, each_most, [point for point in timeline if point.at], largest, host, units)


def total_of(kinds: dict[str, int]) -> int:
    return sum(kinds.values())


def _next_stage(timeline: list[Point], stage: str, now: dict[str, int]) -> None:
    if timeline and timeline[-1].at == stage:
        return
    timeline.append(Point(stage, dict(now)))


def _largest(recording: Recording, until: int, rounding: int) -> list[dict[str, Any]]:
    sizes: dict[int, int] = {}
    for index, nbytes in recording.events[: until + 1]:
        sizes[index] = nbytes
    alive = [(nbytes, index) for index, nbytes in sizes.items() if nbytes and not recording.blocks[index].host]
    found = []
    for nbytes, index in sorted(alive, reverse=True)[:LARGEST]:
        block = recording.blocks[index]
        found.append({"what": block.what, "kind": block.kind, "bytes": nbytes})
    return found
