"""What is printed and written: tables, ratios between sides, and a JSON file with everything."""

from __future__ import annotations

import argparse
import json
import platform
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

import unshard

from .places import Place
from .sides import OURS, PEER_OF_OURS, PEERS

Row = dict[str, Any]


def failure(error: BaseException) -> str:
    """The first line of what went wrong: a side that fails is a row of the table."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:160]}"


def show(place: Place, title: str, rows: Iterable[Row], columns: Mapping[str, str]) -> None:
    """Print rows as a table: `columns` maps keys of a row to headings with their unit. A missing figure is a dash."""
    if not place.speaks:
        return
    lines = [list(columns.values())]
    for row in rows:
        if "error" in row:
            known = [_text(row[key]) for key in columns if key in row]
            lines.append([*known, row["error"]])
        else:
            lines.append([_text(row.get(key)) for key in columns])
    complete = [line for line in lines if len(line) == len(columns)]
    widths = [max(len(line[place]) for line in complete) for place in range(len(columns))]
    texts = [column for column in range(len(columns)) if any(_words(line[column]) for line in complete[1:])]
    print(f"\n{title}", flush=True)
    for line in lines:
        if len(line) != len(columns):
            print("  " + "  ".join(line))
            continue
        cells = [
            cell.ljust(w) if i in texts else cell.rjust(w) for i, (cell, w) in enumerate(zip(line, widths, strict=True))
        ]
        print("  " + "  ".join(cells).rstrip(), flush=True)


def _text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.3f}" if abs(value) < 1 else f"{value:.2f}" if abs(value) < 100 else f"{value:.0f}"
    return "-" if value is None else str(value)


def _words(cell: str) -> bool:
    return any(letter.isalpha() for letter in cell)


def ratios(rows: Sequence[Row], figures: Mapping[str, str]) -> list[Row]:
    """Ours divided by each peer, for rows of one case. `figures` maps keys to what they are called."""
    by_side = {row["side"]: row for row in rows if "error" not in row}
    found = []
    for ours in OURS:
        for peer in (*PEERS, PEER_OF_OURS.get(ours)):
            if ours in by_side and peer in by_side:
                pairs = {key: (by_side[ours].get(key), by_side[peer].get(key)) for key in figures}
                values = {key: a / b for key, (a, b) in pairs.items() if a is not None and b is not None and b > 0}
                found.append({"side": ours, "peer": peer, **values})
    return found


def show_ratios(place: Place, rows: Sequence[Row], figures: Mapping[str, str]) -> None:
    if not place.speaks:
        return
    for row in rows:
        digits = 3 if row["side"] in PEER_OF_OURS else 2
        parts = ", ".join(f"{name} {row[key]:.{digits}f}x" for key, name in figures.items() if key in row)
        spread = row.get("wall_spread")
        parts += f" (wall by round {spread[0]:.{digits}f}-{spread[1]:.{digits}f}x)" if spread else ""
        print(f"  {row['side']} / {row['peer']}: {parts}", flush=True)


def environment(place: Place) -> Row:
    """Where figures come from: the device, the ranks and the versions."""
    found: Row = {"place": str(place), "world": place.world, "python": platform.python_version()}
    found |= {"unshard": unshard.__version__, "torch": torch.__version__}
    found["device"] = torch.cuda.get_device_name(0) if place.on_gpu else "CPU"
    if place.on_gpu:
        found |= {"cuda": torch.version.cuda, "nccl": ".".join(map(str, torch.cuda.nccl.version()))}
    return found


def save(path: str | None, place: Place, options: argparse.Namespace, **content: Any) -> None:
    if path is None or not place.speaks:
        return
    settings = {name: str(value) for name, value in vars(options).items() if name != "peaks"}
    with open(path, "w") as file:
        json.dump({"environment": environment(place), "options": settings, **content}, file, indent=1)
        file.write("\n")
