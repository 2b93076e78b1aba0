"""Reports the planned dtypes of a sharded model and flags dtypes that look unintended."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TextIO

import torch
import torch.distributed as dist
from torch import nn

from .. import __version__
from ..engine.api import unsharded_name
from ..errors import listed
from ..names import optimizer_parameters
from ..policies import MixedPrecisionPolicy, matches
from ..torch_private import BATCH_NORM
from .precision_plan import ModelPlan, ParamPlan, Row, UnitPlan, owned_modules, plan_of, state_tensors

_STAGES = ("stored", "gathered", "computed", "wire", "reduced", "sums kept", ".grad", "updated", "optimizer state")
_HEAD = ("unit", "parameters", "elements", *_STAGES)
_BOUNDARIES = ("unit", "inputs cast to", "outputs cast to", "buffers stored", "seen by forward", "in eval()")
_DTYPES = ("stored", "gathered", "computed", "wire", "reduced", "kept", "grad", "updated")
NOTHING = "-"
NOT_CAST = "not cast"
_MANY_RANKS = 8
"""Flag 16-bit sums over more ranks than this. bf16 has only 8 significant bits, so long sums lose precision."""
_POSITION_TABLES = ("*inv_freq*", "*freqs*")
"""Name patterns of buffers that encode positions. In 16 bits, large neighboring positions round to equal values."""


@dataclass(frozen=True)
class PrecisionReport:
    """The report that `precision` returns. `rows` has a row per unit and set of dtypes; `surprises` look unintended."""

    plan: ModelPlan
    surprises: list[str]

    @property
    def rows(self) -> list[Row]:
        return [row for unit in self.plan.units for row in unit.rows]

    def to_dict(self) -> dict[str, Any]:
        return {"kind": "precision", "unshard": __version__, "units": units_of(self.plan), "findings": self.surprises}

    def __str__(self) -> str:
        units, rows = self.plan.units, self.rows
        count, elements = sum(row.parameters for row in rows), sum(row.elements for row in rows)
        ranks = max(unit.ranks for unit in units)
        parameters = lines_of_units(units, _parameter_lines)
        lines = [
            f"Precision of {_count(len(units), 'unit')}, {_count(count, 'parameter')}, {elements:,} elements; "
            f"gradients are reduced over {_count(ranks, 'rank')}.",
            "",
            *table(_HEAD, parameters, numbers=(1, 2)),
            "",
            *table(_BOUNDARIES, lines_of_units(units, _boundary_lines)),
        ]
        if sum(bool(line[0]) for line in parameters) < len(units):
            lines += ["", "On lines of several units, numbers are per unit."]
        if any(row.state and not row.state_exists for row in rows):
            lines += ["", "* expected after the first step of the optimizer"]
        return "\n".join(lines + ["", *surprise_lines(self.surprises)])


def precision(model: nn.Module, optimizer: Any = None, *, file: TextIO | None = None) -> PrecisionReport:
    """Report the dtypes of a sharded `model` at every stage of a step, and flag dtypes that look unintended.

    You can call this before the first step and for models on the meta device. Every rank returns the report, and rank 0
    also prints it to `file` (default: standard output). With `optimizer`, the report includes the optimizer's state.
    Raises an ArgumentError if `model` is not sharded. Example: `report = precision(model, optimizer)`.
    """
    plan = plan_of(model, optimizer)
    report = PrecisionReport(plan, surprises_of(plan, optimizer))
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(report, file=file or sys.stdout)
    return report


def units_of(plan: ModelPlan) -> list[dict[str, Any]]:
    """Return the rows of a plan as plain values, with short names of dtypes."""
    found = []
    for row in (row for unit in plan.units for row in unit.rows):
        dtypes = {name: getattr(row, name) for name in _DTYPES}
        found.append(
            {
                "name": row.unit,
                "parameters": list(row.names),
                "elements": row.elements,
                **{name: None if dtype is None else short(dtype) for name, dtype in dtypes.items()},
                "state": [short(dtype) for dtype in row.state],
            }
        )
    return found


# -- the text ----------------------------------------------------------------------------------------------------


def short(dtype: torch.dtype | None, otherwise: str = NOTHING) -> str:
    """Abbreviate a dtype, for example as bf16, fp32, int64 or fp8_e4m3fn. Return `otherwise` for None."""
    if dtype is None:
        return otherwise
    if dtype == torch.uint8:
        return "bytes"  # a collective sends several dtypes as uint8
    name = str(dtype).removeprefix("torch.")
    return name.replace("bfloat", "bf") if name.startswith("bfloat") else name.replace("float", "fp")


def shorts(dtypes: Iterable[torch.dtype], otherwise: str = NOTHING) -> str:
    return "+".join(sorted({short(dtype) for dtype in dtypes})) or otherwise


def quoted(names: Iterable[str]) -> str:
    """Format distinct names in the given order. If there are many, format the first and count the others."""
    return listed(map(repr, dict.fromkeys(names)))


def unit_title(name: str) -> str:
    return name or "(root)"


def shared_title(names: Sequence[str]) -> str:
    """Return the title of units that share a line of a table, such as "blocks.0 … blocks.15 (16 units)"."""
    shown = [unit_title(name) for name in names]
    if len(shown) <= 2:
        return " and ".join(shown)
    return f"{shown[0]} … {shown[-1]} ({len(shown)} units)"


def table(head: Sequence[str], rows: Sequence[Sequence[str]], numbers: Iterable[int] = ()) -> list[str]:
    """Return the lines of a table, in which the columns in `numbers` are right-aligned."""
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


def lines_of_units(units: Iterable[UnitPlan], lines_of: Callable[[UnitPlan], list[list[str]]]) -> list[list[str]]:
    """Return the table lines of all units. Units with equal lines share them, and the first cell names these units."""
    equal: dict[Any, list[str]] = {}
    for unit in units:
        equal.setdefault(tuple(tuple(line) for line in lines_of(unit)), []).append(unit.name)
    return [
        [shared_title(names) if number == 0 else line[0], *line[1:]]
        for lines, names in equal.items()
        for number, line in enumerate(lines)
    ]


def surprise_lines(found: list[str]) -> list[str]:
    return ["Surprises:", *(f"- {each}" for each in found)] if found else ["No surprises."]


def _parameter_lines(unit: UnitPlan) -> list[list[str]]:
    lines = [
        [
            "",
            f"{row.parameters:,}",
            f"{row.elements:,}",
            short(row.stored),
            short(row.gathered, "own protocol"),
            short(row.computed),
            *(short(dtype) for dtype in (row.wire, row.reduced, row.kept, row.grad)),
            short(row.updated, "frozen"),
            shorts(row.state) + ("" if row.state_exists or not row.state else "*"),
        ]
        for row in unit.rows
    ]
    return lines or [["", "0", "0", *[NOTHING] * (len(_HEAD) - 3)]]


def _boundary_lines(unit: UnitPlan) -> list[list[str]]:
    policy, in_eval, modules_in_eval = unit.policy, "the same", "the same"
    if policy.full_precision_in_eval:
        stored = shorts(row.stored for row in unit.rows if row.stored.is_floating_point)
        in_eval, modules_in_eval = f"as stored ({stored})", "no casts"
    pairs = sorted({(short(each.stored), short(each.seen)) for each in unit.buffers})
    buffers = ["+".join(dict.fromkeys(column)) for column in zip(*pairs, strict=True)] or [NOTHING, NOTHING]
    inputs = policy.param_dtype if unit.casts_inputs else None
    lines = [["", short(inputs, NOT_CAST), short(policy.output_dtype, NOT_CAST), *buffers, in_eval]]
    paths = {module: prefix.removesuffix(".") for _, prefix, module in owned_modules(unit.state)}
    equal: dict[MixedPrecisionPolicy, list[str]] = {}
    for module, own in unit.module_policies.items():
        equal.setdefault(own, []).append(paths.get(module, type(module).__name__))
    for own, names in equal.items():
        inputs = own.param_dtype if own.cast_forward_inputs else None
        casts = [short(inputs, NOT_CAST), short(own.output_dtype, NOT_CAST)]
        lines.append(["  " + ", ".join(names), *casts, NOTHING, NOTHING, modules_in_eval])
    return lines


def _count(number: int, thing: str) -> str:
    return f"{number:,} {thing}{'' if number == 1 else 's'}"


# -- surprises --------------------------------------------------------------------------------------------------


def surprises_of(plan: ModelPlan, optimizer: Any = None) -> list[str]:
    """Describe dtypes that look unintended. Each description names the tensors or units, and suggests a remedy."""
    found: list[Iterator[str]] = [_stored_in_16_bits(plan), _stored_in_fp64(plan)]
    if optimizer is not None:
        found += [_narrow_state(plan, optimizer), _parameters_of_others(plan, optimizer)]
    found += [_unmanaged(plan), _reductions(plan), _fp16(plan), _buffers(plan), _statistics(plan), _outputs(plan)]
    found += [_unmatched_patterns(plan.units), _modules_without_casts(plan.units), _some_in_eval(plan.units)]
    return [text[:1].upper() + text[1:] for each in found for text in each]


def _is_16_bit(dtype: torch.dtype | None) -> bool:
    return dtype is not None and dtype.is_floating_point and dtype.itemsize <= 2


def _trainable(plan: ModelPlan, wanted: Callable[[ParamPlan], bool]) -> list[ParamPlan]:
    return [each for each in plan.params if each.trainable and wanted(each)]


def _units_with(plan: ModelPlan, wanted: Callable[[ParamPlan], bool]) -> list[UnitPlan]:
    return [unit for unit in plan.units if any(each.trainable and wanted(each) for each in unit.params)]


def _names(params: Iterable[ParamPlan]) -> str:
    names = [each.name for each in params]
    return ("parameter " if len(names) == 1 else "parameters ") + quoted(names)


def _units(units: Iterable[UnitPlan]) -> str:
    titles = [unit_title(unit.name) for unit in units]  # formatted as: units 'a', 'b', 'c' and 4 more
    return ("unit " if len(set(titles)) == 1 else "units ") + quoted(titles)


def _stored_in_16_bits(plan: ModelPlan) -> Iterator[str]:
    stored = _trainable(plan, lambda each: _is_16_bit(each.dtypes.original))
    if stored:
        dtypes = shorts(each.dtypes.original for each in stored)
        narrow = stored[0].dtypes.original
        yield (
            f"{_names(stored)}: stored in {dtypes}, so the optimizer updates in 16 bits and loses small updates; keep "
            f"them in fp32 and set param_dtype={narrow} to compute in {short(narrow)}."
        )


def _stored_in_fp64(plan: ModelPlan) -> Iterator[str]:
    double = (torch.float64, torch.complex128)
    names = [each.name for each in plan.params if each.dtypes.original in double]
    names += [name for name, parameter in plan.unmanaged if parameter.dtype in double]
    buffers = [each.name for each in plan.buffers if each.stored in double]
    for kind, found in (("parameters", names), ("buffers", buffers)):
        if found:
            yield (
                f"{kind} {quoted(found)}: stored in fp64, which takes twice the memory and spreads to results; build "
                "them with dtype=torch.float32, from Python numbers or torch tensors."
            )


def _narrow_state(plan: ModelPlan, optimizer: Any) -> Iterator[str]:
    narrow: dict[tuple[str, torch.dtype], list[ParamPlan]] = {}
    for each in _trainable(plan, lambda each: not _is_16_bit(each.dtypes.original)):
        for name, tensor in state_tensors(optimizer, each.parameter):
            if tensor.dtype.itemsize < 4:
                narrow.setdefault((name, tensor.dtype), []).append(each)
    for (name, dtype), params in narrow.items():
        yield (
            f"{type(optimizer).__name__} keeps {name!r} of {_names(params)} in {short(dtype)}, narrower than fp32: "
            "long averages stop moving; keep its state in fp32."
        )


def _parameters_of_others(plan: ModelPlan, optimizer: Any) -> Iterator[str]:
    before = {id(origin): each.name for each in plan.params if (origin := each.param.origin()) is not None}
    others = [
        each for each in optimizer_parameters(optimizer) if id(each) not in plan.parameter_ids and each.requires_grad
    ]
    known = [before.get(id(each)) or unsharded_name(each) for each in others]
    if not others:
        return
    names = [name for name in known if name]
    which = f" ({quoted(names)} as they were before sharding, or unsharded)" if names else ""
    yield (
        f"{type(optimizer).__name__} holds {len(others)} parameters that are not the model's{which}. Its steps do not "
        "change the model: build the optimizer after fully_shard, while no parameters are unsharded."
    )


def _unmanaged(plan: ModelPlan) -> Iterator[str]:
    if plan.unmanaged:
        names = quoted([name for name, _ in plan.unmanaged])
        yield (
            f"Parameters {names}: in no unit (ignored, added after sharding, or the root was not sharded), so their "
            "gradients are not reduced and ranks diverge; call fully_shard(model) last, leave them out of "
            "ignored_params, or reduce their gradients yourself."
        )


def _reductions(plan: ModelPlan) -> Iterator[str]:
    rounded = _trainable(plan, lambda each: each.dtypes.reduce.itemsize < each.dtypes.compute.itemsize)
    if rounded:
        dtypes = rounded[0].dtypes
        yield (
            f"{_names(rounded)}: gradients are computed in {short(dtypes.compute)} and reduced in "
            f"{short(dtypes.reduce)}, which rounds them; set reduce_dtype={dtypes.compute}, or leave it None."
        )
    sent = _trainable(
        plan,
        lambda each: each.dtypes.wire.itemsize < min(each.dtypes.compute.itemsize, each.dtypes.reduce.itemsize),
    )
    if sent:
        dtypes = sent[0].dtypes
        yield (
            f"{_names(sent)}: gradients are computed in {short(dtypes.compute)} and wire_dtype rounds them to "
            f"{short(dtypes.wire)}; sending loses nothing only if wire_dtype is as wide as param_dtype, so leave "
            "wire_dtype None or compute in it."
        )
    narrow = _units_with(plan, lambda each: _is_16_bit(each.dtypes.reduce))
    many = [unit for unit in narrow if unit.ranks > _MANY_RANKS]
    if many:
        yield (
            f"{_units(many)}: gradients are summed in 16 bits over {max(unit.ranks for unit in many)} ranks, "
            "which rounds most summands; set reduce_dtype=torch.float32, and wire_dtype=torch.bfloat16 to send as "
            "few bytes."
        )


def _fp16(plan: ModelPlan) -> Iterator[str]:
    users = _units_with(plan, lambda each: torch.float16 in (each.dtypes.compute, each.dtypes.reduce))
    if users:
        yield (
            f"{_units(users)}: computed or reduced in fp16, in which gradients below 6e-8 vanish and sums above 65504 "
            "overflow; train with unshard.optim.GradScaler, or use torch.bfloat16."
        )


def _buffers(plan: ModelPlan) -> Iterator[str]:
    tables = [each for each in plan.buffers if any(matches(each.alias, pattern) for pattern in _POSITION_TABLES)]
    rounded = [e for e in plan.buffers if e.was not in (None, e.stored) and e.stored.itemsize <= e.was.itemsize]
    stored = [each for each in tables if _is_16_bit(each.stored) and each not in rounded]
    seen = [each for each in tables if _is_16_bit(each.seen) and each not in rounded + stored]
    if rounded:
        was, now = shorts(each.was for each in rounded if each.was), shorts(each.stored for each in rounded)
        yield (
            f"Buffers {quoted([each.name for each in rounded])}: {was} when they were sharded and {now} now, so a "
            ".to() or .half() of the model rounded them; set param_dtype in the policy instead of converting the "
            "model, and recompute the buffers."
        )
    if stored:
        yield (
            f"Buffers {quoted([each.name for each in stored])}: stored in {shorts(each.stored for each in stored)}, in "
            "which distant positions have equal values; compute them in fp32 after the last conversion of the model."
        )
    if seen:
        yield (
            f"Buffers {quoted([each.name for each in seen])}: forward sees them in "
            f"{shorts(each.seen for each in seen)} because of buffer_dtype, and distant positions have equal values; "
            "name them in keep_buffers."
        )


def _statistics(plan: ModelPlan) -> Iterator[str]:
    norms = [each for each in plan.buffers if isinstance(each.module, BATCH_NORM)]
    narrow = [each for each in norms if each.seen.itemsize < each.stored.itemsize]
    if narrow:
        yield (
            f"Statistics {quoted([each.name for each in narrow])} add up in {shorts(e.seen for e in narrow)} "
            "(buffer_dtype), in which small changes vanish; use overrides to compute these norms in their own dtype."
        )


def _outputs(plan: ModelPlan) -> Iterator[str]:
    for unit in plan.units:
        policy = unit.policy
        stored = {each.dtypes.original for each in unit.params if each.dtypes.original.is_floating_point}
        computed = {policy.param_dtype} if policy.param_dtype is not None else stored
        returned = {policy.output_dtype} if policy.output_dtype is not None else computed
        if unit.outermost and returned and all(_is_16_bit(dtype) for dtype in returned):
            dtypes = shorts(dtype for dtype in returned if dtype is not None)
            yield (
                f"Unit {unit_title(unit.name)!r}: the model returns {dtypes}, so a loss of its output is computed in "
                "16 bits; set output_dtype=torch.float32 in its policy, or call .float() on the output."
            )


def _unmatched_patterns(units: tuple[UnitPlan, ...]) -> Iterator[str]:
    """Report patterns that match nothing. Check units with equal patterns together: they may share a policy."""
    overriding: dict[tuple[str, ...], list[UnitPlan]] = {}
    keeping: dict[tuple[str, ...], list[UnitPlan]] = {}
    for unit in units:
        overriding.setdefault(tuple(override[0] for override in unit.policy.overrides), []).append(unit)
        keeping.setdefault(tuple(unit.policy.keep_buffers), []).append(unit)
    for patterns, users in overriding.items():
        names = [alias for unit in users for each in unit.params for alias in each.aliases]
        yield from _matching_nothing("overrides", patterns, users, "parameter", names)
    for patterns, users in keeping.items():
        if patterns and all(unit.policy.buffer_dtype is None for unit in users):
            yield (
                f"Patterns {quoted(patterns)} in keep_buffers of {_units(users)} have no effect: buffers are not cast; "
                "set buffer_dtype, or remove the patterns."
            )
        names = [buffer.alias for unit in users for buffer in unit.buffers]
        yield from _matching_nothing("keep_buffers", patterns, users, "floating-point buffer", names)


def _matching_nothing(
    field: str, patterns: tuple[str, ...], users: list[UnitPlan], thing: str, names: list[str]
) -> Iterator[str]:
    for pattern in patterns:
        if not any(matches(name, pattern) for name in names):
            yield (
                f"Pattern {pattern!r} in {field} matches no {thing} of {_units(users)}: names are relative to the "
                "sharded module, and units inside it have their own policies; correct or remove the pattern."
            )


def _modules_without_casts(units: tuple[UnitPlan, ...]) -> Iterator[str]:
    found: dict[tuple[str, tuple[str, ...], str], list[UnitPlan]] = {}
    for unit in units:
        inside = {module: prefix for _, prefix, module in owned_modules(unit.state)}
        covered = {inner for module in unit.module_policies for inner in module.modules()}
        for module, params in unit.modules_with_params().items():
            own = [each for each in params if each.param.policy.param_dtype != unit.policy.param_dtype]
            if own and module not in covered:
                path, names = inside.get(module, "").removesuffix("."), tuple(each.aliases[0] for each in own)
                found.setdefault((path, names, shorts(each.dtypes.compute for each in own)), []).append(unit)
    for (path, names, dtype), users in found.items():
        module_name = f"module {path!r}" if path else "the sharded module itself"
        yield (
            f"{_units(users)}: an override puts {quoted(names)} in {dtype}, but not all parameters of {module_name}, "
            "so its inputs and outputs are not cast; match all of them "
            f"({path + '.*' if path else '*'!r}), or cast in its forward."
        )


def _some_in_eval(units: tuple[UnitPlan, ...]) -> Iterator[str]:
    cast = [unit for unit in units if any(e.dtypes.compute != e.dtypes.original for e in unit.params)]
    in_full = [unit for unit in cast if unit.policy.full_precision_in_eval]
    if in_full and len(in_full) < len(cast):
        yield (
            f"{_units(in_full)}: computed in the stored dtype in eval() (full_precision_in_eval), unlike the other "
            "units, so the dtypes of inputs and parameters may differ; set it in all policies, or in none."
        )
