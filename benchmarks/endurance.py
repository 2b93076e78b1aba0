"""Whether anything grows over many steps: Python objects, memory, the time of a step; side by side.

    python -m benchmarks.endurance --steps 1000                   # a GPU as one rank of a simulated job of 8
    python -m benchmarks.endurance --place gloo --cases tiny:1x32:fp32 --steps 200

Objects are what the garbage collector knows after a collection. Memory is what the device's allocator has given out
between two steps; on a CPU it is that of the whole process, with all that its allocator keeps. `drift` is the median
time of the last tenth of the steps over that of the first, divided by what the machine itself did in between: `pace`
is the same ratio for a loop of small operations that always do the same.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import time

import torch

from . import measure, places, sides, tables
from .command import ParamGroup, parser_for
from .models import Case
from .places import Place
from .tables import Row

COLUMNS = {"case": "case", "side": "side", "steps": "steps", "objects": "objects", "more_objects": "more"}
COLUMNS |= {"memory_mib": "memory MiB", "more_mib": "more", "first": "first ms", "last": "last ms", "pace": "pace"}
COLUMNS |= {"drift": "drift"}
FIGURES = {"first": "first", "last": "last"}


def arguments() -> argparse.ArgumentParser:
    parser = parser_for(__doc__, cases="10m:1x128", cpu_cases="tiny:1x32:fp32")
    parser.add_argument("--steps", type=int, default=1000, help="steps that are counted")
    parser.add_argument("--warmup", type=int, default=20, help="steps before anything is counted")
    return parser


def compare(place: Place, options: argparse.Namespace) -> dict[str, list[Row]]:
    rows, ratios = [], []
    for case in options.cases:
        found = []
        for side in options.sides:
            part = ParamGroup(case, side)
            with part.attempt():
                part.row |= _endure(side, case, place, options)
            measure.release(place)
            found.append(part.row)
        against = tables.ratios(found, FIGURES)
        tables.show(place, f"{case}, {place}", found, COLUMNS)
        tables.show_ratios(place, against, FIGURES)
        rows += found
        ratios += [{"case": str(case), **each} for each in against]
    return {"rows": rows, "ratios": ratios}


def _endure(side: str, case: Case, place: Place, options: argparse.Namespace) -> Row:
    training = sides.start(side, case, place)
    for _ in range(options.warmup):
        training.step()
    pace = Pace(place)
    times, paces = [0.0] * options.steps, [0.0] * options.steps  # before the count: they are not to be found in it
    before = _counted(place)
    for number in range(options.steps):
        place.meet()
        began = time.perf_counter()
        training.step()
        place.synchronize()
        ended = time.perf_counter()
        pace.run()
        times[number], paces[number] = ended - began, time.perf_counter() - ended
    after = _counted(place)
    tenth = max(1, options.steps // 10)
    first, last = statistics.median(times[:tenth]) * measure.MS, statistics.median(times[-tenth:]) * measure.MS
    slower = statistics.median(paces[-tenth:]) / statistics.median(paces[:tenth])
    row = {"steps": options.steps, "objects": before[0], "more_objects": after[0] - before[0]}
    row |= {"memory_mib": before[1] / measure.MIB, "more_mib": (after[1] - before[1]) / measure.MIB}
    return {**row, "first": first, "last": last, "pace": slower, "drift": last / first / slower}


class Pace:
    """The same few milliseconds of small operations after every step: how fast the machine is at the moment."""

    def __init__(self, place: Place):
        self._place = place
        self._tensor = torch.ones(64, device="cuda" if place.on_gpu else "cpu")

    def run(self) -> None:
        for _ in range(200):
            self._tensor.mul_(1.0)
        self._place.synchronize()


def _counted(place: Place) -> tuple[int, int]:
    place.synchronize()
    gc.collect()
    return len(gc.get_objects()), _held(place)


def _held(place: Place) -> int:
    if place.on_gpu:
        return torch.cuda.memory_allocated()
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def main(arguments_given: list[str] | None = None) -> None:
    options = arguments().parse_args(arguments_given)
    place = places.chosen(options)
    tables.save(options.json, place, options, **places.run(place, compare, options))


if __name__ == "__main__":
    main()
