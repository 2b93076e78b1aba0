"""The time and memory of a training step, side by side.

    python -m benchmarks.step --cases 100m:1x512,1b:1x1024,1b:4x2048       # a GPU as one rank of a simulated job of 8
    python -m benchmarks.step --place nccl --cases 1b:1x1024,small:1x64    # a GPU as the only rank
    python -m benchmarks.step --place nccl --world 4 --cases 100m:8x1024   # four ranks on as many GPUs, or on one
    python -m benchmarks.step --place gloo --cases 10m:1x128:fp32,10m:1x1:bf16   # two CPU processes
    python -m benchmarks.step --cases 1b:1x1024 --sides unshard,unshard-watched --interleave --rounds 40   # watch

The sides take turns in every round; figures are medians over all rounds, in milliseconds and MiB. `host` is the time
Python is busy in forward and backward, `added` what of it the unsharded side does not need, `device` the time between
events on the GPU around both, `net` the step without the host time of the simulated ranks. Ratios are medians of those
of the rounds: a machine that changes its pace does so for all sides of a round, if rounds are short. The peak is
measured first, one side at a time (see `benchmarks.memory`). `tokens/s` counts the tokens of all ranks that really run.
Compare within one run only. `python -m benchmarks.picture steps.svg FIGURES.json ...` draws what `--json` has written.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable

from . import measure, places, sides, tables
from .command import ParamGroup, parser_for
from .models import Case
from .places import Place
from .sides import Training
from .tables import Row

COLUMNS = {"case": "case", "side": "side", "wall": "wall ms", "wall_least": "least", "net": "net"}
COLUMNS |= {"device": "device f+b"}
COLUMNS |= {
    "host": "host f+b",
    "forward": "forward",
    "backward": "backward",
    "added": "added",
    "optimizer": "optimizer",
}
COLUMNS |= {"peak_mib": "peak MiB", "tokens_per_second": "tokens/s"}
FIGURES = {
    "wall": "wall",
    "net": "net",
    "device": "device",
    "host": "host",
    "added": "added host",
    "optimizer": "optimizer",
}
FIGURES |= {"peak_mib": "peak"}

Times = list[list[dict[str, float]]]  # rounds of steps
Time = Callable[[ParamGroup, Training], None]


def arguments() -> argparse.ArgumentParser:
    parser = parser_for(
        __doc__, cases="100m:1x512,1b:1x1024,1b:4x2048,small:1x64", cpu_cases="10m:1x128:fp32,10m:1x1:bf16"
    )
    parser.add_argument("--rounds", type=int, default=3, help="how often the sides take turns")
    parser.add_argument("--steps", type=int, default=12, help="timed steps of a side per round")
    parser.add_argument("--warmup", type=int, default=5, help="steps before the clock runs")
    parser.add_argument(
        "--interleave",
        action="store_true",
        help="build all sides once and keep them, instead of one at a time: quicker, if they fit together",
    )
    return parser


def compare(place: Place, options: argparse.Namespace) -> dict[str, list[Row]]:
    rows, ratios = [], []
    if not hasattr(options, "peaks"):
        options.peaks = peaks(place, options)
    for case in options.cases:
        found = _compare_case(case, place, options)
        against = tables.ratios(found, FIGURES)
        _by_round(against, found)
        tables.show(place, f"{case}, {place}", found, COLUMNS)
        tables.show_ratios(place, against, FIGURES)
        rows += found
        ratios += [{"case": str(case), **each} for each in against]
    return {"rows": rows, "ratios": ratios}


def peaks(place: Place, options: argparse.Namespace) -> dict[tuple[Case, str], float]:
    """MiB of each side by itself. One that fails here will fail again when it is timed, and be reported then."""
    found = {}
    for case in options.cases:
        for side in options.sides:
            with ParamGroup(case, side).attempt():
                bytes_held = measure.peak(place, lambda case=case, side=side: sides.start(side, case, place))
                found[case, side] = bytes_held["peak"] / measure.MIB
    return found


def _compare_case(case: Case, place: Place, options: argparse.Namespace) -> list[Row]:
    parts = [ParamGroup(case, side) for side in options.sides]
    for part in parts:
        part.row["peak_mib"] = options.peaks.get((case, part.side))
    times: dict[str, Times] = {part.side: [] for part in parts}

    def time(part: ParamGroup, training: Training) -> None:
        with part.attempt(), training.observed():
            for _ in range(2):  # the caches may hold another side
                training.step()
            with measure.quiet():
                times[part.side].append([measure.timed_step(training, place) for _ in range(options.steps)])

    (_kept if options.interleave else _one_at_a_time)(parts, case, place, options, time)
    for part in parts:
        if not part.failed:
            part.row |= _summary(times[part.side])
            ranks = place.world if place.has_other_ranks else 1
            part.row["tokens_per_second"] = ranks * case.samples * case.length / part.row["wall"] * measure.MS
    _add_added([part.row for part in parts if not part.failed])
    return [part.row for part in parts]


def _summary(rounds: Times) -> Row:
    everything = [step for steps in rounds for step in steps]
    row: Row = dict(measure.medians(everything))
    row["wall_least"] = min(step["wall"] for step in everything)
    row["host"] = row["forward"] + row["backward"]
    row["rounds"] = [measure.medians(steps) for steps in rounds]
    for each in row["rounds"]:
        each["host"] = each["forward"] + each["backward"]
    return row


def _one_at_a_time(parts: list[ParamGroup], case: Case, place: Place, options: argparse.Namespace, time: Time) -> None:
    """Each side alone, from its beginning, in each round."""
    for number in range(options.rounds):
        for part in turned(parts, number):
            training = _warm(part, case, place, options.warmup)
            if training is not None:
                time(part, training)
            del training  # before the next one is built
            measure.release(place)


def _kept(parts: list[ParamGroup], case: Case, place: Place, options: argparse.Namespace, time: Time) -> None:
    """All sides side by side."""
    trainings: dict[str, Training | None] = {}
    for part in sorted(parts, key=lambda part: part.side in sides.PEER_OF_OURS):
        peer = trainings.get(sides.PEER_OF_OURS.get(part.side, ""))
        trainings[part.side] = _warm(part, case, place, options.warmup) if peer is None else sides.watched(peer)
    for number in range(options.rounds):
        for part in turned(parts, number):
            training = trainings[part.side]
            if training is not None and not part.failed:
                time(part, training)
    del training, peer
    trainings.clear()
    measure.release(place)


def turned(parts: list[ParamGroup], number: int) -> list[ParamGroup]:
    """Every round begins with another side: what comes first after a pause may run on a cooler machine."""
    first = number % len(parts)
    return parts[first:] + parts[:first]


def _warm(part: ParamGroup, case: Case, place: Place, steps: int) -> Training | None:
    if part.failed:
        return None
    with part.attempt():
        training = sides.start(part.side, case, place)
        for _ in range(steps):
            training.step()
        place.synchronize()
        return training
    return None


def _add_added(rows: list[Row]) -> None:
    """The host time that the unsharded side does not need."""
    base = next((row for row in rows if row["side"] == "unsharded"), None)
    for row in rows:
        if base is not None and row is not base:
            row["added"] = row["host"] - base["host"]
            for mine, bases in zip(row["rounds"], base["rounds"], strict=True):
                mine["added"] = mine["host"] - bases["host"]


def _by_round(ratios: list[Row], rows: list[Row]) -> None:
    """Medians of the ratios of the rounds; of the whole step also the smallest and largest."""
    rounds = {row["side"]: row.get("rounds", []) for row in rows}
    for row in ratios:
        pairs = list(zip(rounds[row["side"]], rounds[row["peer"]], strict=True))
        for name in FIGURES:
            each = [ours[name] / theirs[name] for ours, theirs in pairs if theirs.get(name)]
            if each:
                row[name] = statistics.median(each)
        walls = [ours["wall"] / theirs["wall"] for ours, theirs in pairs]
        row["wall_spread"] = [min(walls), max(walls)]


def main(arguments_given: list[str] | None = None) -> None:
    options = arguments().parse_args(arguments_given)
    place = places.chosen(options)
    if place.for_memory() != place:
        options.peaks = places.run(place.for_memory(), peaks, options)
    tables.save(options.json, place, options, **places.run(place, compare, options))


if __name__ == "__main__":
    main()
