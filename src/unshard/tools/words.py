"""Dtypes, names of units and tables as a reader of a log wants them: short."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

NOTHING = "-"


def short(dtype: torch.dtype | None, otherwise: str = NOTHING) -> str:
    """bf16, fp32, int64, fp8_e4m3fn; `otherwise` for no dtype."""
    if dtype is None:
        return otherwise
    if dtype == torch.uint8:
        return "bytes"  # several dtypes in one collective
    name = str(dtype).removeprefix("torch.")
    return name.replace("bfloat", "bf") if name.startswith("bfloat") else name.replace("float", "fp")


def shorts(dtypes: Iterable[torch.dtype], otherwise: str = NOTHING) -> str:
    return "+".join(sorted({short(dtype) for dtype in dtypes})) or otherwise


def quoted(names: Sequence[str], most: int = 3) -> str:
    """A few names, in the order given, and how many more there are."""
    names = list(dict.fromkeys(names))
    shown = ", ".join(repr(name) for name in names[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"


def unit_title(name: str) -> str:
    return name or "(root)"


def titles(names: Sequence[str]) -> str:
    """Units that are shown as one: blocks.0 … blocks.15 (16 units)."""
    shown = [unit_title(name) for name in names]
    if len(shown) <= 2:
        return " and ".join(shown)
    return f"{shown[0]} … {shown[-1]} ({len(shown)} units)"


def table(head: Sequence[str], rows: Sequence[Sequence[str]], numbers: Iterable[int] = ()) -> list[str]:
    """Columns as wide as they must be; those in `numbers` end on the same place."""
    lines, right = [list(head), *(list(row) for row in rows)], set(numbers)
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    laid = [
        "  ".join(
            cell.rjust(width) if column in right else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    ]
    return [laid[0], "  ".join("-" * width for width in widths), *laid[1:]]
