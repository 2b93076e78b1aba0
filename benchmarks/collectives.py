"""What a step sends, and what it copies on the device to do so, side by side.

    python -m benchmarks.collectives --cases 1b:1x1024            # a GPU as one rank of a simulated job of 8
    python -m benchmarks.collectives --place nccl --world 2 --cases 100m:8x1024
    python -m benchmarks.collectives --place gloo --cases 10m:1x128:fp32

Collectives of forward and backward, with the bytes of their whole tensors. Copies (casts, packing, unpacking) are those
beyond the unsharded side's. On a GPU also the device time of their kernels, what of it is left beyond the two casts
that mixed precision needs (the shard for each gather, the gradient for its reduction, timed here by themselves), and
its share of the time that all kernels of a step take. The numbers and bytes are those of torch's operators: the kernel
with which unshard packs gradients counts only in the times. Copies that stand for collectives of a simulated job count
as collectives. With NCCL, `gathering` and `reducing` are the times of its kernels, which include the wait for other
ranks.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Callable

import torch
from torch.profiler import ProfilerActivity, profile

from . import measure, places, sides, tables, traces, traffic
from .command import ParamGroup, parser_for
from .models import Case, unit_sizes
from .places import Place
from .tables import Row

COLUMNS = {"case": "case", "side": "side", "gathers": "gathers", "reductions": "reductions", "others": "others"}
COLUMNS |= {"sent_mib": "sent MiB", "copies": "copies", "copied_mib": "copied MiB", "device": "device ms"}
COLUMNS |= {"copying": "copies ms", "beyond": "beyond casts", "share": "share"}
COLUMNS |= {"gathering": "gathering ms", "reducing": "reducing ms"}
FIGURES = {"sent_mib": "sent", "copies": "copies", "copied_mib": "copied", "device": "device", "copying": "copying"}
FIGURES |= {"gathering": "gathering", "reducing": "reducing"}


def arguments() -> argparse.ArgumentParser:
    parser = parser_for(__doc__, cases="100m:1x512,1b:1x1024", cpu_cases="10m:1x8:bf16")
    parser.add_argument("--warmup", type=int, default=4, help="steps before the one that is looked at")
    parser.add_argument("--steps", type=int, default=3, help="steps that are profiled on a GPU")
    return parser


def compare(place: Place, options: argparse.Namespace) -> dict[str, list[Row]]:
    rows, ratios = [], []
    for case in options.cases:
        found = _compare_case(case, place, options)
        against = tables.ratios(found, FIGURES)
        tables.show(place, f"{case}, {place}", found, COLUMNS)
        tables.show_ratios(place, against, FIGURES)
        rows += found
        ratios += [{"case": str(case), **each} for each in against]
    return {"rows": rows, "ratios": ratios}


def _compare_case(case: Case, place: Place, options: argparse.Namespace) -> list[Row]:
    base: Row = {"copies": 0, "copied_mib": 0.0, "copying": 0.0}
    casts = _casts(case, place) if place.on_gpu else 0.0
    rows = []
    for side in sides.with_unsharded(options.sides):
        part = ParamGroup(case, side)
        with part.attempt():
            part.row |= _look(side, case, place, options)
            if side == "unsharded":
                base = dict(part.row)
            part.row |= {name: part.row[name] - base[name] for name in ("copies", "copied_mib")}
            if place.on_gpu:
                part.row["copying"] -= base["copying"]
                part.row["beyond"] = 0.0 if side == "unsharded" else part.row["copying"] - casts
                part.row["share"] = part.row["beyond"] / part.row["device"]
        measure.release(place)
        rows.append(part.row)
    return rows


def _look(side: str, case: Case, place: Place, options: argparse.Namespace) -> Row:
    training = sides.start(side, case, place)
    for _ in range(options.warmup):
        training.step()
    seen = traffic.of_step(training)
    kinds = Counter(call.kind for call in seen.calls)
    row: Row = {"gathers": kinds["gather"], "reductions": kinds["reduce_scatter"] + kinds["all_reduce"]}
    row["others"] = len(seen.calls) - row["gathers"] - row["reductions"]
    row["sent_mib"] = sum(call.size for call in seen.calls) / measure.MIB
    row["copies"], row["copied_mib"] = sum(seen.copies.values()), seen.copied / measure.MIB
    row["copies_by_operation"] = dict(seen.copies)
    if place.on_gpu:
        training.step()
        events = _profiled(training.step, place, options.steps)
        times = {kind: time / options.steps for kind, time in traces.device_time(events).items()}
        row |= {"device": sum(times.values()), "copying": times["copies"], "collectives": times["collectives"]}
        if place.kind == "nccl" and place.world > 1:
            row |= {kind: time / options.steps for kind, time in traces.nccl_time(events).items()}
    return row


def _profiled(work: Callable[[], None], place: Place, times: int) -> list[traces.Event]:
    place.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as record:
        for _ in range(times):
            work()
        place.synchronize()
    return traces.events_of(record)


def _casts(case: Case, place: Place) -> float:
    """Milliseconds of device time for the casts of one step: the root is gathered once, every other unit twice."""
    if case.dtype == torch.float32:
        return 0.0
    sizes = unit_sizes(case.build(torch.device("meta")))
    whole = torch.zeros(max(sizes), device=place.device)
    narrow = torch.zeros(max(sizes), device=place.device, dtype=case.dtype)

    def cast() -> None:
        for index, size in enumerate(sizes):
            shard = -(-size // place.world)
            for _ in range(1 if index == len(sizes) - 1 else 2):
                narrow[:shard].copy_(whole[:shard])
            whole[:size].copy_(narrow[:size])

    cast()
    return traces.device_time(_profiled(cast, place, 3))["copies"] / 3


def main(arguments_given: list[str] | None = None) -> None:
    options = arguments().parse_args(arguments_given)
    place = places.chosen(options)
    tables.save(options.json, place, options, **places.run(place, compare, options))


if __name__ == "__main__":
    main()
