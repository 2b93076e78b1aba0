"""Draws what other commands have written with `--json`, as an SVG file with colors for light and dark.

    python -m benchmarks.picture steps.svg two_ranks.json four_ranks.json    # of benchmarks.step
    python -m benchmarks.picture replayed.svg replay.json                    # of benchmarks.replay
    python -m benchmarks.picture convergence.svg convergence.json            # of benchmarks.convergence
    python -m benchmarks.picture trace.svg trace.json.gz                     # of benchmarks.trace

Each file of `benchmarks.step` is a group of bars. `--case 100m:1x512` chooses one of several cases.
"""

from __future__ import annotations

import argparse
import gzip
import json
import math
import runpy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .tables import Row

Picture: Any = runpy.run_path(str(Path(__file__).parents[1] / "docs" / "site" / "pictures.py"))["Picture"]

WIDTH = 760
SIDES = {
    "unsharded": ("#9aa3ad", "#7b8591"),
    "FSDP2": ("#e08a2b", "#f0a650"),
    "FSDP1": ("#8a6bb1", "#b39bd6"),
    "unshard": ("#2f6fb5", "#6fb0f0"),
}
KINDS = {
    "compute": ("#4c78a8", "#6fa0d8"),
    "all-gather": ("#e08a2b", "#f0a650"),
    "reduce-scatter": ("#3c9d7c", "#5fc3a0"),
    "copies": ("#d1495b", "#ef7f8b"),
    "forward": ("#b8bec6", "#59636e"),
    "backward": ("#9aa3ad", "#6e7884"),
    "optimizer": ("#7d8791", "#8b949e"),
    "collective call": ("#1f2328", "#e6edf3"),
}


def machine(environment: Row) -> str:
    """Where figures come from, for the small print."""
    nccl = f", NCCL {environment['nccl']}" if environment.get("nccl") else ""
    return f"{environment['place']}; torch {environment['torch']}{nccl}, unshard {environment['unshard']}"


def _named(side: str) -> str:
    return side.replace("fsdp", "FSDP")


def _ticks(low: float, high: float) -> list[float]:
    """About four round numbers from `low` to `high`."""
    rough = (high - low) / 4
    unit = 10 ** math.floor(math.log10(rough))
    step = next(unit * each for each in (1, 2, 2.5, 5, 10) if unit * each >= rough)
    return [step * number for number in range(math.ceil(low / step), math.floor(high / step) + 1)]


def _described(case: str) -> str:
    size, batch, dtype = case.split(":")
    return f"a decoder of {size.upper()} parameters, {dtype}, {batch.replace('x', ' x ')} tokens per rank"


def _legend(picture: Any, x: float, y: float, kinds: Sequence[str]) -> None:
    for kind in kinds:
        picture.box(x, y - 10, 11, 11, kind)
        picture.text(x + 17, y, kind, "small")
        x += 42 + 7.4 * len(kind)


# -- bars --------------------------------------------------------------------------------------------------------------

Bars = list[tuple[str, str, float]]  # a label, a kind and a value


def _bars(picture: Any, x: float, y: float, width: float, title: str, groups: dict[str, Bars], digits: int) -> float:
    """Draw horizontal bars, and return where the next may begin."""
    left = x + 8 * max(len(label) for bars in groups.values() for label, *_ in bars)
    scale = (x + width - left - 70) / max(value for bars in groups.values() for *_, value in bars)
    picture.text(x, y, title, "bold")
    y += 10
    for name, bars in groups.items():
        picture.text(x, y + 16, name, "small")
        y += 24
        for label, kind, value in bars:
            picture.text(left, y + 14, label, "small right")
            picture.box(left + 8, y + 2, max(1.0, value * scale), 16, kind)
            picture.text(left + 14 + value * scale, y + 14, f"{value:,.{digits}f}", "small")
            y += 21
        y += 6
    return y + 20


