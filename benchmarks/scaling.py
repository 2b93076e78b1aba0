"""What grows with the number of ranks, counted on one rank of a job of which nothing else exists.

    python -m benchmarks.scaling --worlds 8,64,256,1024

`step`: collectives of a step and the bytes that a rank sends for them, which are compared with `benchmarks.formulas`;
bytecodes of unshard, operators, the tensors that these take, and the time and CPU time of forward and backward without
those of the simulated collectives. Times are medians over rounds in which the worlds take turns, and ratios are medians
of the ratios of the rounds. `start`: process groups, and requests to the store until the order of collectives is known.
`checkpoint`: the plan of a checkpoint from descriptions of all ranks, without sending or writing tensors; CPU seconds.
`plan` is what every rank spends before it writes, `writing` what rank 0 spends on the manifest, and `reading` and
`lookup` what every rank spends before it reads tensors.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg  # registers the backend "fake"
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import unshard
from unshard import FullyShardedDataParallel, MixedPrecisionPolicy, ShardingStrategy, fully_shard
from unshard.comm import transports
from unshard.tools import ledger

from . import tables
from .bytecodes import counted
from .formulas import Job, Shape, sent
from .loopback import METER
from .measure import MIB, MS, Clock, quiet
from .places import Place, run
from .plans import MODELS, plan_row
from .stores import CountingStore
from .tables import Row

WIDTH, ROWS, LAYERS = 64, 1024, 4
PART = 4
"""Ranks that shard a replica of the hybrid kinds, or that keep the slices of a unit."""
KINDS = ("plain", "hybrid", "sliced", "columns", "wrapper", "wrapper-hybrid", "step-keep", "step-follow")

PLANNED = ("plain", "columns", "wrapper")
"""Kinds of which checkpoints are planned."""

STEP = {"kind": "kind", "world": "ranks", "gathers": "gathers", "reductions": "reductions", "sent_mib": "sent MiB"}
STEP |= {"formula": "formula", "shard_mib": "shard MiB", "bytecodes": "bytecodes", "operators": "operators"}
STEP |= {"tensors": "tensors", "wall": "ms", "wall_ratio": "ratio", "cpu": "CPU ms", "cpu_ratio": "ratio"}
START = {"kind": "kind", "backend": "backend", "world": "ranks", "groups": "groups", "setup": "requests: setup"}
START |= {"first": "step 1", "second": "step 2", "later": "steps 3-5"}
CHECKPOINT = {"model": "model", "kind": "kind", "world": "ranks", "tensors": "tensors", "boxes": "boxes"}
CHECKPOINT |= {"sent_mib": "exchanged MiB", "plan": "plan s", "writing": "writing s", "manifest_mib": "manifest MiB"}
CHECKPOINT |= {"reading": "reading s", "lookup": "lookup s"}


class Block(nn.Module):
    """Two matrices of equal shape, and a vector. The matrices are sharded along their longer dim."""

    def __init__(self, columns: bool) -> None:
        super().__init__()
        self.columns = columns
        self.up, self.down = (
            nn.Parameter(weight.t().contiguous() if columns else weight)
            for weight in (torch.randn(ROWS, WIDTH) / WIDTH, torch.randn(ROWS, WIDTH) / ROWS)
        )
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        up, down = (self.up, self.down.t()) if self.columns else (self.up.t(), self.down)
        return x + self.scale * (x @ up @ down)


class Model(nn.Module):
    def __init__(self, columns: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(columns) for _ in range(LAYERS))
        self.head = nn.Parameter(torch.randn(500, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x @ self.head.t()

    def shapes(self) -> tuple[list[list[Shape]], list[Shape]]:
        """The shapes of the units, and of the root's own parameters. The dim that is sharded comes first."""
        units = [[tuple(sorted(each.shape, reverse=True)) for each in block.parameters()] for block in self.blocks]
        return units, [tuple(self.head.shape)]


def job_of(kind: str, world: int) -> Job:
    replicas = world // PART if "hybrid" in kind else 1
    return Job(world, replicas, slices=PART if kind == "sliced" else 0, flat=kind.startswith("wrapper"))


