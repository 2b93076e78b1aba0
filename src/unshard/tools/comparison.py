"""A plan beside what was found: where they differ, in sentences and as a table."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from ..engine.precision import Precision
from .findings import Dtypes, Findings, Stage, owners_of
from .plan import Member, ModelPlan, UnitPlan
from .report import AS_IT_COMES, listed_surprises
from .words import NOTHING, quoted, shorts, table, titles, unit_title

POLICY = Precision.POLICY
_SHOWN = 20  # one cause often shows in every block
_DOORS = ("unit", "inputs planned", "found", "outputs planned", "found", "buffers planned", "found")


def planned(stage: Stage, member: Member, precision: Precision = POLICY) -> Dtypes:
    """What the engine may use at a stage; empty where there is no such stage."""
    dtypes, compute = member.dtypes, member.computed(precision)
    if stage is Stage.GATHERED:
        return set() if member.extended else {compute}
    if stage is Stage.COMPUTED:
        return set() if member.extended else {compute}  # a protocol of its own may make anything whole
    if not member.trainable:
        return set()
    if stage is Stage.GRADIENT:
        return {compute, dtypes.reduce}  # sums that were kept come in the reduce dtype
    if stage is Stage.STATE:
        return set(member.state) if member.state else {dtypes.original}
    if stage is Stage.WIRE:
        return {dtypes.wire}
    summed = stage in (Stage.KEPT, Stage.REDUCED, Stage.ALL_REDUCED)
    return {dtypes.reduce} if summed else {dtypes.original}


def differences(plan: ModelPlan, findings: Findings) -> list[str]:
    found: list[str] = []
    for unit in plan.units:
        found += _of_parameters(unit, findings)
        found += _of_buffers(unit, findings)
        found += _of_doors(unit, findings)
        found += _of_modules(unit, findings)
    return found


def _of_parameters(unit: UnitPlan, findings: Findings) -> Iterator[str]:
    alike: dict[tuple[str, str, str], list[str]] = {}
    for member in unit.members:
        for stage in Stage:
            for precision in Precision:
                want, have = planned(stage, member, precision), findings.of(stage, member, precision)
                if stage is Stage.GRADIENT:
                    want = want | planned(stage, member, POLICY)  # a graph of the other precision
                if stage is Stage.GATHERED and _travels_as_bytes(unit, want, precision):
                    have = have - {torch.uint8}
                if have and want and not have <= want:
                    key = (stage.value, shorts(want), shorts(have - want))
                    alike.setdefault(key, []).append(member.name)
    for (stage_name, want_text, have_text), names in alike.items():
        yield f"{_title(unit)}: {stage_name} planned {want_text}, found {have_text} ({quoted(names)})."

    casts = [(each, to) for each in unit.members for to in findings.casts.get(each.slot, ())]
    for member, dtype in casts:
        want = planned(Stage.COMPUTED, member, unit.state.unit.precision)
        yield (
            f"{_title(unit)}: {member.name!r} planned to be computed with in {shorts(want)}, found converted to "
            f"{shorts([dtype])} by the model's own code."
        )


def _travels_as_bytes(unit: UnitPlan, dtypes: Dtypes, precision: Precision) -> bool:
    """Several dtypes in one collective are sent as bytes, and so is what a backend does not know."""
    return len({each.computed(precision) for each in unit.members} | dtypes) > 1 or any(d.itemsize == 1 for d in dtypes)


def _of_buffers(unit: UnitPlan, findings: Findings) -> Iterator[str]:
    for each in unit.buffers:
        for precision in Precision:
            want = each.seen if precision is POLICY else each.stored
            have = findings.buffers.get((each.name, precision), set()) - {want}
            if have:
                yield f"{_title(unit)}: buffer {each.name!r} planned {shorts([want])}, found {shorts(have)} in forward."


def _of_doors(unit: UnitPlan, findings: Findings) -> Iterator[str]:
    for module in unit.state.modules():
        for precision in Precision:
            for name, want, have in (
                ("inputs", inputs_planned(unit, precision), findings.inputs.get((module, precision), set())),
                ("outputs", outputs_planned(unit, precision), findings.outputs.get((module, precision), set())),
            ):
                if want is not None and have - {want}:
                    yield f"{_title(unit)}: {name} planned {shorts([want])}, found {shorts(have - {want})}."


def inputs_planned(unit: UnitPlan, precision: Precision) -> torch.dtype | None:
    return unit.state.unit.compute_dtype_in(precision) if unit.state.casts_inputs else None


def outputs_planned(unit: UnitPlan, precision: Precision) -> torch.dtype | None:
    return unit.policy.output_dtype if precision is POLICY else None


def _of_modules(unit: UnitPlan, findings: Findings) -> Iterator[str]:
    """Modules that compute with parameters of their own and nothing else: what they take and return is telling."""
    tops = unit.state.modules()
    for module, members in owners_of(unit).items():
        if any(True for child in module.children() for _ in child.parameters()):
            continue  # what it returns may come from a module inside
        for precision in Precision:
            computed = {d for each in members if (d := each.computed(precision)).is_floating_point}
            door = _door(unit, module, module in tops, precision)
            inputs = findings.inputs.get((module, precision), set())
            outputs = findings.outputs.get((module, precision), set())
            autocast = findings.autocast.get(module)
            where = f"{_title(unit)}, module {_path(module, members)!r}"
            why = f" (inside autocast to {shorts([autocast])})" if autocast else ""
            if computed and inputs and not inputs & computed:
                yield f"{where}: computation planned in {shorts(computed)}, found inputs in {shorts(inputs)}{why}."
            wanted = {door} if door is not None else computed
            if computed and outputs - wanted:
                yield f"{where}: outputs planned in {shorts(wanted)}, found {shorts(outputs - wanted)}{why}."


def _door(unit: UnitPlan, module: nn.Module, is_top: bool, precision: Precision) -> torch.dtype | None:
    """What a module's outputs are cast to."""
    if precision is not POLICY:
        return None
    border = unit.borders.get(module)
    if border is not None:
        return border.output_dtype
    return unit.policy.output_dtype if is_top else None