def steps(found: list[Row]) -> Any:
    """Step time and peak memory of each side: a group of bars for each file."""
    first = found[0]["rows"][0]["case"]
    picture = Picture(f"Time and peak memory of a training step, {first}", WIDTH, SIDES)
    groups: dict[str, list[Row]] = {}
    for each in found:
        rows = [row for row in each["rows"] if row["case"] == first and "error" not in row]
        groups[f"{each['environment']['world']} ranks"] = [row for row in rows if _named(row["side"]) in SIDES]
    picture.text(16, 28, f"One training step: {_described(first)}", "bold")
    for x, title, name in (
        (16, "Time of a step, ms", "wall"),
        (WIDTH / 2 + 8, "Peak memory of a rank, MiB", "peak_mib"),
    ):
        bars = {
            key: [(_named(row["side"]), _named(row["side"]), row[name]) for row in rows] for key, rows in groups.items()
        }
        y = _bars(picture, x, 62, WIDTH / 2 - 24, title, bars, 0)
    return _signed(picture, y, [machine(each["environment"]) for each in found])


def replay(found: list[Row]) -> Any:
    """Two bars for each side of each case, eager and replayed: the step, and below it the time of the host."""
    colors = {"until the device is done": KINDS["compute"], "until Python goes on": KINDS["all-gather"]}
    picture = Picture("Time of a step and of its host work", WIDTH, colors)
    device, host = colors
    groups: dict[str, Bars] = {}
    for row in (each for each in found[0]["rows"] if "error" not in each):
        bars = groups.setdefault(str(row["case"]).removesuffix(":bf16"), [])
        for name, key in (("", "eager"), (", replayed", "replayed")):
            bars += [(_named(row["side"]) + name, device, row[key]), ("", host, row[f"{key}_host"])]
    y = _bars(picture, 16, 28, WIDTH - 32, "Time of a step, ms", groups, 1)
    _legend(picture, 16, y - 6, [device, host])
    return _signed(picture, y + 20, [machine(found[0]["environment"])])


def _signed(picture: Any, y: float, machines: Sequence[str]) -> Any:
    for number, text in enumerate(dict.fromkeys(machines)):
        picture.text(16, y + 17 * number, text, "small")
    return picture


# -- curves ------------------------------------------------------------------------------------------------------------


def convergence(found: list[Row]) -> Any:
    """Losses of both sides over each other: a panel for each precision."""
    rows, environment = found[0]["convergence"], found[0]["environment"]
    picture = Picture("Training losses of FSDP2 and unshard", WIDTH, SIDES)
    precisions = list(dict.fromkeys(row["precision"] for row in rows))
    seeds = len({row["seed"] for row in rows})
    picture.text(
        16, 28, f"Loss by step, {seeds} seed{'s' if seeds > 1 else ''}: unshard (wide) and FSDP2 (thin, on top)", "bold"
    )
    wide, top, bottom = (WIDTH - 60) / len(precisions), 66.0, 250.0
    values = [loss for row in rows for losses in row["losses"].values() for loss in losses if math.isfinite(loss)]
    low, high = min(values) * 0.95, max(values) * 1.02
    last = max(row["steps"][-1] for row in rows)
    for number, precision in enumerate(precisions):
        left = 48 + number * wide
        picture.text(left, top - 10, precision, "bold")
        for tick in _ticks(low, high):
            y = bottom - (tick - low) / (high - low) * (bottom - top)
            if top <= y <= bottom:
                picture.line((left, y), (left + wide - 18, y), style="grid")
                if number == 0:
                    picture.text(left - 6, y + 5, f"{tick:g}", "small right")
        for tick in _ticks(0, last)[::2]:
            picture.text(
                left + tick / last * (wide - 18),
                bottom + 18,
                f"{tick:,.0f}",
                "small" if not tick else "small right" if tick == last else "small middle",
            )
        mine = [row for row in rows if row["precision"] == precision]
        for side, width, opacity in (("unshard", 5, 0.45), ("fsdp2", 1.2, 1)):
            for row in mine:
                pairs = zip(row["steps"], row["losses"][side], strict=True)
                points = [
                    (left + step / last * (wide - 18), bottom - (loss - low) / (high - low) * (bottom - top))
                    for step, loss in pairs
                    if math.isfinite(loss)
                ]
                picture.curve(points, _named(side), width, opacity)
        picture.text(left, bottom + 42, _difference(mine), "small")
    _legend(picture, 48, bottom + 68, ["FSDP2", "unshard"])
    return _signed(
        picture, bottom + 94, ["Loss in nats per byte, mean of all ranks, at every tenth step.", machine(environment)]
    )


