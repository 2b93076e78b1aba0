"""One step of FSDP2 and one of unshard in a trace that Perfetto shows.

    python -m benchmarks.trace --place nccl --size 100m --json trace.json.gz    # two ranks on as many GPUs, or on one
    python -m benchmarks.trace --place gloo --size tiny --json trace.json
    python -m benchmarks.picture trace.svg trace.json.gz

Open the file at https://ui.perfetto.dev or chrome://tracing. Each side is a process: a row of the CPU with forward,
backward, optimizer and the calls of collectives, and a row per CUDA stream with its kernels. On a CPU, there is a row
of operators, and one for each thread of Gloo. Both steps begin at 0. Other events of the profiler are left out.

Of `--steps` traced steps, the one of median length is written. A profiler makes steps longer; `step` is the median of
as many steps without it. `compute`, `all-gather`, `reduce-scatter` and `copies` are sums of the durations of a kind, in
milliseconds, and `idle` is the part of the traced step in which no kernel but NCCL's runs.
"""

from __future__ import annotations

import argparse
import gzip
import json
import re
import statistics
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from . import measure, places, sides, tables, traces
from .command import parser_for
from .models import DECODERS, Case
from .places import Place
from .sides import Training
from .tables import Row
from .traces import Event

SIDES = {"fsdp2": "FSDP2", "unshard": "unshard"}
KINDS = ("compute", "all-gather", "reduce-scatter", "copies")
COLUMNS = {"side": "side", "step": "step ms", "traced": "traced ms", **{kind: kind for kind in KINDS}}
COLUMNS |= {"idle": "idle", "events": "events"}
PHASES = ("forward", "backward", "optimizer")


def compare(place: Place, options: argparse.Namespace) -> dict[str, Any]:
    rows: list[Row] = []
    events: list[Event] = []
    for number, (side, title) in enumerate(SIDES.items()):
        training = sides.start(side, options.case, place)
        for _ in range(options.warmup):
            training.step()
        with measure.quiet():
            walls = [measure.timed_step(training, place)["wall"] for _ in range(options.steps)]
            traced = sorted((_traced(training, place) for _ in range(options.steps)), key=lambda each: each[0])
        wall, recorded = traced[len(traced) // 2]
        kept = _kept(recorded, number, title)
        row: Row = {"side": side, "step": statistics.median(walls), "traced": wall, "events": len(kept)}
        row |= {kind: sum(each["dur"] for each in kept if each.get("cat") == kind) / 1e3 for kind in KINDS}
        if place.on_gpu:
            row["idle"] = _idle(kept)
        rows.append(row)
        events += kept
        del training
        measure.release(place)
    tables.show(place, f"{options.case}, {place}", rows, COLUMNS)
    return {"rows": rows, "traceEvents": events}


def _traced(training: Training, place: Place) -> tuple[float, list[Event]]:
    place.meet()
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if place.on_gpu else [])]
    with profile(activities=activities) as record:
        began = time.perf_counter()
        with record_function("forward"):
            loss = training.forward()
        with record_function("backward"):
            loss.backward()
        with record_function("optimizer"):
            training.update()
        place.synchronize()
        wall = (time.perf_counter() - began) * measure.MS
    return wall, traces.events_of(record)


def _kept(events: list[Event], side: int, title: str) -> list[Event]:
    """The events that a reader needs, with short names, and times in microseconds from the begin of the step."""
    phases = [each for each in events if each.get("cat") == "user_annotation" and each["name"] in PHASES]
    calls = [each for each in events if each.get("cat") == "cpu_op" and each["name"].startswith("c10d::")]
    zero = min(each["ts"] for each in phases)
    rows: dict[Any, list[tuple[Event, str]]] = defaultdict(list)
    for each, kind in traces.kernels_of(events) or traces.operators_of(events):
        rows[each["args"].get("stream", each["tid"])].append((each, _kind(each["name"], kind)))
    named = {"CPU": [*((each, each["name"]) for each in phases), *((each, "collective call") for each in calls)]}
    by_kind = ((_main_kind(row), row) for row in rows.values())
    for kind, row in sorted(by_kind, key=lambda each: KINDS.index(each[0])):
        known = sum(name.split(" ")[0] == kind for name in named)
        named[f"{kind} {known + 1}" if known else kind] = row
    found: list[Event] = [{"ph": "M", "pid": side, "name": "process_name", "args": {"name": title}}]
    for number, (name, row) in enumerate(named.items()):
        found.append({"ph": "M", "pid": side, "tid": number, "name": "thread_name", "args": {"name": name}})
        found.append(
            {"ph": "M", "pid": side, "tid": number, "name": "thread_sort_index", "args": {"sort_index": number}}
        )
        for each, kind in sorted(row, key=lambda each: each[0]["ts"]):
            begin = round(each["ts"] - zero, 1)
            length = round(round(each["ts"] + each.get("dur", 0) - zero, 1) - begin, 1)  # ends like what contains it
            place = {"pid": side, "tid": number, "ts": begin, "dur": length}
            found.append({"ph": "X", "name": short(each["name"]), "cat": kind, **place})
    return found


def _idle(kept: list[Event]) -> float:
    """Milliseconds from the begin of the step to its last event in which no kernel ran except collectives."""
    ends = [each["ts"] + each["dur"] for each in kept if each["ph"] == "X"]
    busy = traces.united(sorted((e for e in kept if e.get("cat") in ("compute", "copies")), key=lambda e: e["ts"]))
    return (max(ends) - sum(end - begin for begin, end in busy)) / 1e3


def _kind(name: str, kind: str) -> str:
    if kind != "collectives":
        return "copies" if name.startswith(("Memcpy", "Memset")) else kind
    return "all-gather" if "gather" in name.lower() else "reduce-scatter"


def _main_kind(row: list[tuple[Event, str]]) -> str:
    """What a stream or thread does for most of its time."""
    times: dict[str, float] = defaultdict(float)
    for each, kind in row:
        times[kind] += each.get("dur", 0)
    return max(times, key=lambda kind: times[kind])


def short(name: str) -> str:
    """The name of a kernel without return type, namespaces, template arguments and parameters."""
    if name.startswith("nccl"):
        return name.removeprefix("ncclDevKernel_").split("_")[0].split("(")[0]
    plain = re.split(r"[<(]", re.sub(r"^void |\(anonymous namespace\)::", "", name))[0]
    return plain.rpartition("::")[2][:40] or name[:40]


def arguments() -> argparse.ArgumentParser:
    parser, gpu = parser_for(__doc__, own_sides=True), torch.cuda.is_available()
    parser.add_argument("--size", choices=DECODERS, default="100m" if gpu else "tiny", help="of the model")
    parser.add_argument("--batch", default="8x1024" if gpu else "1x16", metavar="SAMPLESxLENGTH", help="of a rank")
    parser.add_argument("--steps", type=int, default=5, help="traced steps, of which one is written")
    parser.add_argument("--warmup", type=int, default=5, help="steps before")
    parser.set_defaults(place="nccl" if gpu else "gloo", world=2)
    return parser


def main(arguments_given: list[str] | None = None) -> None:
    options = arguments().parse_args(arguments_given)
    options.case = Case.parse(f"{options.size}:{options.batch}")
    place = places.chosen(options)
    found = places.run(place, compare, options)
    if options.json is not None:
        content = {**found, "environment": tables.environment(place), "case": str(options.case)}
        text = json.dumps(content, separators=(",", ":")).encode()
        Path(options.json).write_bytes(gzip.compress(text) if options.json.endswith(".gz") else text)


if __name__ == "__main__":
    main()
