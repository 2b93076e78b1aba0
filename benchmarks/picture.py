"""Bars of host and device times, as an SVG file."""

from __future__ import annotations

from pathlib import Path

from .tables import Row

WIDTH, LEFT, ROW, BAR = 760, 230, 44, 14
COLOURS = {"step": "#4c78a8", "host": "#f58518"}


def draw(path: str, rows: list[Row]) -> None:
    """Two rows for each side of each case, as it is and replayed: the step, and below it the time of the host."""
    bars = []
    for row in (each for each in rows if "error" not in each):
        name = f"{str(row['case']).removesuffix(':bf16')} {row['side']}"
        bars.append((name, row["eager"], row["eager_host"]))
        bars.append((f"{name}, replayed", row["replayed"], row["replayed_host"]))
    longest = max(step for _, step, _ in bars)
    scale = (WIDTH - LEFT - 70) / longest
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{ROW * len(bars) + 40}" '
        'font-family="sans-serif" font-size="12">',
        '<rect width="100%" height="100%" fill="white"/>',
    ]
    for number, (name, step, host) in enumerate(bars):
        top = 10 + ROW * number
        lines.append(f'<text x="{LEFT - 8}" y="{top + BAR + 4}" text-anchor="end">{name}</text>')
        for offset, kind, value in ((0, "step", step), (BAR + 2, "host", host)):
            lines.append(
                f'<rect x="{LEFT}" y="{top + offset}" width="{max(1.0, value * scale):.1f}" height="{BAR}" '
                f'fill="{COLOURS[kind]}"/>'
            )
            at = LEFT + value * scale + 5
            lines.append(f'<text x="{at:.1f}" y="{top + offset + 11}" font-size="11">{value:.1f} ms</text>')
    foot = 10 + ROW * len(bars) + 16
    for number, (kind, colour) in enumerate(COLOURS.items()):
        x = LEFT + 170 * number
        text = "until the device is done" if kind == "step" else "until Python goes on"
        lines.append(f'<rect x="{x}" y="{foot - 10}" width="10" height="10" fill="{colour}"/>')
        lines.append(f'<text x="{x + 15}" y="{foot}">{text}</text>')
    Path(path).write_text("\n".join([*lines, "</svg>"]) + "\n")
