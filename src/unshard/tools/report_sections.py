"""The sections of a report. Each function returns None if the report has no data for its section."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any

from .precision_report import shared_title, unit_title
from .report_parts import (
    Charts,
    Markup,
    bar,
    count,
    dict_table,
    legend,
    number,
    paragraph,
    ranks_text,
    size,
    size_unit,
    table,
    tag,
)

Found = dict[str, list[dict[str, Any]]]
"""The results of a report by their kind."""

_MOST_LINES = 8
"""Charts show at most this many lines, and tables of the largest tensors this many rows."""


@dataclass
class Section:
    name: str
    title: str
    parts: list[Markup] = field(default_factory=list)
    findings: list[tuple[bool | None, str]] = field(default_factory=list)
    """What the top of the page says. True is good, False is a problem, None is only information."""


def sections_of(found: Found, charts: Charts) -> list[Section]:
    makers: list[Callable[[Found, Charts], Section | None]]
    makers = [_hang, _training, _scaler, _memory, _step_time, _precision, _sharding, _verify, _doctor, _advice]
    return [section for make in makers if (section := make(found, charts)) is not None]


def _of(found: Found, *kinds: str) -> Iterator[dict[str, Any]]:
    for kind in kinds:
        yield from found.get(kind, [])


def _named(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Join rows that differ only in the names of their units, as the text tables do."""
    equal: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        key = repr({name: value for name, value in row.items() if name not in ("name", "names", "unit")})
        equal.setdefault(key, []).append(row)
    return [{**same[0], "unit": shared_title([_title(row) for row in same])} for same in equal.values()]


def _title(row: dict[str, Any]) -> str:
    return unit_title(str(row.get("unit", row.get("name", ""))))


# -- memory ------------------------------------------------------------------------------------------------------


def _memory(found: Found, charts: Charts) -> Section | None:
    section = Section("memory", "Memory")
    both = list(_of(found, "plan", "ledger"))
    for each in both:
        measured = each["kind"] == "ledger"
        what, device = "Measured" if measured else "Planned", each.get("device_memory")
        text = f"{what} peak: {size(each.get('peak'))} per rank"
        text += f", in {each['peak_at']}" if each.get("peak_at") else ""
        fits = each.get("fits")
        text += "" if device is None else f". The device has {size(device)}"
        text += "" if fits is None else ", which is enough" if fits else ", which is too little"
        section.findings.append((fits, text + "."))
        section.parts.append(paragraph(text + "."))
        section.parts += _memory_chart(each, f"{what} memory by kind", text + ".", charts)
    if both:
        section.parts.append(_memory_rows(both))
        for each in both:
            if each.get("largest"):
                largest = sorted(each["largest"], key=lambda row: -row["bytes"])[: 2 * _MOST_LINES]
                rows = [(row["what"], row.get("kind"), size(row["bytes"])) for row in largest]
                section.parts.append(table(f"Largest tensors ({each['kind']})", ("tensor", "kind", "size"), rows))
    section.parts += _allocated(found, charts)
    return section if section.parts else None


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
    return [charts.add(title, words, x, series, style="area", unit=unit, scale=scale, mark=mark, limit=limit)]


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
    texts = []
    for kind, *cells in lines:
        extra = [_difference(cells[1], cells[3])] if compared else []
        texts.append([kind, *map(size, cells), *extra])
    return table("Memory per rank by kind" + (": plan beside ledger" if compared else ""), head, texts)


def _difference(planned: float | None, measured: float | None) -> Markup:
    if not planned or measured is None:
        return Markup("–")  # noqa: RUF001
    return Markup(f'<span class="right">{100 * (measured - planned) / planned:+.1f}%</span>')


def _allocated(found: Found, charts: Charts) -> list[Markup]:
    figures = []
    for each in _of(found, "recording"):
        steps = [step for step in each.get("steps", []) if step.get("allocated") is not None]
        if len(steps) > 1:
            peak = max(step["peak"] for step in steps)
            unit, scale = size_unit(peak)
            words = f"The allocator of rank 0 held at most {size(peak)}, and {size(steps[-1]['allocated'])} at the end."
            series = {"peak so far": [s["peak"] for s in steps], "after the step": [s["allocated"] for s in steps]}
            figures.append(charts.add("Allocated memory", words, _x(steps), series, unit=unit, scale=scale))
    return figures


# -- step time ---------------------------------------------------------------------------------------------------


