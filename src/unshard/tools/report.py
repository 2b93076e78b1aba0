"""In which precision a sharded model will compute, reduce and learn: a table, before the first step."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, TextIO

import torch.distributed as dist
from torch import nn

from .plan import Door, ModelPlan, Row, UnitPlan, plan_of
from .surprises import surprises
from .words import NOTHING, short, shorts, table, titles

_STAGES = ("stored", "gathered", "computed", "wire", "reduced", "sums kept", ".grad", "updated", "optimizer state")
_HEAD = ("unit", "parameters", "elements", *_STAGES)
_DOORS = ("unit", "inputs cast to", "outputs cast to", "buffers stored", "seen by forward", "in eval()")
AS_IT_COMES = "as they come"


@dataclass(frozen=True)
class PrecisionReport:
    """`str()` of it is the text. `rows`: one per unit and set of dtypes. `surprises`: what was probably not meant."""

    plan: ModelPlan
    surprises: list[str]

    @property
    def rows(self) -> list[Row]:
        return self.plan.rows

    def __str__(self) -> str:
        units, rows = self.plan.units, self.rows
        count, elements = sum(row.parameters for row in rows), sum(row.elements for row in rows)
        ranks = max(unit.ranks for unit in units)
        lines = [
            f"Precision of {_count(len(units), 'unit')}, {_count(count, 'parameter')}, {elements:,} elements; "
            f"gradients are reduced over {_count(ranks, 'rank')}.",
            "",
            *table(_HEAD, [line for group in folded(units) for line in _parameter_lines(group)], numbers=(1, 2)),
            "",
            *table(_DOORS, [line for group in folded(units) for line in _door_lines(group)]),
        ]
        if len(folded(units)) < len(units):
            lines += ["", "Numbers of several units shown as one are those of each."]
        if any(row.state and not row.state_exists for row in rows):
            lines += ["", "* will be, once the optimizer has stepped"]
        return "\n".join(lines + ["", *listed_surprises(self.surprises)])


def precision(model: nn.Module, optimizer: Any = None, *, file: TextIO | None = None) -> PrecisionReport:
    """Report which dtypes everything in a sharded `model` has on its way, and what is surprising about that.

    Works before the first step, and on a model that is still on meta. Printed on rank 0 only, to `file` or to standard
    output; returned on every rank. With `optimizer` its state is looked at, too.
    """
    plan = plan_of(model, optimizer)
    report = PrecisionReport(plan, surprises(plan, optimizer))
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(report, file=file or sys.stdout)
    return report


def listed_surprises(found: Iterable[str]) -> list[str]:
    found = list(found)
    return ["Surprises:", *(f"- {each}" for each in found)] if found else ["No surprises."]


def folded(units: Iterable[UnitPlan]) -> list[list[UnitPlan]]:
    """Units that look the same, in the order of the first of each."""
    alike: dict[Any, list[UnitPlan]] = {}
    for unit in units:
        buffers = tuple(sorted((short(each.stored), short(each.seen)) for each in unit.buffers))
        looks = (tuple(row.looks for row in unit.rows), unit.doors, buffers)
        alike.setdefault(looks, []).append(unit)
    return list(alike.values())


def _parameter_lines(group: list[UnitPlan]) -> list[list[str]]:
    rows = group[0].rows
    label = titles([unit.name for unit in group])
    if not rows:
        return [[label, "0", "0", *[NOTHING] * (len(_HEAD) - 3)]]
    return [[label if number == 0 else "", *_cells(row)] for number, row in enumerate(rows)]


def _cells(row: Row) -> list[str]:
    state = shorts(row.state) + ("" if row.state_exists or not row.state else "*")
    return [
        f"{row.parameters:,}",
        f"{row.elements:,}",
        short(row.stored),
        short(row.gathered, "own protocol"),
        short(row.computed),
        *(short(dtype) for dtype in (row.wire, row.reduced, row.kept, row.grad)),
        short(row.updated, "frozen"),
        state,
    ]


def _door_lines(group: list[UnitPlan]) -> list[list[str]]:
    first, lines = group[0], []
    for door in first.doors:
        label = titles([unit.name for unit in group]) if not door.modules else "  " + ", ".join(door.modules)
        pairs = sorted({(short(each.stored), short(each.seen)) for each in first.buffers}) if not door.modules else []
        stored, seen = ("+".join(dict.fromkeys(column)) for column in zip(*pairs, strict=True)) if pairs else ("", "")
        lines.append([label, *_casts(door), stored or NOTHING, seen or NOTHING, _in_eval(first, door)])
    return lines


def _casts(door: Door) -> tuple[str, str]:
    return short(door.inputs, AS_IT_COMES), short(door.outputs, AS_IT_COMES)


def _in_eval(unit: UnitPlan, door: Door) -> str:
    if door.in_eval:
        return "the same"
    return (
        "no casts"
        if door.modules
        else f"as stored ({shorts(row.stored for row in unit.rows if row.stored.is_floating_point)})"
    )


def _count(number: int, thing: str) -> str:
    return f"{number:,} {thing}{'' if number == 1 else 's'}"
