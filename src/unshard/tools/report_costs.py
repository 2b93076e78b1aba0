"""The sections about memory and time of a report."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .report_parts import (
    MOST_LINES,
    Charts,
    Found,
    Markup,
    Section,
    bar,
    count,
    legend,
    number,
    of_kinds,
    paragraph,
    size,
    size_unit,
    steps_of,
    table,
    title_of,
)

# -- memory ------------------------------------------------------------------------------------------------------


def memory(found: Found, charts: Charts) -> Section | None:
    section = Section("memory", "Memory")
    both = list(of_kinds(found, "plan", "ledger"))
    for each in both:
        measured = each["kind"] == "ledger"
        what, device = "Measured" if measured else "Planned", each.get("device_memory")
        if each.get("peak_at"):
            text = f"{what} peak: {size(each.get('peak'))} per rank, in {each['peak_at']}"
        else:  # a ledger that recorded no step
            text = f"{what} memory, outside a step: {size(each.get('peak'))} per rank"
        fits = each.get("fits")
        text += "" if device is None else f". The device has {size(device)}"
        text += "" if fits is None else ", which is enough" if fits else ", which is too little"
        section.findings.append((fits, text + "."))
        chart = _memory_chart(each, f"{what} memory by kind", text + ".", charts)
        section.parts += chart or [paragraph(text + ".")]
    if both:
        section.parts.append(_memory_rows(both))
        for each in both:
            if each.get("largest"):
                largest = sorted(each["largest"], key=lambda row: -row["bytes"])[: 2 * MOST_LINES]
                rows = [(row["what"], row.get("kind"), size(row["bytes"])) for row in largest]
                section.parts.append(table(f"Largest tensors ({each['kind']})", ("tensor", "kind", "size"), rows))
    section.parts += _allocated(found, charts)
    return section if section.parts else None


_KINDS = ("parameters", "gradients", "optimizer state", "all-gathers", "reductions", "activations", "buffers", "other")
_KIND_COLORS = {kind: color for color, kind in enumerate(_KINDS)}


def _memory_chart(each: dict[str, Any], title: str, text: str, charts: Charts) -> list[Markup]:
    timeline = each.get("timeline") or []
    if len(timeline) < 2:
        return []
    kinds = [key for key in dict.fromkeys(key for at in timeline for key in at) if key != "at"]
    series = {kind: [at.get(kind) or 0 for at in timeline] for kind in kinds}
    series = {kind: values for kind, values in series.items() if any(values)} or {"memory": [0] * len(timeline)}
    sums = [sum(values) for values in zip(*series.values(), strict=True)]
    highest = max(range(len(sums)), key=sums.__getitem__)
    unit, scale = size_unit(sums[highest])
    parts = sorted(series, key=lambda kind: -series[kind][highest])[:3]
    words = f"{text} The largest parts there: " + ", ".join(f"{p} {size(series[p][highest])}" for p in parts) + "."
    device = each.get("device_memory")
    limit = (device, f"device: {size(device)}") if device and device < 3 * sums[highest] else None
    mark = (highest, f"peak {size(sums[highest])}: {timeline[highest].get('at', '')}")
    x = [str(at.get("at", position)) for position, at in enumerate(timeline)]
    drawn: dict[str, Any] = {"style": "area", "unit": unit, "scale": scale, "mark": mark, "limit": limit}
    return [charts.add(title, words, x, series, colors=_KIND_COLORS, **drawn)]


def _memory_rows(both: Sequence[dict[str, Any]]) -> Markup:
    rows_of = [{row["kind"]: row for row in each.get("rows", [])} for each in both]
    head, lines = ["kind"], []
    for each in both:
        head += [f"{each['kind']}: at rest", f"{each['kind']}: at peak"]
    compared = [each["kind"] for each in both] == ["plan", "ledger"]
    head += ["difference at peak"] if compared else []
    for kind in dict.fromkeys(kind for rows in rows_of for kind in rows):
        cells = [rows.get(kind, {}).get(key) for rows in rows_of for key in ("at_rest", "at_peak")]
        if any(cells):
            lines.append([kind, *cells])
    lines.append(["sum", *(sum(line[i] or 0 for line in lines) for i in range(1, 2 * len(both) + 1))])
    hosts = [each.get("host") or {} for each in both]
    if any(any(host.values()) for host in hosts):
        lines.append(["host memory", *(host.get(key) for host in hosts for key in ("at_rest", "at_peak"))])
    texts = []
    for kind, *cells in lines:
        extra = [_difference(cells[1], cells[3])] if compared else []
        texts.append([kind, *map(size, cells), *extra])
    return table("Memory per rank by kind" + (": plan beside ledger" if compared else ""), head, texts)


def _difference(planned: float | None, measured: float | None) -> str | None:
    return None if not planned or measured is None else f"{100 * (measured - planned) / planned:+.1f}%"


def _allocated(found: Found, charts: Charts) -> list[Markup]:
    figures = []
    for each in of_kinds(found, "recording"):
        steps = [step for step in each.get("steps", []) if step.get("allocated") is not None]
        if len(steps) > 1:
            peak = max(step["peak"] for step in steps)
            unit, scale = size_unit(peak)
            words = f"The allocator of rank 0 held at most {size(peak)}, and {size(steps[-1]['allocated'])} at the end."
            series = {"peak so far": [s["peak"] for s in steps], "after the step": [s["allocated"] for s in steps]}
            figures.append(charts.add("Allocated memory", words, steps_of(steps), series, unit=unit, scale=scale))
    return figures


# -- step time ---------------------------------------------------------------------------------------------------


def step_time(found: Found, charts: Charts) -> Section | None:
    section = Section("time", "Step time")
    for each in of_kinds(found, "timeline"):
        ranks, units = each.get("ranks", []), each.get("units", [])
        if ranks:
            text = _slowest(ranks, each.get("slowest"), each.get("steps"))
            section.findings.append((None, text))
            section.parts.append(paragraph(text))
            section.parts += _rank_table(ranks)
        if units:
            section.parts += [legend(_COLORS), _unit_times(units)]
        section.parts += [paragraph(text) for text in each.get("advice", [])]
    for each in of_kinds(found, "recording"):
        steps = [step for step in each.get("steps", []) if step.get("seconds") is not None]
        if len(steps) > 2:
            times = [1000 * step["seconds"] for step in steps]
            middle = sorted(times[1:])[len(times[1:]) // 2]
            slow = max(range(1, len(times)), key=times.__getitem__)
            words = f"The median step took {number(middle)} ms on rank 0. The first step took {number(times[0])} ms. "
            words += f"After it, step {steps[slow]['step']} was the slowest with {number(times[slow])} ms."
            x = steps_of(steps)[1:]  # the first step would hide the differences between the others
            section.parts.append(charts.add("Time per step", words, x, {"rank 0": times[1:]}, unit="ms"))
            section.findings.append((None, f"The median step took {number(middle)} ms on rank 0."))
        if len(each.get("ranks", [])) > 1 and not found.get("timeline"):
            section.parts += _rank_table(each["ranks"])
    return section if section.parts else None


def _slowest(ranks: Sequence[dict[str, Any]], slowest: int | None, steps: int | None) -> str:
    row = next((row for row in ranks if row["rank"] == slowest), max(ranks, key=lambda row: row["step_ms"]))
    exposed, step = row.get("exposed_ms") or 0.0, row["step_ms"]
    # The others wait for the slowest rank in their collectives, so the steps of all ranks take equally long.
    text = f"Rank {row['rank']} is the slowest of {count(len(ranks), 'rank')}: " if len(ranks) > 1 else "Rank 0: "
    text += f"of {number(step)} ms per step, it is busy for {number(step - exposed)} ms"
    text += f" and waits for communication for {number(exposed)} ms ({exposed / (step or 1):.0%})"
    return text + (f", over {count(steps, 'step')}." if steps else ".")


_COLORS = {"forward": 0, "backward": 1, "exposed communication": 3}
_STEP_COLORS = {"busy": 0, "waits for communication": 3}


def _ms(value: float) -> str:
    return f"{value:,.2f}"


def _rank_table(ranks: Sequence[dict[str, Any]]) -> list[Markup]:
    full = max(row["step_ms"] for row in ranks)
    exposed = any(row.get("exposed_ms") is not None for row in ranks)
    head = ["rank", "time", "step (ms)", *(["busy (ms)", "waits (ms)"] if exposed else [])]
    rows = []
    for row in ranks:
        waits = row.get("exposed_ms") or 0.0
        share = bar([row["step_ms"] - waits, waits], full, list(_STEP_COLORS.values()))
        parts = [_ms(row["step_ms"] - waits), _ms(waits)] if exposed else []
        rows.append([row["rank"], share, _ms(row["step_ms"]), *parts])
    names = [legend(_STEP_COLORS)] if exposed else []
    return [*names, table("Step time of each rank", head, rows)]


def _unit_times(units: Sequence[dict[str, Any]]) -> Markup:
    def times(row: dict[str, Any], *names: str) -> list[float]:
        return [float(row.get(f"{name}_ms") or 0) for name in names]

    def parts(row: dict[str, Any]) -> list[float]:
        return [*times(row, "forward", "backward"), sum(times(row, "all_gather_exposed", "reduce_exposed"))]

    names = ("forward", "backward", "all_gather", "all_gather_exposed", "reduce", "reduce_exposed")
    full = max(sum(parts(row)) for row in units)
    colors = list(_COLORS.values())
    lines = [[title_of(row), bar(parts(row), full, colors), *map(_ms, times(row, *names))] for row in units]
    head = ("unit", "time", "forward", "backward", "all-gather", "exposed", "reduction", "exposed")
    return table("Time of each unit per step (ms)", head, lines)
