"""The parts of a report's page: texts, tables, bars and charts. All text is escaped here."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any

from .precision_report import unit_title

_MOST_POINTS = 3000
"""A chart draws at most about this many points."""


class Markup(str):
    """Text that is HTML already."""


def html_of(value: Any) -> str:
    """Return the escaped text of a value. Lists become several lines, and None becomes a dash."""
    if isinstance(value, Markup):
        return value
    if value is None or value == "" or value == []:
        return "–"  # noqa: RUF001
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return escape(number(value))
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, dict):
        return "; ".join(f"{escape(str(key))} {html_of(each)}" for key, each in value.items())
    if isinstance(value, list | tuple):
        return "<br>".join(html_of(each) for each in value)
    return escape(str(value))


def paragraph(text: str) -> Markup:
    return Markup(f"<p>{escape(text)}</p>")


# -- numbers -----------------------------------------------------------------------------------------------------


def number(value: float | None, digits: int = 4) -> str:
    if value is None:
        return "–"  # noqa: RUF001
    if not math.isfinite(value):
        return str(value)
    return f"{value:,.0f}" if abs(value) >= 10 ** (digits - 1) else f"{value:.{digits}g}"


def size(nbytes: float | None) -> str:
    """Format bytes, for example as 61.2 GiB."""
    if nbytes is None:
        return "–"  # noqa: RUF001
    unit, power = size_unit(nbytes)
    return f"{nbytes / power:,.{0 if power == 1 else 1}f} {unit}"


def size_unit(nbytes: float) -> tuple[str, int]:
    power = min(4, max(0, int(math.log2(abs(nbytes) or 1) / 10)))
    return ("B", "KiB", "MiB", "GiB", "TiB")[power], 1024**power


def ranks_text(ranks: Iterable[int]) -> str:
    """Abbreviate ranks, for example as 0-7, 16."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and runs[-1][1] == rank - 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return ", ".join(str(a) if a == b else f"{a}, {b}" if b == a + 1 else f"{a}-{b}" for a, b in runs)


def count(many: int, thing: str) -> str:
    return f"{many:,} {thing}{'' if many == 1 else 's'}"


# -- tables and bars ---------------------------------------------------------------------------------------------


def table(title: str, head: Sequence[str], rows: Iterable[Sequence[Any]], names: int = 1) -> Markup:
    """Return a table that scrolls inside its box. The first `names` cells of each row are its headers."""
    rows = [list(row) for row in rows]
    columns = list(zip(*rows, strict=True)) or [()] * len(head)
    kinds = [' class="number"' if _are_numbers(column) else "" for column in columns]
    top = "".join(f'<th scope="col"{kind}>{escape(each)}</th>' for kind, each in zip(kinds, head, strict=True))
    tags = [('th scope="row"' if position < names else "td") + kind for position, kind in enumerate(kinds)]
    lines = []
    for row in rows:
        cells = (f"<{tag}>{html_of(cell)}</{tag[:2]}>" for tag, cell in zip(tags, row, strict=True))
        lines.append(f"<tr>{''.join(cells)}</tr>")
    name = escape(title, quote=True)
    return Markup(
        f'<div class="scroll" tabindex="0" role="region" aria-label="{name}"><table><caption>{name}</caption>'
        f"<thead><tr>{top}</tr></thead><tbody>{''.join(lines)}</tbody></table></div>"
    )


_NUMBER = re.compile(r"[+-]?\d[\d,.]*(e[+-]?\d+)?( [KMGT]?i?B|%)?|-?inf|nan|–")  # noqa: RUF001


def _are_numbers(cells: Iterable[Any]) -> bool:
    known = [cell for cell in cells if cell not in (None, "", [])]
    return bool(known) and all(not isinstance(cell, bool) and _NUMBER.fullmatch(str(cell)) for cell in known)


def dict_table(title: str, rows: Sequence[dict[str, Any]], columns: Sequence[str] = ()) -> Markup:
    """Return a table of dicts. Columns that are empty in all rows are left out."""
    keys = dict.fromkeys([*columns, *(key for row in rows for key in row)])
    shown = [key for key in keys if any(row.get(key) not in (None, "", []) for row in rows)]
    return table(title, [key.replace("_", " ") for key in shown], [[row.get(key) for key in shown] for row in rows])


def legend(labels: dict[str, int]) -> Markup:
    """Return the names of colors: `labels` maps names to numbers of colors."""
    items = (f'<li><span class="c{color}"></span>{escape(label)}</li>' for label, color in labels.items())
    return Markup(f'<ul class="legend">{"".join(items)}</ul>')


