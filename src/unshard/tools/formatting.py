"""Dtypes, names of units and tables in the text of reports."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from ..errors import listed

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


def quoted(names: Iterable[str]) -> str:
    """The first distinct names, in the order given, and the number of the others."""
    return listed(map(repr, dict.fromkeys(names)))


def unit_title(name: str) -> str:
    return name or "(root)"


def unit_titles(names: Sequence[str]) -> str:
    """Units in a sentence: unit 'a', units 'a', 'b', 'c' and 4 more."""
    shown = [unit_title(name) for name in names]
    return ("unit " if len(set(shown)) == 1 else "units ") + quoted(shown)


def shared_title(names: Sequence[str]) -> str:
    """Units that have one line in a table: blocks.0 … blocks.15 (16 units)."""
    shown = [unit_title(name) for name in names]
    if len(shown) <= 2:
        return " and ".join(shown)
    return f"{shown[0]} … {shown[-1]} ({len(shown)} units)"


def table(head: Sequence[str], rows: Sequence[Sequence[str]], numbers: Iterable[int] = ()) -> list[str]:
    """The lines of a table; columns in `numbers` are aligned to the right."""
    lines, right = [list(head), *(list(row) for row in rows)], set(numbers)
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    aligned = [
        "  ".join(
            cell.rjust(width) if column in right else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    ]
    return [aligned[0], "  ".join("-" * width for width in widths), *aligned[1:]]