def _path(module: nn.Module, members: list[Member]) -> str:
    return members[0].name.rpartition(".")[0] or type(module).__name__


def _title(unit: UnitPlan) -> str:
    return f"Unit {unit_title(unit.name)!r}"


# --- the text ----------------------------------------------------------------------------------------------------


def text(plan: ModelPlan, findings: Findings, differing: list[str], surprises: list[str]) -> str:
    stages = [stage for stage in Stage if stage is not Stage.GRADIENT]
    head = ["unit", "parameters", "", *(stage.value for stage in stages)]
    lines = table(head, _fold(plan, lambda unit: _parameter_lines(unit, findings, stages)), numbers=(1,))
    doors = table(_DOORS, _fold(plan, lambda unit: _door_line(unit, findings)))
    steps = f"Steps of an optimizer: {findings.steps or 'none'}."
    apart = ["Differences:", *(f"- {each}" for each in differing[:_SHOWN])] if differing else ["No differences."]
    if len(differing) > _SHOWN:
        apart.append(f"- and {len(differing) - _SHOWN} more, all of them in `differences`")
    return "\n".join([*lines, "", *doors, "", steps, "", *apart, "", *listed_surprises(surprises)])


def _fold(plan: ModelPlan, lines_of: Callable[[UnitPlan], list[list[str]]]) -> list[list[str]]:
    """The lines of every unit, those that are the same once, behind the names of the units."""
    alike: dict[Any, list[str]] = {}
    for unit in plan.units:
        alike.setdefault(tuple(tuple(line) for line in lines_of(unit)), []).append(unit.name)
    return [
        [titles(names) if number == 0 else "", *line]
        for lines, names in alike.items()
        for number, line in enumerate(lines)
    ]


def _parameter_lines(unit: UnitPlan, findings: Findings, stages: Sequence[Stage]) -> list[list[str]]:
    lines = []
    for row in unit.rows:
        members = [each for each in unit.members if each.name in row.names]
        want = [_planned_cell(unit, members, stage) for stage in stages]
        have = [_found_cell(findings, members, stage) for stage in stages]
        lines += [[str(len(members)), "planned", *want], ["", "found", *have]]
    return lines or [["0", "", *[NOTHING] * len(stages)]]


def _planned_cell(unit: UnitPlan, members: list[Member], stage: Stage) -> str:
    if stage is Stage.ALL_REDUCED and not unit.replicated:
        return NOTHING
    usual, stored = (shorts(d for each in members for d in planned(stage, each, which)) for which in Precision)
    return f"{usual}, eval {stored}" if unit.policy.full_precision_in_eval and stored != usual else usual


def _found_cell(findings: Findings, members: list[Member], stage: Stage) -> str:
    usual, stored = (shorts(d for each in members for d in findings.of(stage, each, which)) for which in Precision)
    return usual if stored in (NOTHING, usual) else f"{usual}, eval {stored}"


def _door_line(unit: UnitPlan, findings: Findings) -> list[list[str]]:
    tops = unit.state.modules()
    inputs = {d for top in tops for each in Precision for d in findings.inputs.get((top, each), ())}
    outputs = {d for top in tops for each in Precision for d in findings.outputs.get((top, each), ())}
    seen = {d for each in unit.buffers for p in Precision for d in findings.buffers.get((each.name, p), ())}
    to, out = inputs_planned(unit, POLICY), outputs_planned(unit, POLICY)
    return [
        [
            shorts([to] if to else [], AS_IT_COMES),
            shorts(inputs),
            shorts([out] if out else [], AS_IT_COMES),
            shorts(outputs),
            shorts(each.seen for each in unit.buffers),
            shorts(seen),
        ]
    ]