def sharded(kind: str, job: Job) -> nn.Module:
    options: dict[str, Any] = {}
    if job.replicas > 1:
        names = None if job.flat else ("replicas", "shards")
        mesh = init_device_mesh("cpu", (job.replicas, job.shards), mesh_dim_names=names)
        options["device_mesh" if job.flat else "mesh"] = mesh
    model = Model(kind == "columns")
    if job.flat:
        if job.replicas > 1:
            options["sharding_strategy"] = ShardingStrategy.HYBRID_SHARD
        for number, block in enumerate(model.blocks):
            model.blocks[number] = FullyShardedDataParallel(block, **options)
        return FullyShardedDataParallel(model, **options)
    if job.compute == 2:
        options["mp_policy"] = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    if kind == "columns":
        options["shard_placement_fn"] = lambda parameter: Shard(int(parameter.shape[-1] == ROWS))
    for block in model.blocks:
        fully_shard(block, **options, **({"reshard_after_forward": job.slices} if job.slices else {}))
    return fully_shard(model, **options)


def steps_of(kind: str, model: nn.Module) -> tuple[Callable[[], None], Callable[[], None]]:
    """Forward and backward, and what comes after them."""
    optimizer, batch = torch.optim.SGD(model.parameters(), lr=0.0), torch.ones(2, WIDTH)

    def plain() -> None:
        model(batch).sum().backward()

    def uneven() -> None:
        with unshard.step(model, units=kind.removeprefix("step-")) as step:  # type: ignore[arg-type]
            for _ in range(2):
                step.backward(model(batch).sum(), weight=2)

    def update() -> None:
        optimizer.step()
        optimizer.zero_grad()

    return uneven if kind.startswith("step-") else plain, update


class Operators(TorchDispatchMode):
    """Counts operators, and the tensors that they take: an operator on a list takes many."""

    def __init__(self) -> None:
        super().__init__()
        self.operators = self.tensors = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operators += 1
        self.tensors += sum(isinstance(each, Tensor) for each in tree_leaves((args, kwargs)))
        return func(*args, **(kwargs or {}))


def count_step(place: Place, kind: str) -> Row:
    """Counts of one step after the first ones, in which the order is learned and optimizers create state."""
    job = job_of(kind, place.world)
    model = sharded(kind, job)
    work, update = steps_of(kind, model)
    for _ in range(4):
        work()
        update()
    row: Row = {"kind": kind, "world": place.world}
    with METER.listening() as calls:
        work()
    update()
    kinds = Counter(call.kind for call in calls)
    row |= {"gathers": kinds["gather"], "reductions": kinds["reduce_scatter"] + kinds["all_reduce"]}
    row["sent_mib"] = sum(map(sent, calls)) / MIB
    if not kind.startswith("step-"):
        formula = job.collectives(*Model(kind == "columns").shapes())
        row["formula"] = "equal" if Counter(formula) == Counter(calls) else "DIFFERENT"
    row["shard_mib"] = ledger(model).now["parameters"] / MIB
    with counted() as counts:
        work()
    update()
    row["bytecodes"] = sum(counts.bytecodes.values())
    with Operators() as seen:
        work()
    return row | {"operators": seen.operators, "tensors": seen.tensors}


def time_step(place: Place, given: tuple[str, int]) -> tuple[float, float]:
    """Milliseconds of forward and backward and of their CPU time, without those of the simulated collectives."""
    kind, steps = given
    work, update = steps_of(kind, sharded(kind, job_of(kind, place.world)))
    walls, cpus = [], []
    with quiet():
        for _ in range(4 + steps):
            clock, began = Clock(), time.thread_time() - METER.cpu_seconds
            work()
            walls.append(clock.lap())
            cpus.append((time.thread_time() - METER.cpu_seconds - began) * MS)
            update()
    return statistics.median(walls[4:]), statistics.median(cpus[4:])