def bar(values: Sequence[float], full: float, colors: Sequence[int] = (0,)) -> Markup:
    """Return a bar of segments. `full` is the value of a bar that fills its cell."""
    segments = (
        f'<span class="c{color}" style="width:{100 * max(0.0, value) / (full or 1):.2f}%"></span>'
        for value, color in zip(values, colors, strict=True)
    )
    return Markup(f'<div class="bar" aria-hidden="true">{"".join(segments)}</div>')


def tag(good: bool | None, words: tuple[str, str, str] = ("OK", "Problem", "Note")) -> Markup:
    kind = "note" if good is None else "ok" if good else "bad"
    return Markup(f'<span class="tag {kind}">{words[2] if good is None else words[0] if good else words[1]}</span>')


# -- charts ------------------------------------------------------------------------------------------------------


@dataclass
class Charts:
    """The data of a page's charts. The page's script draws them."""

    data: list[dict[str, Any]] = field(default_factory=list)

    def add(
        self,
        title: str,
        words: str,
        x: Sequence[Any],
        series: Mapping[str, Sequence[float | None]],
        *,
        style: str = "line",
        log: bool = False,
        unit: str = "",
        dots: Sequence[str] = (),
        colors: Mapping[str, int] | None = None,
        scale: float = 1,
        mark: tuple[int, str] | None = None,
        limit: tuple[float, str] | None = None,
    ) -> Markup:
        """Return a figure. `words` describes the chart for readers who cannot see it.

        `x` has numbers, or labels of positions. `style` is line, step or area; areas are stacked. Series in `dots` are
        drawn as points. `mark` names a position, and `limit` draws a horizontal line. Values are divided by `scale`.
        """
        keep = _kept(next(iter(series.values()))) if mark is None else list(range(len(x)))
        labels = [str(x[i]) for i in keep] if x and isinstance(x[0], str) else None
        self.data.append(
            {
                "style": style,
                "log": log,
                "unit": unit,
                "x": list(range(len(keep))) if labels else [x[i] for i in keep],
                "labels": labels,
                "series": [
                    {
                        "label": name,
                        "dots": name in dots,
                        "color": (colors or {}).get(name, position),
                        "values": [_finite(values[i], scale) for i in keep],
                    }
                    for position, (name, values) in enumerate(series.items())
                ],
                "mark": mark,
                "limit": limit and [limit[0] / scale, limit[1]],
            }
        )
        heading = title + (f" ({unit})" if unit else "")
        if len(keep) < len(x):
            words += f" The chart shows {len(keep):,} of {len(x):,} points, with the highest and lowest."
        return Markup(
            f'<figure><h3>{escape(heading)}</h3><div class="chart" role="img" data-chart="{len(self.data) - 1}" '
            f'aria-label="{escape(f"{title}. {words}", quote=True)}"></div>'
            f"<figcaption>{escape(words)}</figcaption></figure>"
        )


def _finite(value: float | None, scale: float) -> float | None:
    if value is None or not math.isfinite(value):
        return None  # JSON has no NaN; the chart has a gap here
    return float(f"{value / scale:.6g}")


def _kept(values: Sequence[float | None]) -> list[int]:
    """Return the positions to draw: all, or those of the lowest and highest value in each stretch."""
    if len(values) <= _MOST_POINTS:
        return list(range(len(values)))
    stretch, kept = math.ceil(2 * len(values) / _MOST_POINTS), {0, len(values) - 1}
    for start in range(0, len(values), stretch):
        known = [i for i in range(start, min(start + stretch, len(values))) if _finite(values[i], 1) is not None]
        if known:
            kept |= {min(known, key=values.__getitem__), max(known, key=values.__getitem__)}  # type: ignore[arg-type]
    return sorted(kept)


# -- sections ----------------------------------------------------------------------------------------------------


Found = dict[str, list[dict[str, Any]]]
"""The results of a report by their kind."""

MOST_LINES = 8
"""Charts show at most this many lines, and tables of the largest tensors this many rows."""


@dataclass
class Section:
    name: str
    title: str
    parts: list[Markup] = field(default_factory=list)
    findings: list[tuple[bool | None, str]] = field(default_factory=list)
    """What the top of the page says. True is good, False is a problem, None is only information."""


def of_kinds(found: Found, *kinds: str) -> Iterator[dict[str, Any]]:
    for kind in kinds:
        yield from found.get(kind, [])


def steps_of(steps: Sequence[dict[str, Any]]) -> list[int]:
    return [step["step"] for step in steps]


def title_of(row: dict[str, Any]) -> str:
    return unit_title(str(row.get("unit", row.get("name", ""))))
