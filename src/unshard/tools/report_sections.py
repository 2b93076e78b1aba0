"""The sections of a report. Each function returns None if the report has no data for its section."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from html import escape
from typing import Any

from .precision_report import shared_title, unit_title
from .report_costs import memory, step_time
from .report_parts import (
    MOST_LINES,
    Charts,
    Found,
    Markup,
    Section,
    bar,
    count,
    dict_table,
    number,
    of_kinds,
    paragraph,
    ranks_text,
    size,
    steps_of,
    table,
    tag,
    title_of,
)


def sections_of(found: Found, charts: Charts) -> list[Section]:
    makers: list[Callable[[Found, Charts], Section | None]]
    makers = [_hang, _training, _scaler, memory, step_time, _precision, _sharding, _verify, _doctor, _advice]
    return [section for make in makers if (section := make(found, charts)) is not None]


def _named(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Join rows that differ only in the names of their units, as the text tables do."""
    equal: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        key = repr({name: value for name, value in row.items() if name not in ("name", "unit")})
        equal.setdefault(key, []).append(row)
    return [
        {"unit": shared_title([title_of(row) for row in same])}
        | {key: value for key, value in same[0].items() if key not in ("name", "unit")}
        for same in equal.values()
    ]


def _many(parameters: Any) -> Any:
    return len(parameters) if isinstance(parameters, list) else parameters


# -- precision, sharding -----------------------------------------------------------------------------------------


def _precision(found: Found, charts: Charts) -> Section | None:
    section = Section("precision", "Precision")
    for each in of_kinds(found, "precision"):
        section.findings += [(False, text) for text in each.get("findings", [])]
        if each.get("units"):
            rows = [{**row, "parameters": _many(row.get("parameters"))} for row in each["units"]]
            section.parts.append(dict_table("Dtypes of each unit", _named(rows), ("unit",)))
        if each.get("findings"):
            section.parts.append(_list(each["findings"]))
        elif each.get("units"):
            section.findings.append((True, "No dtype looks unintended."))
    return section if section.parts else None


def _list(texts: Iterable[str]) -> Markup:
    return Markup(f"<ul>{''.join(f'<li>{escape(text)}</li>' for text in texts)}</ul>")


def _sharding(found: Found, charts: Charts) -> Section | None:
    # A recording shows what the run did. A plan shows what it would do.
    each = next((each for each in of_kinds(found, "recording", "ledger", "plan") if each.get("units")), None)
    if each is None:
        return None
    section, units = Section("sharding", "Sharding map"), each["units"]
    total, full = sum(unit["bytes"] for unit in units), max(unit["bytes"] for unit in units)
    ranks = each.get("world") or len({rank for unit in units for rank in unit["ranks"]})
    text = (
        f"{count(len(units), 'unit')}, {count(sum(unit['parameters'] for unit in units), 'parameter')}, "
        f"{sum(unit['elements'] for unit in units):,} elements, {size(total)}, on {count(ranks, 'rank')}."
    )
    section.findings.append((None, text))
    known = "ranks" in units[0]  # a plan and a ledger have numbers of shards
    head = ["unit", "share", "size", "ranks" if known else "shards", "on each rank", "parameters", "elements"]
    replicas = any(unit.get("replicas", 1) > 1 for unit in units)
    rows = [
        [
            title_of(unit),
            bar([unit["bytes"]], full),
            size(unit["bytes"]),
            Markup(ranks_text(unit["ranks"])) if known else unit["shards"],
            _share(unit),
            unit["parameters"],
            unit["elements"],
            *([unit.get("replicas", 1)] if replicas else []),
        ]
        for unit in units
    ]
    title = "Which ranks hold which unit (they have equal shares, up to padding)" if known else "Shards of each unit"
    section.parts += [paragraph(text), table(title, head + (["replicas"] if replicas else []), rows)]
    return section


def _share(unit: dict[str, Any]) -> str:
    shards = unit.get("bytes_per_shard") or [unit["bytes"] / max(1, len(unit.get("ranks", [])) or unit["shards"])]
    least, most = size(min(shards)), size(max(shards))
    return most if least == most else f"{least} to {most}"


# -- training ----------------------------------------------------------------------------------------------------


_OWN_CHARTS = {"step", "seconds", "allocated", "peak", "reserved", "scale", "skipped", "why"}


