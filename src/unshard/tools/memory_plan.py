"""The memory of a training step, before the job starts: on any machine, for any number of ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import torch
from torch import nn

from ..errors import ArgumentError
from ..policies import MixedPrecisionPolicy
from ..sizes import bytes_in
from .memory_advice import Advice, advise_on
from .memory_rows import KINDS, size
from .memory_run import Run, Setting, run
from .precision_report import table
from .program import Program, load_program, sizes_in

_WIDTH = 50


@dataclass(frozen=True)
class MemoryPlan:
    """The result of `plan`. Sizes are bytes on one rank, in the second step, when optimizer state exists."""

    world: int
    device: str
    device_memory: int | None
    run: Run
    advice: list[Advice] = field(default_factory=list)

    @property
    def peak(self) -> int:
        return self.run.peak.total

    @property
    def peak_at(self) -> str:
        return title_of(self.run.peak.at)

    @property
    def fits(self) -> bool | None:
        return None if self.device_memory is None else self.peak <= self.device_memory

    @property
    def rows(self) -> list[dict[str, Any]]:
        at_peak = self.run.peak.bytes
        return [{"kind": kind, "at_rest": self.run.rest[kind], "at_peak": at_peak[kind]} for kind in KINDS]

    def to_dict(self) -> dict[str, Any]:
        from .. import __version__

        return {
            "kind": "plan",
            "unshard": __version__,
            "world": self.world,
            "device": self.device,
            "device_memory": self.device_memory,
            "peak": self.peak,
            "peak_at": self.peak_at,
            "fits": self.fits,
            "rows": self.rows,
            "host": self.run.host,
            "timeline": [{"at": point.at, **point.bytes} for point in self.run.timeline],
            "largest": self.run.largest,
            "advice": [each.to_dict() for each in self.advice],
            "units": self.run.units,
        }

    def __str__(self) -> str:
        ranks = f"{self.world:,} rank" + "s" * (self.world > 1)
        lines = [f"Memory of one of {ranks}: peak {size(self.peak)}, in {self.peak_at}{self._verdict()}."]
        if self.device != "cpu":
            lines.append("Not counted: what the allocator reserves on top, NCCL, the CUDA context. Leave a margin.")
        lines += ["", *memory_table(self.rows, self.run.host)]
        lines += ["", "Largest at the peak:"]
        largest = [[each["what"], each["kind"], size(each["bytes"])] for each in self.run.largest[:6]]
        lines += table(("tensor", "kind", "size"), largest, numbers=(2,))
        lines += ["", *_chart([(point.at, point.total) for point in self.run.timeline], self.peak)]
        if self.advice:
            lines += ["", "Changes, with the new peak:"]
            rows = [[each.change, size(each.peak), _answer(each.fits)] for each in self.advice]
            lines += table(("change", "peak", "fits"), rows, numbers=(1,))
        return "\n".join(lines)

    def _verdict(self) -> str:
        if self.device_memory is None:
            return ""
        verb = "fits in" if self.fits else "does not fit in"
        return f"; it {verb} {size(self.device_memory)}"


def plan(
    program: Program | str | Callable[[], nn.Module],
    *,
    world: int,
    mesh: Sequence[int] | None = None,
    batch: Any = None,
    policy: MixedPrecisionPolicy | None = None,
    optimizer: Callable[[nn.Module], Any] | None = None,
    device: str = "cuda",
    device_memory: int | str | None = None,
    advise: bool = True,
) -> MemoryPlan:
    """Return the memory that a training step of `program` needs on each of `world` ranks, without a GPU or a job.

    `program` is a `Program`, `FILE:FUNCTION`, or the function that builds the unsharded model. The engine runs two
    steps, but no kernel does: all tensors are on memory that is never touched. `mesh` has the sizes of a hybrid mesh,
    (replicas, shards). `batch` is a batch, a function `batch(rank, step)`, or the shape of random tokens such as
    `"4x2048"` (of random floats, if the model has no embedding). `policy` is the `mp_policy` of all `fully_shard` calls
    that pass none. `optimizer` is a function of the sharded model.

    If the step does not fit in `device_memory` (bytes, or a size such as "80GiB"), or without `device_memory`, the plan
    lists changes that lower the peak. Each of them is planned, too, so `advise=False` is faster.

    `device` is "cuda" or "cpu": the kind of device whose memory is planned.

    Raises:
        ArgumentError: the program, the batch or the mesh is invalid.

    Example::

        print(plan(Model, world=64, batch="4x2048", device_memory=80 * 2**30))
    """
    try:
        limit = None if device_memory is None else bytes_in(device_memory)
    except ValueError as error:
        raise ArgumentError(f"device_memory is wrong: {error}.") from None
    setting = Setting(_program(program, batch, optimizer), world, _mesh(world, mesh), policy, _device(device))
    found = run(setting)
    planned = MemoryPlan(world, setting.device, limit, found)
    if not advise or planned.fits:
        return planned
    return replace(planned, advice=advise_on(setting, found, limit))


def _program(program: Any, batch: Any, optimizer: Any) -> Program:
    if isinstance(program, str):
        program = load_program(program)
    if not isinstance(program, Program):
        if isinstance(program, nn.Module) or not callable(program):
            raise ArgumentError(
                f"plan() needs a function that builds the unsharded model, got {type(program).__name__}. For example: "
                "plan(lambda: Model(config), world=64)."
            )
        program = Program(program)
    changed = {"batch": batch, "optimizer": optimizer}
    program = replace(program, **{name: value for name, value in changed.items() if value is not None})
    if program.batch is None:
        raise ArgumentError(
            'A plan needs a batch: the shape of random tokens (--batch 4x2048, batch="4x2048"), or a function '
            "batch(rank, step) in the program."
        )
    if isinstance(program.batch, str):
        sizes_in(program.batch)
    return program


def _mesh(world: Any, mesh: Any) -> tuple[int, ...] | None:
    if not isinstance(world, int) or world < 1:
        raise ArgumentError(f"world must be a positive number of ranks, got {world!r}.")
    if mesh is None:
        return None
    sizes = tuple(mesh)
    if not 1 <= len(sizes) <= 2 or any(not isinstance(each, int) or each < 1 for each in sizes):
        raise ArgumentError(f"mesh must be (shards,) or (replicas, shards), got {mesh!r}.")
    if prod(sizes) != world:
        raise ArgumentError(f"A mesh of {' x '.join(map(str, sizes))} has {prod(sizes)} ranks, but world is {world}.")
    return sizes


def _device(device: Any) -> str:
    kind = torch.device(device).type
    if kind not in ("cuda", "cpu"):
        raise ArgumentError(f"plan() knows the memory of 'cuda' and 'cpu' devices, got {device!r}.")
    return kind


# -- the text ----------------------------------------------------------------------------------------------------


def memory_table(rows: Sequence[dict[str, Any]], host: dict[str, int] | None) -> list[str]:
    cells = [[row["kind"], size(row["at_rest"]), size(row["at_peak"])] for row in rows]
    rest, peak = (sum(row[when] for row in rows) for when in ("at_rest", "at_peak"))
    cells.append(["total", size(rest), size(peak)])
    if host and any(host.values()):
        cells.append(["on the host", size(host["at_rest"]), size(host["at_peak"])])
    return table(("kind", "at rest", "at peak"), cells, numbers=(1, 2))


def title_of(stage: str) -> str:
    """Return "backward of blocks.3" for the stage "backward blocks.3"."""
    name, _, unit = stage.partition(" ")
    return f"{name} of {unit}" if name in ("forward", "backward", "recompute", "reduce") and unit else stage


def _answer(fits: bool | None) -> str:
    return "" if fits is None else "yes" if fits else "no"


def _chart(points: Sequence[tuple[str, int]], peak: int, most: int = 24) -> list[str]:
    """Return a title and one bar per stage. Neighbors share a bar if there are many; it shows the largest of them."""
    each = -(-len(points) // most)
    shared = [points[start : start + each] for start in range(0, len(points), each)]
    rows = [max(part, key=lambda point: point[1]) for part in shared]
    width = max(len(at) for at, _ in rows)
    bars = [f"  {at.ljust(width)}  {'#' * round(_WIDTH * nbytes / peak)} {size(nbytes)}" for at, nbytes in rows]
    return [f"The step{f' (a line is the largest of {each} stages)' if each > 1 else ''}:", *bars]
