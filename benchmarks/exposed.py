"""How well `unshard.tools.timeline` measures exposed communication, beside a profiler, and what it costs.

    python -m benchmarks.exposed --world 2 --size 100m --batch 16x1024   # two ranks of NCCL on as many GPUs, or on one
    python -m benchmarks.exposed --place gloo --size tiny                # without a profiler: only the timeline's cost

Both measure the time in which the compute stream waits for a collective. The timeline records events around each wait.
In the trace, this time is a gap between two kernels of the compute stream in which a kernel of NCCL ends. It counts
from the begin of the gap or, if later, from the call that made the stream wait, to that end (see `benchmarks.traces`).
`both` are steps with the timeline and the profiler at once, and `ratio` is the timeline's exposed time divided by the
trace's. The other rows are steps with only one of them. `alone` is the time in which a kernel of NCCL runs and no other
kernel of the rank does: more than the exposed time if the host is late. `--batch 16x1024` is recommended: with few
kernels to compute, the host is late, and most waits are short.

`cost` is the wall time of steps with the timeline divided by that of plain steps, on the slowest rank: the median over
rounds, in each of which both run one after the other.
"""

from __future__ import annotations

import argparse
import statistics
import time
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

import unshard

from . import measure, places, sides, tables, traces
from .command import parser_for
from .models import DECODERS, Case
from .places import Place
from .sides import Training
from .tables import Row

COLUMNS = {"rank": "rank", "steps": "steps with", "step": "step ms", "gathering": "gathers, timeline"}
COLUMNS |= {"reducing": "reductions, timeline", "exposed": "exposed, timeline"}
COLUMNS |= {"traced_gathering": "gathers, trace", "traced_reducing": "reductions, trace", "traced": "exposed, trace"}
COLUMNS |= {"ratio": "ratio", "alone": "alone"}


def compare(place: Place, options: argparse.Namespace) -> dict[str, Any]:
    training = sides.start("unshard", options.case, place)
    for _ in range(options.warmup):
        training.step()
    rows = [_row("both", training, place, options.steps, timed=True, traced=place.on_gpu)]
    if place.on_gpu:
        rows.append(_row("timeline", training, place, options.steps, timed=True, traced=False))
        rows.append(_row("trace", training, place, options.steps, timed=False, traced=True))
    rows = [row for ranks in _of_all_ranks(rows, place) for row in ranks]
    tables.show(place, f"{options.case}, {place}: milliseconds per step", rows, COLUMNS)
    costs, walls = [], []
    for _ in range(options.rounds):
        plain = _wall(training, place, options.steps, timed=False)
        walls.append(plain)
        costs.append(_wall(training, place, options.steps, timed=True) / plain)
    cost: Row = {"case": str(options.case), "plain": statistics.median(walls), "cost": statistics.median(costs)}
    cost |= {"low": min(costs), "high": max(costs)}
    tables.show(
        place, "what the timeline costs", [cost], {"plain": "plain ms", "cost": "cost", "low": "low", "high": "high"}
    )
    return {"rows": rows, "cost": cost}


def _row(title: str, training: Training, place: Place, steps: int, timed: bool, traced: bool) -> Row:
    activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
    place.meet()
    # The profiler is the inner one: the end of the timeline issues a collective.
    with unshard.tools.timeline(training.model) if timed else nullcontext() as times:
        with profile(activities=activities) if traced else nullcontext() as record:
            for _ in range(steps):
                training.step()
            place.synchronize()
    row: Row = {"rank": place.rank, "steps": title}
    if times is not None:
        row["step"] = times.step_ms
        row["gathering"] = sum(each.all_gather_exposed_ms for each in times.units)
        row["reducing"] = sum(each.reduce_exposed_ms for each in times.units)
        row["exposed"] = times.exposed_ms
    if record is not None:
        found = traces.exposed_time(traces.events_of(record))
        row |= {f"traced_{kind}": found[kind] / steps for kind in ("gathering", "reducing")}
        row["traced"], row["alone"] = row["traced_gathering"] + row["traced_reducing"], found["alone"] / steps
        if times is not None and row["traced"]:
            row["ratio"] = row["exposed"] / row["traced"]
    return row


def _of_all_ranks(rows: list[Row], place: Place) -> list[list[Row]]:
    found: list[Any] = [rows]
    if place.has_other_ranks:
        found = [None] * place.world
        dist.all_gather_object(found, rows)
    return [list(each) for each in zip(*found, strict=True)]


def _wall(training: Training, place: Place, steps: int, timed: bool) -> float:
    """Milliseconds per step, without the end of the timeline's block."""
    with measure.quiet(), unshard.tools.timeline(training.model) if timed else nullcontext():
        place.meet()
        began = time.perf_counter()
        for _ in range(steps):
            training.step()
        place.synchronize()
        wall = (time.perf_counter() - began) * measure.MS / steps
    return place.slowest(wall)


def arguments() -> argparse.ArgumentParser:
    parser, gpu = parser_for(__doc__, own_sides=True), torch.cuda.is_available()
    parser.add_argument("--size", choices=DECODERS, default="100m" if gpu else "tiny", help="of the model")
    parser.add_argument("--batch", default="4x1024" if gpu else "1x16", metavar="SAMPLESxLENGTH", help="of a rank")
    parser.add_argument("--rounds", type=int, default=3, help="how often plain and timed steps take turns")
    parser.add_argument("--steps", type=int, default=4, help="steps that are measured at a time")
    parser.add_argument("--warmup", type=int, default=4, help="steps before")
    parser.set_defaults(place="nccl" if gpu else "gloo", world=2)
    return parser


def main(arguments_given: list[str] | None = None) -> None:
    options = arguments().parse_args(arguments_given)
    options.case = Case.parse(f"{options.size}:{options.batch}")
    place = places.chosen(options)
    tables.save(options.json, place, options, **places.run(place, compare, options))


if __name__ == "__main__":
    main()
