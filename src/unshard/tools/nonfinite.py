"""Findings about non-finite values: what each rank reports, and which rank and place came first."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from enum import IntEnum
from operator import attrgetter
from typing import Any

from ..errors import listed
from ..names import ALL_PREFIXES, clean_tensor_name
from .precision_report import table

_MOST_SHOWN = 20


class Stage(IntEnum):
    """Where a value was checked. In a step, a non-finite value of one stage spreads to all later stages."""

    INPUT = -1
    """No stage of its own: inputs may be infinite on purpose, such as masks. A forward output may come from them."""
    FORWARD = 0
    OUTPUT = 1
    LOCAL = 2
    REDUCED = 3


WHAT = {
    Stage.FORWARD: "forward output",
    Stage.OUTPUT: "output gradient",
    Stage.LOCAL: "local gradient",
    Stage.REDUCED: "reduced gradient",
}


@dataclass(frozen=True)
class Seen:
    """A non-finite value at one place, as one rank reports it. `position` orders the checks of a stage in a step."""

    stage: int
    position: int
    unit: str
    parameter: str
    """The parameter whose gradient this is. For forward outputs, the module that computed it, if it is known."""
    dtype: str
    nan: bool
    elements: int | None
    largest_finite: float | None
    input: str = ""
    """For forward outputs: what the input of the model was, if it was not finite either."""
    start: int = 0
    """The number of tensors that were checked before those that were checked together with this one."""

    @property
    def check(self) -> tuple[int, str, int]:
        return self.stage, self.unit, self.start

    @property
    def place(self) -> tuple[int, str, str]:
        return self.stage, self.unit, self.parameter


@dataclass(frozen=True)
class Finding:
    """The first non-finite value of one step. `str()` returns `text`."""

    step: int
    what: str
    """`forward output`, `output gradient` (of the loss), `local gradient` or `reduced gradient`."""
    unit: str
    parameter: str | None
    ranks: tuple[int, ...]
    elements: int | None
    """Number of non-finite elements on all of `ranks`, or None if they were not counted."""
    dtype: str
    largest_finite: float | None
    """The largest finite absolute value before. See docs/nonfinite_values.md for what `before` means."""
    text: str
    module: str | None = None
    """The module inside the unit that computed the first non-finite output, if it is known."""

    def __str__(self) -> str:
        return self.text

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "ranks": list(self.ranks)}


def first_stage(seen: Iterable[Seen]) -> list[Seen]:
    """Return what was seen in the earliest stage. The rest are consequences."""
    seen = list(seen)
    if not any(each.stage == Stage.FORWARD and not each.parameter for each in seen):
        # All units had finite outputs, so a module inside a unit was infinite on purpose.
        seen = [each for each in seen if each.stage != Stage.FORWARD]
    earliest = min((each.stage for each in seen if each.stage != Stage.INPUT), default=None)
    # Inputs and outputs of modules that were infinite in steps without findings are not the reason.
    seen = [each for each in seen if math.isfinite(each.largest_finite or 0)]
    inputs = [each for each in seen if each.stage == Stage.INPUT]
    what = "NaN" if any(each.nan for each in inputs) else "infinite" if inputs else ""
    found = [each for each in seen if each.stage == earliest]
    return [replace(each, input=what) for each in found] if earliest == Stage.FORWARD else found


def clean(name: str) -> str:
    """Return the name of a module or parameter without the prefixes of wrappers."""
    return clean_tensor_name(f"{name}.", ALL_PREFIXES).rstrip(".")


# -- findings of all ranks ----------------------------------------------------------------------------------------

Reports = dict[int, dict[int, list[Seen]]]
"""What the ranks have seen, by step and rank."""


def findings_of(reports: Reports, world: int, complete: float = math.inf) -> list[Finding]:
    """Return one finding per step. Leave out steps that only repeat the finding of the step before.

    All ranks have reported what they saw up to the step `complete`.
    """
    found: list[Finding] = []
    before: tuple[int, Any] | None = None
    for step in sorted(reports):
        place, finding = _first_of(step, reports[step], world, step <= complete)
        if before is not None and before[0] == step - 1:
            said = f"{finding.text} Values of step {step - 1} may have reached the parameters."
            finding = replace(finding, text=said)
        if before != (step - 1, place):
            found.append(finding)
        before = step, place
    return found


def _first_of(step: int, by_rank: dict[int, list[Seen]], world: int, is_complete: bool) -> tuple[Any, Finding]:
    first = min((each for seen in by_rank.values() for each in seen), key=lambda each: (each.stage, each.position))
    others = set[str]()
    if first.stage in (Stage.LOCAL, Stage.REDUCED):
        # The gradients of a unit are checked at once. Infinities come before NaNs, and backward begins at the end.
        together = [each for seen in by_rank.values() for each in seen if each.check == first.check]
        first = min(together, key=lambda each: (each.nan, -each.position))
        others = {each.parameter for each in together} - {first.parameter}
    # If a module was called several times, its first call counts.
    by_last = {r: sorted(by_rank[r], key=attrgetter("position"), reverse=True) for r in sorted(by_rank)}
    same = {r: each for r, seen in by_last.items() for each in seen if each.place == first.place}
    ranks, counts = tuple(same), [each.elements for each in same.values()]
    elements = None if None in counts else sum(each or 0 for each in counts)
    finite = [each.largest_finite for each in same.values() if each.largest_finite is not None]
    nan, largest = all(each.nan for each in same.values()), max(finite, default=None)
    stage = Stage(first.stage)
    module = first.parameter if stage is Stage.FORWARD and first.parameter else None
    known = next((each for each in same.values() if each.input), first)
    text = _text(step, known, stage, ranks, world, is_complete, nan, elements, largest, len(others))
    parameter = first.parameter if stage in (Stage.LOCAL, Stage.REDUCED) else None
    what = WHAT[stage]
    finding = Finding(step, what, first.unit, parameter, ranks, elements, first.dtype, largest, text, module)
    return first.place, finding


def _text(
    step: int,
    first: Seen,
    stage: Stage,
    ranks: tuple[int, ...],
    world: int,
    is_complete: bool,
    nan: bool,
    elements: int | None,
    largest: float | None,
    others: int,
) -> str:
    who = "all ranks" if len(ranks) == world > 1 else f"ranks {listed(ranks)}" if len(ranks) > 1 else f"rank {ranks[0]}"
    alone = " alone" if len(ranks) == 1 < world and is_complete else ""
    count = "" if elements is None else f", {elements} {'element' if elements == 1 else 'elements'}"
    did = "got NaN" if nan else "became infinite"
    if stage is Stage.FORWARD:
        where = f"module {first.parameter!r} of unit {first.unit!r}" if first.parameter else f"unit {first.unit!r}"
        text = f"{who}{alone} {did} in forward: output of {where} ({first.dtype}{count})"
        text += f"; an input of the model was {first.input}" if first.input else ""
        before = "largest finite output there in earlier steps"
    elif stage is Stage.OUTPUT:
        text = f"{who}{alone} {did} in the gradient of the loss: output of unit {first.unit!r} ({first.dtype}{count})"
        before = "largest finite gradient there in earlier steps"
    elif stage is Stage.LOCAL:
        text = f"{who}{alone} {did} in {first.parameter}: local gradient of unit {first.unit!r} ({first.dtype}{count})"
        before = "largest finite gradient there in earlier steps"
    else:
        verb = "NaN" if nan else "overflow"
        only, them = (" only", "all ranks") if is_complete else ("", who)
        text = f"{verb}{only} in the {first.dtype} reduction of {first.parameter} (unit {first.unit!r}{count} on {who})"
        text += f": local gradients of {them} were finite"
        before = "largest of them on these ranks"
    text += "" if is_complete else "; not all ranks have reported"
    text += f"; non-finite gradients of other parameters in the unit: {others}" if others else ""
    return f"Step {step}: {text}" + ("." if largest is None else f"; {before}: {largest:.4g}.")


def changes_of(scales: Sequence[tuple[int, float]], findings: Sequence[Finding]) -> list[dict[str, Any]]:
    """Return the steps that changed the scale of the gradient scaler. `scales` has the scale after each step."""
    texts = {each.step: each.text for each in findings}
    rows: list[dict[str, Any]] = []
    for (_, before), (step, scale) in itertools.pairwise(scales):
        if scale != before:
            why = texts.get(step, "No watched value was non-finite in this step.") if scale < before else ""
            rows.append({"step": step, "scale": scale, "skipped": scale < before, "why": why})
    return rows


def text_of(steps: int, findings: list[Finding], scaler: list[dict[str, Any]]) -> str:
    """Return the text of a watch."""
    if not steps:
        return "No step was watched. A step is a forward and a backward of the model between watch() and stop()."
    lines = [f"Steps watched: {steps}.", ""]
    lines += ["Non-finite values:", *(f"- {each.text}" for each in findings[:_MOST_SHOWN])] if findings else []
    if len(findings) > _MOST_SHOWN:
        lines.append(f"- and {len(findings) - _MOST_SHOWN} more, all of them in `findings`")
    lines += [] if findings else ["All values were finite."]
    if scaler:
        rows = [[str(x["step"]), f"{x['scale']:g}", "skipped" if x["skipped"] else "", x["why"]] for x in scaler]
        lines += ["", *table(["step", "scale after", "", "why"], rows, numbers=(0, 1))]
    return "\n".join(lines)