def _step_time(found: Found, charts: Charts) -> Section | None:
    section = Section("time", "Step time")
    for each in _of(found, "timeline"):
        ranks, units = each.get("ranks", []), each.get("units", [])
        if ranks:
            text = _slowest(ranks, each.get("slowest"), each.get("steps"))
            section.findings.append((None, text))
            section.parts.append(paragraph(text))
            section.parts.append(_rank_table(ranks))
        if units:
            section.parts += [legend(_TIMES), _unit_times(units)]
    for each in _of(found, "recording"):
        steps = [step for step in each.get("steps", []) if step.get("seconds") is not None]
        if len(steps) > 1:
            times = [1000 * step["seconds"] for step in steps]
            middle = sorted(times[1:])[len(times[1:]) // 2]
            slow = max(range(1, len(times)), key=times.__getitem__)
            words = f"The median step took {number(middle)} ms on rank 0. The first step took {number(times[0])} ms. "
            words += f"After it, step {steps[slow]['step']} was the slowest with {number(times[slow])} ms."
            section.parts.append(charts.add("Time per step", words, _x(steps), {"rank 0": times}, unit="ms"))
            section.findings.append((None, f"The median step took {number(middle)} ms on rank 0."))
        if len(each.get("ranks", [])) > 1:
            section.parts.append(_rank_table(each["ranks"]))
    return section if section.parts else None


def _slowest(ranks: Sequence[dict[str, Any]], slowest: int | None, steps: int | None) -> str:
    row = next((row for row in ranks if row["rank"] == slowest), max(ranks, key=lambda row: row["step_ms"]))
    exposed, step = row.get("exposed_ms"), row["step_ms"]
    text = f"Rank {row['rank']} is the slowest of {count(len(ranks), 'rank')}: " if len(ranks) > 1 else "Rank 0: "
    text += f"{number(step)} ms per step"
    text += f" over {count(steps, 'step')}" if steps else ""
    if exposed is not None and step:
        text += f", of which {number(exposed)} ms ({exposed / step:.0%}) wait for communication"
    return text + "."


def _rank_table(ranks: Sequence[dict[str, Any]]) -> Markup:
    full = max(row["step_ms"] for row in ranks)
    exposed = any(row.get("exposed_ms") is not None for row in ranks)
    head = ["rank", "step (ms)", *(["waits for communication (ms)"] if exposed else []), "bar"]
    rows = []
    for row in ranks:
        waits = row.get("exposed_ms") or 0.0
        middle = [float(waits)] if exposed else []
        share = bar([row["step_ms"] - waits, waits], full)
        rows.append([row["rank"], float(row["step_ms"]), *middle, share])
    return table("Step time of each rank", head, rows)


_TIMES = ("forward", "backward", "hidden communication", "exposed communication")


def _unit_times(units: Sequence[dict[str, Any]]) -> Markup:
    def times(row: dict[str, Any], *names: str) -> list[float]:
        return [float(row.get(f"{name}_ms") or 0) for name in names]

    rows, full = [], 0.0
    for row in units:
        computing = times(row, "forward", "backward")
        sent, exposed = sum(times(row, "all_gather", "reduce")), sum(times(row, "all_gather_exposed", "reduce_exposed"))
        full = max(full, sum(computing), sent)
        rows.append((row, computing, [max(0.0, sent - exposed), exposed]))
    lines = []
    for row, computing, sending in rows:
        bars = Markup(bar(computing, full) + bar(sending, full, first_color=2))
        gathers, reduces = times(row, "all_gather", "all_gather_exposed"), times(row, "reduce", "reduce_exposed")
        lines.append([_title(row), *computing, *gathers, *reduces, bars])
    head = ("unit", "forward", "backward", "all-gather", "exposed", "reduction", "exposed", "computing / communication")
    return table("Time of each unit per step (ms)", head, lines)


# -- precision, sharding -----------------------------------------------------------------------------------------


def _precision(found: Found, charts: Charts) -> Section | None:
    section = Section("precision", "Precision")
    for each in _of(found, "precision"):
        section.findings += [(False, text) for text in each.get("findings", [])]
        if each.get("units"):
            section.parts.append(dict_table("Dtypes of each unit", _named(each["units"]), ("unit",)))
        texts = each.get("findings") or ["No surprises."]
        section.parts.append(_list(texts))
    return section if section.parts else None


def _list(texts: Iterable[str]) -> Markup:
    return Markup(f"<ul>{''.join(f'<li>{escape(text)}</li>' for text in texts)}</ul>")


def _sharding(found: Found, charts: Charts) -> Section | None:
    # A recording shows what the run did. A plan shows what it would do.
    units = next((each["units"] for each in _of(found, "recording", "ledger", "plan") if each.get("units")), None)
    if units is None:
        return None
    section = Section("sharding", "Sharding map")
    total, full = sum(unit["bytes"] for unit in units), max(unit["bytes"] for unit in units)
    ranks = sorted({rank for unit in units for rank in unit["ranks"]})
    text = (
        f"{count(len(units), 'unit')}, {count(sum(unit['parameters'] for unit in units), 'parameter')}, "
        f"{sum(unit['elements'] for unit in units):,} elements, {size(total)}, on {count(len(ranks), 'rank')}."
    )
    section.findings.append((None, text))
    head = ["unit", "parameters", "elements", "size", "share", "ranks", "on each rank"]
    replicas = any(unit.get("replicas", 1) > 1 for unit in units)
    rows = [
        [
            _title(unit),
            unit["parameters"],
            unit["elements"],
            size(unit["bytes"]),
            bar([unit["bytes"]], full),
            ranks_text(unit["ranks"]),
            size(unit["bytes"] / max(1, len(unit["ranks"]))),
            *([unit.get("replicas", 1)] if replicas else []),
        ]
        for unit in units
    ]
    title = "Which ranks hold which unit (each rank has an equal share)"
    section.parts += [paragraph(text), table(title, head + (["replicas"] if replicas else []), rows)]
    return section


# -- training ----------------------------------------------------------------------------------------------------


def _x(steps: Sequence[dict[str, Any]]) -> list[int]:
    return [step["step"] for step in steps]


_OWN_CHARTS = {"step", "seconds", "allocated", "peak", "reserved", "scale", "skipped"}


def _training(found: Found, charts: Charts) -> Section | None:
    section = Section("training", "Training")
    for each in _of(found, "recording"):
        steps = each.get("steps", [])
        if each.get("error"):
            last = f" after step {steps[-1]['step']}" if steps else ""
            section.findings.append((False, f"The run ended{last} with {each['error']}"))
            section.parts.append(paragraph(f"The run ended{last} with {each['error']}"))
        for name in dict.fromkeys(key for step in steps for key in step if key not in _OWN_CHARTS):
            section.parts += _curve(name, [step for step in steps if name in step], section, charts)
    for each in _of(found, "watch"):
        findings = each.get("findings", [])
        section.findings += [(False, str(row.get("text") or row.get("what"))) for row in findings[:_MOST_LINES]]
        if findings:
            section.parts.append(dict_table("Values that are not finite, or unusual", findings, ("step",)))
        section.parts += _norms(each.get("norms", []), charts)
    return section if section.parts else None


def _curve(name: str, steps: list[dict[str, Any]], section: Section, charts: Charts) -> list[Markup]:
    title = {"lr": "Learning rate"}.get(name, name.replace("_", " ").capitalize())
    values = [step[name] for step in steps]
    known = [(step[name], step["step"]) for step in steps if _is_finite(step[name])]
    lost = [step["step"] for step in steps if step[name] is not None and not _is_finite(step[name])]
    if lost:
        text = f"{title} is not finite in {count(len(lost), 'step')}, first in step {lost[0]}."
        section.findings.append((False, text))
    if len(known) < 2:
        return [paragraph(f"{title}: {number(known[0][0])} in step {known[0][1]}.")] if known else []
    words = f"{title} went from {number(known[0][0])} in step {known[0][1]} to {number(known[-1][0])} in step "
    words += f"{known[-1][1]}"
    if name == "loss":
        section.findings.append((None, words + "."))
    lowest, highest = min(known), max(known)
    words += f"; lowest {number(lowest[0])} (step {lowest[1]}), highest {number(highest[0])} (step {highest[1]})."
    if lost:
        words += f" It is not finite in steps {ranks_text(lost)}."
    return [charts.add(title, words, _x(steps), {name.replace("_", " "): values})]


def _is_finite(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _norms(norms: Sequence[dict[str, Any]], charts: Charts) -> list[Markup]:
    by_name: dict[str, dict[int, float]] = {}
    for row in norms:
        if (norm := (row.get("gradient") or {}).get("norm")) is not None:
            by_name.setdefault(unit_title(row["name"]), {})[row["step"]] = norm
    steps = sorted({step for values in by_name.values() for step in values})
    if len(steps) < 2:
        return []

    def highest(name: str) -> float:
        return max((value for value in by_name[name].values() if math.isfinite(value)), default=math.inf)

    chosen = sorted(by_name, key=highest, reverse=True)[:_MOST_LINES]
    series = {name: [by_name[name].get(step) for step in steps] for name in chosen}
    # A logarithmic scale has no zero.
    drawn = {name: [value if value else None for value in values] for name, values in series.items()}
    words = f"Steps {steps[0]} to {steps[-1]}. The highest norm is {number(highest(chosen[0]))}, of {chosen[0]}."
    if len(by_name) > len(chosen):
        words += f" The chart shows the {len(chosen)} highest of {len(by_name)}."
    figure = charts.add("Gradient norms", words, steps, drawn, log=True)
    rows = []
    for name, values in by_name.items():
        at = max(values, key=lambda step: values[step])
        last = max(values)
        rows.append([name, float(values[last]), float(values[at]), at])
    return [figure, table("Gradient norms", ("name", "last", "highest", "in step"), rows)]


def _scaler(found: Found, charts: Charts) -> Section | None:
    recorded = [step for each in _of(found, "recording") for step in each.get("steps", []) if step.get("scale")]
    rows = [row for each in _of(found, "watch") for row in each.get("scaler", [])] or recorded
    if not rows:
        return None
    section = Section("scaler", "Gradient scaler")
    skipped = [row for row in rows if row.get("skipped")]
    text = f"The gradient scaler skipped {len(skipped):,} of {count(len(rows), 'step')}"
    text += "" if not skipped else f" (steps {ranks_text(row['step'] for row in skipped)})"
    section.findings.append((None, text + "."))
    words = f"{text}. The scale is {number(rows[0]['scale'])} at first and {number(rows[-1]['scale'])} at the end."
    scales = [row["scale"] for row in rows]
    marks = [row["scale"] if row.get("skipped") else None for row in rows]
    section.parts.append(
        charts.add("Scale", words, _x(rows), {"scale": scales, "skipped": marks}, style="step", log=True)
    )
    if skipped:
        lines = [(row["step"], float(row["scale"]), row.get("why") or "gradients overflowed") for row in skipped]
        section.parts.append(table("Skipped steps", ("step", "scale", "why"), lines))
    return section


# -- checks ------------------------------------------------------------------------------------------------------


def _verify(found: Found, charts: Charts) -> Section | None:
    section = Section("verify", "Comparison with unsharded training")
    for each in _of(found, "verify"):
        good, rows = bool(each.get("agree")), []
        for run in each.get("runs", []):
            differs = run.get("differs") or {}
            cells = [differs.get(key) for key in ("what", "name", "step", "difference", "tolerance")]
            rows.append([f"{run['ranks']} ranks", tag(run.get("agree"), ("agrees", "differs", "-")), *cells])
            rows[-1].append(run.get("causes"))
        ranks = ", ".join(str(run["ranks"]) for run in each.get("runs", []))
        text = f"Training on {ranks} ranks {'agrees' if good else 'does not agree'} with unsharded training"
        section.findings.append((good, f"{text} in {count(each['steps'], 'step')}." if each.get("steps") else text))
        head = ("run", "result", "what", "name", "step", "difference", "tolerance", "possible causes")
        section.parts.append(table("Runs", head, rows))
    return section if section.parts else None


def _doctor(found: Found, charts: Charts) -> Section | None:
    section = Section("doctor", "Environment")
    for each in _of(found, "doctor"):
        rows = each.get("rows", [])
        bad = [row for row in rows if row.get("ok") is False]
        section.findings += [(False, f"{row['what']}: {row.get('advice') or row.get('value')}") for row in bad]
        if not bad:
            section.findings.append((True, f"The environment passes {count(len(rows), 'check')}."))
        lines = [(row["what"], row.get("value"), tag(row.get("ok")), row.get("advice")) for row in rows]
        section.parts.append(table("Checks of the environment", ("what", "value", "result", "advice"), lines))
    return section if section.parts else None


def _hang(found: Found, charts: Charts) -> Section | None:
    section = Section("hang", "Hang")
    for each in _of(found, "hang"):
        text = each.get("finding") or f"Ranks wait in {each.get('collective')}."
        section.findings.append((False, text))
        missing = each.get("missing") or []
        place = f"Collective {each.get('position')}: {each.get('collective')}."
        place += f" Missing: {'rank' if len(missing) == 1 else 'ranks'} {ranks_text(missing)}." if missing else ""
        section.parts += [paragraph(text), paragraph(place)]
        rows = [{**row, "stack": _folded(row.get("stack"))} for row in each.get("rows", [])]
        section.parts.append(dict_table("Where each rank is", rows, ("rank", "state", "waits_for", "unit", "line")))
    return section if section.parts else None


def _folded(stack: Sequence[Any] | None) -> Markup | None:
    if not stack:
        return None
    lines = escape("\n".join(map(str, stack)))
    return Markup(f"<details><summary>{count(len(stack), 'frame')}</summary><pre>{lines}</pre></details>")


def _advice(found: Found, charts: Charts) -> Section | None:
    rows = [
        (row["change"], size(row.get("peak")), tag(row.get("fits"), ("fits", "does not fit", "unknown")))
        for each in _of(found, "plan", "ledger")
        for row in each.get("advice", [])
    ]
    if not rows:
        return None
    section = Section("advice", "Advice")
    section.parts.append(table("Changes that need less memory", ("change", "peak", "result"), rows))
    return section