def _training(found: Found, charts: Charts) -> Section | None:
    section = Section("training", "Training")
    for each in of_kinds(found, "recording"):
        steps = each.get("steps", [])
        if each.get("error"):
            last = f" after step {steps[-1]['step']}" if steps else ""
            section.findings.append((False, f"The run ended{last} with {each['error']}"))
            section.parts.append(paragraph(f"The run ended{last} with {each['error']}"))
        for name in dict.fromkeys(key for step in steps for key in step if key not in _OWN_CHARTS):
            section.parts += _curve(name, [step for step in steps if name in step], section, charts)
    for each in of_kinds(found, "watch"):
        findings = each.get("findings", [])
        section.findings += [(False, str(row.get("text") or row.get("what"))) for row in findings[:MOST_LINES]]
        if not findings and each.get("steps"):
            section.findings.append((True, f"All values were finite in {count(each['steps'], 'watched step')}."))
            section.parts.append(paragraph(section.findings[-1][1]))
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
    return [charts.add(title, words, steps_of(steps), {name.replace("_", " "): values})]


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

    chosen = sorted(by_name, key=highest, reverse=True)[:MOST_LINES]
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
    rows = [step for each in of_kinds(found, "recording") for step in each.get("steps", []) if step.get("scale")]
    steps, reasons = len(rows), dict[Any, Any]()
    for each in of_kinds(found, "watch"):
        changes = each.get("scaler") or []
        # Both have the number of the step, unless the recording began earlier or later than the watch.
        reasons |= {(row["step"], row["scale"]): row.get("why") for row in changes}
        if changes and not steps:  # a watch has only the steps that changed the scale
            before = [{"step": 0, "scale": each["initial_scale"]}] if each.get("initial_scale") else []
            rows = [*before, *changes]
            steps = each.get("steps") or len(changes)
    if not rows:
        return None
    section = Section("scaler", "Gradient scaler")
    skipped = [row for row in rows if row.get("skipped")]
    text = f"The gradient scaler skipped {len(skipped):,} of {count(steps, 'step')}"
    which = "step" if len(skipped) == 1 else "steps"
    text += "" if not skipped else f" ({which} {ranks_text(row['step'] for row in skipped)})"
    section.findings.append((None, text + "."))
    words = f"{text}. The scale went from {number(rows[0]['scale'])} to {number(rows[-1]['scale'])}."
    scales = [row["scale"] for row in rows]
    series = {"scale": scales, "skipped": [row["scale"] if row.get("skipped") else None for row in rows]}
    section.parts.append(charts.add("Scale", words, steps_of(rows), series, style="step", log=True, dots=["skipped"]))
    if skipped:
        whys = [reasons.get((row["step"], row["scale"])) or row.get("why") or "gradients overflowed" for row in skipped]
        lines = [(row["step"], float(row["scale"]), why) for row, why in zip(skipped, whys, strict=True)]
        section.parts.append(table("Skipped steps", ("step", "scale", "why"), lines))
    return section


# -- checks ------------------------------------------------------------------------------------------------------


def _verify(found: Found, charts: Charts) -> Section | None:
    section = Section("verify", "Comparison with unsharded training")
    for each in of_kinds(found, "verify"):
        rows, runs = [], each.get("runs", [])
        for run in runs:
            differs = run.get("differs") or {}
            cells = [differs.get(key) for key in ("what", "name", "step", "difference", "tolerance")]
            rows.append([f"{run['ranks']} ranks", tag(run.get("agree"), ("agrees", "differs", "-")), *cells])
            rows[-1].append([*run.get("causes", []), *(f"Note: {each}" for each in run.get("notes", []))])
        for good in (False, True):
            ranks = " and ".join(str(run["ranks"]) for run in runs if bool(run.get("agree")) is good)
            steps = f" in {count(each['steps'], 'step')}" if each.get("steps") else ""
            verb = "agrees with" if good else "differs from"
            section.findings += (
                [(good, f"Training on {ranks} ranks {verb} unsharded training{steps}.")] if ranks else []
            )
        head = ("run", "result", "what", "name", "step", "difference", "tolerance", "possible causes")
        section.parts.append(table("Runs", head, rows))
    return section if section.parts else None


def _doctor(found: Found, charts: Charts) -> Section | None:
    section = Section("doctor", "Environment")
    for each in of_kinds(found, "doctor"):
        rows = each.get("rows", [])
        bad = [row for row in rows if row.get("ok") is False]
        section.findings += [(False, f"{row['what']}: {row.get('advice') or row.get('value')}") for row in bad]
        if not bad:
            section.findings.append((True, f"The environment passes {count(len(rows), 'check')}."))
        marks = [None if row.get("ok") is None and not row.get("advice") else tag(row.get("ok")) for row in rows]
        texts = zip(rows, marks, strict=True)
        lines = [(row["what"], row.get("value"), mark, row.get("advice")) for row, mark in texts]
        section.parts.append(table("Checks of the environment", ("what", "value", "result", "advice"), lines))
    return section if section.parts else None


def _hang(found: Found, charts: Charts) -> Section | None:
    section = Section("hang", "Hang")
    for each in of_kinds(found, "hang"):
        text = each.get("finding") or f"Ranks wait in {each.get('collective')}."
        section.findings.append((False, text))
        missing = each.get("missing") or []
        place = f"Collective {each.get('position')}: {each.get('collective')}."
        place += f" Missing: {'rank' if len(missing) == 1 else 'ranks'} {ranks_text(missing)}." if missing else ""
        section.parts += [paragraph(text), paragraph(place)]
        rows = [
            {**{key: row.get(key) for key in _PLACES}, "pid": str(row.get("pid") or ""), "stacks": _stacks(row)}
            for row in each.get("rows", [])
        ]
        if rows:
            section.parts.append(dict_table("Where each rank is", rows))
    return section if section.parts else None


_PLACES = ("rank", "state", "waits_for", "last", "position", "unit", "line", "host")


def _stacks(row: dict[str, Any]) -> Markup:
    stacks = {"main thread": row.get("stack"), **row.get("threads", {})}
    return Markup(
        "".join(
            f"<details><summary>{escape(name)}</summary><pre>{escape(chr(10).join(map(str, lines)))}</pre></details>"
            for name, lines in stacks.items()
            if lines
        )
    )


def _fits(fits: bool | None) -> Markup | None:
    return None if fits is None else tag(fits, ("fits", "does not fit", ""))


def _advice(found: Found, charts: Charts) -> Section | None:
    rows = [
        (row["change"], size(row.get("peak")), _fits(row.get("fits")))
        for each in list(of_kinds(found, "plan", "ledger"))[:1]  # they have the same advice
        for row in each.get("advice", [])
    ]
    if not rows:
        return None
    section = Section("advice", "Advice")
    section.parts.append(table("Changes that need less memory", ("change", "peak", "result"), rows))
    return section
