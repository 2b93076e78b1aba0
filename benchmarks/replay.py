"""A whole training step as it is, and replayed as a CUDA graph, side by side.

    python -m benchmarks.replay --cases 100m:1x512,1b:1x1024,1b:4x2048             # one rank of a simulated job of 8
    python -m benchmarks.replay --place nccl --world 2 --cases 100m:1x512          # real ranks

Sides of unshard are recorded by `unshard.capture`, the others by hand with `torch.cuda.graph`. `step` is the time until
the device is done, `host` the time until Python goes on, both medians, in milliseconds; `reserved` is the memory that
the allocator has, after steps as they are and after the recording. Needs a GPU.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch

from . import measure, places, sides, tables
from .command import ParamGroup, parser_for
from .models import Case
from .places import Place
from .sides import OURS, Training
from .tables import Row

COLUMNS = {"case": "case", "side": "side", "eager": "step ms", "eager_host": "host", "replayed": "replayed step"}
COLUMNS |= {"replayed_host": "host", "drift": "drift", "eager_mib": "reserved MiB", "replayed_mib": "replayed"}


def arguments() -> argparse.ArgumentParser:
    parser = parser_for(__doc__, cases="100m:1x512,1b:1x1024,1b:4x2048", cpu_cases="10m:1x128:fp32")
    parser.add_argument("--steps", type=int, default=12, help="timed steps, as they are and replayed")
    parser.add_argument("--endurance", type=int, default=0, help="replays after that, to see whether they get slower")
    return parser


def compare(place: Place, options: argparse.Namespace) -> dict[str, list[Row]]:
    rows = []
    for case in options.cases:
        parts = [ParamGroup(case, side) for side in options.sides]
        for part in parts:
            with part.attempt():
                part.row |= _measured(case, part.side, place, options)
            measure.release(place)
        found = [part.row for part in parts]
        tables.show(place, f"{case}, {place}", found, COLUMNS)
        tables.show_ratios(place, _ratios(found), {name: name for name in ("unsharded eager", *_PEERS)})
        rows += found
    return {"rows": rows}


_PEERS = ("unsharded replayed", "fsdp2 replayed", "own eager", "own reserved")


def _ratios(rows: list[Row]) -> list[Row]:
    """Of replayed steps to the steps that they are compared with."""
    by_side = {row["side"]: row for row in rows if "error" not in row}
    unsharded, fsdp2, found = by_side.get("unsharded"), by_side.get("fsdp2"), []
    for side, row in by_side.items():
        ratio: Row = {"side": side, "peer": "as named"}
        if unsharded is not None:
            ratio["unsharded eager"] = row["replayed"] / unsharded["eager"]
            ratio["unsharded replayed"] = row["replayed"] / unsharded["replayed"]
        if fsdp2 is not None:
            ratio["fsdp2 replayed"] = row["replayed"] / fsdp2["replayed"]
        ratio["own eager"] = row["replayed"] / row["eager"]
        ratio["own reserved"] = row["replayed_mib"] / row["eager_mib"]
        found.append(ratio)
    return found


def _measured(case: Case, side: str, place: Place, options: argparse.Namespace) -> Row:
    training = sides.start(side, case, place)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(5):
            training.step()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        eager = _timed(training.step, place, options.steps)
        row = {"eager": eager[0], "eager_host": eager[1], "eager_mib": torch.cuda.memory_reserved() / measure.MIB}
    torch.cuda.current_stream().wait_stream(stream)
    replay = _recorded(training, side, stream)
    replayed = _timed(replay, place, options.steps)
    row |= {"replayed": replayed[0], "replayed_host": replayed[1]}
    row["replayed_mib"] = torch.cuda.memory_reserved() / measure.MIB
    if options.endurance:
        _timed(replay, place, options.endurance)
        row["drift"] = _timed(replay, place, options.steps)[0] / replayed[0]
    return row


def _recorded(training: Training, side: str, stream: torch.cuda.Stream) -> Callable[[], object]:
    if side in OURS:
        from unshard import capture

        step = capture(training.step, training.model, training.optimizer)
        for _ in range(5):
            step()
        assert step.recordings == 1
        return step
    for group in training.optimizer.param_groups:
        group["capturable"] = True
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        training.step()
    return graph.replay


def _timed(step: Callable[[], object], place: Place, count: int) -> tuple[float, float]:
    """Milliseconds of a step until the device is done, on the slowest rank, and until the host goes on."""
    walls, hosts = [], []
    with measure.quiet():
        for _ in range(count):
            place.meet()
            began = time.perf_counter()
            step()
            hosts.append((time.perf_counter() - began) * measure.MS)
            place.synchronize()
            walls.append(place.slowest((time.perf_counter() - began) * measure.MS))
    return statistics.median(walls), statistics.median(hosts)


def main(arguments_given: list[str] | None = None) -> None:
    options = arguments().parse_args(arguments_given)
    place = places.chosen(options)
    if not place.on_gpu:
        raise SystemExit("benchmarks.replay needs a GPU: CUDA graphs are what it measures.")
    tables.save(options.json, place, options, **places.run(place, compare, options))


if __name__ == "__main__":
    main()