def step_rows(options: argparse.Namespace) -> list[Row]:
    rows = []
    for kind in options.kinds:
        found = {world: run(Place("simulated", world, "cpu"), count_step, kind) for world in options.worlds}
        times: dict[int, list[tuple[float, float]]] = {world: [] for world in options.worlds}
        for number in range(options.rounds):
            turn = number % len(options.worlds)
            for world in options.worlds[turn:] + options.worlds[:turn]:
                place = Place("simulated", world, "cpu")
                times[world].append(run(place, time_step, (kind, options.steps)))
        for world, row in found.items():
            for name, number in (("wall", 0), ("cpu", 1)) if options.rounds else ():
                mine, first = ([each[number] for each in times[which]] for which in (world, options.worlds[0]))
                row[name] = statistics.median(mine)
                row[f"{name}_ratio"] = statistics.median(a / b for a, b in zip(mine, first, strict=True))
            rows.append(row)
    return rows


# -- start ---------------------------------------------------------------------------------------------------


@contextmanager
def compared(world: int, backend: str) -> Iterator[CountingStore]:
    """Make this process rank 0 of a job whose ranks compare their collectives as with `backend`. Nothing is sent.

    PyTorch's fake backend takes the place of `backend`. The other ranks join whatever this rank joins.
    """
    store, original = CountingStore(world), transports.order_of
    transports.order_of = lambda group, fake, device: original(group, backend, device)
    try:
        dist.init_process_group("fake", rank=0, world_size=world, store=store)
        yield store
    finally:
        transports.order_of = original
        if dist.is_initialized():
            dist.destroy_process_group()


def start_row(kind: str, world: int, backend: str) -> Row:
    """Requests of the main thread and of the announcer. The latter writes one key in every interval."""
    row: Row = {"kind": kind, "backend": backend, "world": world}
    with compared(world, backend) as store:

        def requests() -> int:
            """The requests since the last call, without announcements."""
            made = [keys for _, keys in store.requests if "/rank " not in keys[0]]
            store.requests.clear()
            return len(made)

        model = sharded(kind, job_of(kind, world))
        row |= {"groups": len(dist.distributed_c10d._world.pg_names), "setup": requests()}
        work, update = steps_of(kind, model)
        for name in ("first", "second", "later"):
            for _ in range(3 if name == "later" else 1):
                work()
                update()
            row[name] = requests()
    return row


# -- the command ---------------------------------------------------------------------------------------------


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = _list_of(str)
    parser.add_argument("--worlds", type=_list_of(int), default=[8, 64, 256, 1024], help="numbers of ranks")
    parser.add_argument("--kinds", type=names, default=list(KINDS), help=", ".join(KINDS))
    parser.add_argument("--parts", type=names, default=["step", "start"], help="step, start, checkpoint")
    parser.add_argument("--models", type=names, default=["8b"], help="models whose checkpoints are planned: 8b, 70b")
    parser.add_argument("--rounds", type=int, default=7, help="how often the worlds take turns; 0 measures no time")
    parser.add_argument("--steps", type=int, default=30, help="timed steps of a world per round")
    parser.add_argument("--json", metavar="FILE", help="write all figures there")
    return parser


def _list_of(kind: Callable[[str], Any]) -> Callable[[str], list[Any]]:
    return lambda text: [kind(each) for each in text.split(",")]


def main(arguments_given: list[str] | None = None) -> None:
    options, found = arguments().parse_args(arguments_given), {}
    place = Place("simulated", max(options.worlds), "cpu")
    if "step" in options.parts:
        found["step"] = step_rows(options)
        tables.show(place, "a step of one rank", found["step"], STEP)
    if "start" in options.parts:
        found["start"] = [
            start_row(kind, world, backend)
            for kind in options.kinds
            for backend in ("gloo", "nccl")
            for world in options.worlds
        ]
        tables.show(place, "requests of one rank to the store, and process groups", found["start"], START)
    if "checkpoint" in options.parts:
        found["checkpoint"] = [
            {"model": model, **plan_row(MODELS[model], kind, world)}
            for model in options.models
            for kind in options.kinds
            if kind in PLANNED
            for world in options.worlds
        ]
        tables.show(place, "checkpoints of a model in fp32 and its Adam", found["checkpoint"], CHECKPOINT)
    tables.save(options.json, place, options, **found)


if __name__ == "__main__":
    main()