def _difference(rows: list[Row]) -> str:
    if all(row["same_losses"] for row in rows):
        return "bitwise identical"
    return f"differ by up to {max(row['difference'] for row in rows):.1e}"


# -- rows of a trace ---------------------------------------------------------------------------------------------------


def trace(found: list[Row]) -> Any:
    """Both steps on one axis of time: a row for the CPU and one for each stream."""
    events, environment = found[0]["traceEvents"], found[0]["environment"]
    picture = Picture("One training step of FSDP2 and one of unshard", WIDTH, KINDS)
    picture.text(16, 28, f"One training step: {_described(found[0]['case'])}", "bold")
    left, y = 130.0, 46.0
    spans = [each for each in events if each["ph"] == "X"]
    last = max(each["ts"] + each["dur"] for each in spans)
    scale, top = (WIDTH - 16 - left) / last, y
    for side in sorted({each["pid"] for each in events}):
        names = {
            (each["name"], each.get("tid")): each["args"].get("name")
            for each in events
            if each["pid"] == side and each["ph"] == "M"
        }
        mine = [each for each in spans if each["pid"] == side]
        end = max(each["ts"] + each["dur"] for each in mine)
        plain = found[0]["rows"][side]["step"]
        title = f"{names['process_name', None]}: {end / 1e3:.1f} ms with the profiler, {plain:.1f} ms without"
        picture.text(16, y + 18, title, "bold")
        y += 26
        for tid in sorted({each["tid"] for each in mine}):
            picture.text(left - 8, y + 15, names["thread_name", tid], "small right")
            picture.box(left, y, WIDTH - 16 - left, 20, "empty")
            for kind, begin, end in _joined([each for each in mine if each["tid"] == tid], 0.4 / scale):
                top_of, high = (y + 12, 8) if kind == "collective call" else (y, 20)
                picture.box(left + begin * scale, top_of, max(0.4, (end - begin) * scale), high, kind, 0)
            y += 24
        y += 8
    for tick in _ticks(0, last / 1e3):
        x = left + tick * 1e3 * scale
        picture.line((x, top + 26), (x, y), style="grid")
        picture.text(x, y + 16, f"{tick:g}", "small middle")
    picture.text(left - 8, y + 16, "ms", "small right")
    _legend(picture, 16, y + 44, list(KINDS)[:4])
    _legend(picture, 16, y + 66, [*KINDS][4:])
    return _signed(picture, y + 92, [machine(environment)])


def _joined(spans: list[Row], gap: float) -> list[tuple[str, float, float]]:
    """Spans of a row in the order of their begin. Those of one kind with less than `gap` between them are one."""
    found: list[tuple[str, float, float]] = []
    for each in spans:
        kind, begin, end = each["cat"], each["ts"], each["ts"] + each["dur"]
        if found and found[-1][0] == kind and begin - found[-1][2] < gap:
            found[-1] = kind, found[-1][1], max(found[-1][2], end)
        else:
            found.append((kind, begin, end))
    return found


def draw(found: list[Row], case: str | None = None) -> Any:
    """The picture of what one command has written."""
    if "traceEvents" in found[0]:
        return trace(found)
    if "convergence" in found[0]:
        return convergence(found)
    for each in found:
        each["rows"] = [row for row in each["rows"] if row["case"].startswith(case or "")]
    return replay(found) if any("replayed" in row for row in found[0]["rows"]) else steps(found)


def _read(path: Path) -> Row:
    data = path.read_bytes()
    return json.loads(gzip.decompress(data) if path.suffix == ".gz" else data)


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("picture", type=Path)
    parser.add_argument("figures", type=Path, nargs="+")
    parser.add_argument("--case", help="SIZE:SAMPLESxLENGTH, by default the first of step, and all of replay")
    return parser


def main(arguments_given: list[str] | None = None) -> None:
    options = arguments().parse_args(arguments_given)
    options.picture.write_text(draw([_read(path) for path in options.figures], options.case).svg())


if __name__ == "__main__":
    main()
