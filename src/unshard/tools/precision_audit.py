"""Compares the dtypes in real steps with the plan."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Any

import torch
from torch import nn

from ..engine.api import Precision, observer
from ..errors import StateError
from .formatting import NOTHING, quoted, shared_title, shorts, table, unit_title
from .precision_plan import ModelPlan, ParamPlan, UnitPlan, plan_of
from .precision_recorder import CastRecorder, Dtypes, PrecisionRecorder, Stage, modules_with_params
from .precision_report import NOT_CAST, surprise_lines, surprises_of

_POLICY = Precision.POLICY
_SHOWN = 20  # one cause often makes a difference in every block
_BOUNDARIES = ("unit", "inputs planned", "found", "outputs planned", "found", "buffers planned", "found")


class PrecisionAudit:
    """`differences`: where a dtype is not the planned one. `str(audit)`: a table of both, differences, surprises."""

    def __init__(self, model: nn.Module, optimizer: Any = None):
        self._model, self._optimizer = model, optimizer
        self._plan = plan_of(model, optimizer)
        self._recorder = PrecisionRecorder(self._plan, optimizer)
        self._handles: list[Any] = []
        self._casts = CastRecorder(self._recorder)

    def __enter__(self) -> PrecisionAudit:
        if observer.current is not None:
            raise StateError(
                "Another precision audit is active, and the engine takes one observer. Leave that block first, or "
                "audit the root module, which covers all units."
            )
        # Made again: the model may have been converted since the audit was made.
        self._plan = plan_of(self._model, self._optimizer)
        self._recorder = PrecisionRecorder(self._plan, self._optimizer)
        self._handles = self._recorder.install()
        self._casts = CastRecorder(self._recorder)
        self._casts.__enter__()
        observer.current = self._recorder
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        observer.current = None
        self._casts.__exit__(kind, error, trace)
        for handle in self._handles:
            handle.remove()
        self._handles = []

    @property
    def steps(self) -> int:
        """The number of steps of optimizers that hold parameters of the model."""
        return self._recorder.steps

    @property
    def differences(self) -> list[str]:
        return _differences(self._plan, self._recorder)

    @property
    def surprises(self) -> list[str]:
        """Those of the plan, with the present state of the optimizer, and those of the steps."""
        return surprises_of(plan_of(self._model, self._optimizer), self._optimizer) + self._surprises_of_steps()

    def _surprises_of_steps(self) -> list[str]:
        found, recorder = [], self._recorder
        params = [each for unit in self._plan.units for each in unit.params]
        with_grad = [each for each in params if recorder.dtypes(Stage.GRAD, each)]
        if self._optimizer is not None and not recorder.steps:
            found.append(
                f"The {type(self._optimizer).__name__} never stepped on parameters of the model: call its step() "
                "inside the audit, build it of model.parameters(), and check whether a gradient scaler skips all steps."
            )
        elif recorder.steps:
            never_updated = [each.name for each in with_grad if not recorder.dtypes(Stage.UPDATED, each)]
            if never_updated:
                found.append(
                    f"Parameters {quoted(never_updated)} got gradients, but no optimizer that stepped holds them; add "
                    "them to one, or freeze them."
                )
        rounded = [each for each in params if self._sums_rounded(each)]
        if rounded:
            found.append(
                f"Parameters {quoted([each.name for each in rounded])}: sums of several backwards, kept in "
                f"{shorts(each.dtypes.reduce for each in rounded)}, were rounded to "
                f"{shorts(each.dtypes.wire for each in rounded)} when they were sent; leave wire_dtype None where "
                "gradients are accumulated without synchronisation."
            )
        if recorder.autocast:
            names = {module: name for name, module in self._model.named_modules()}
            modules = [names.get(module, type(module).__name__) or "(root)" for module in recorder.autocast]
            found.append(
                f"Modules {quoted(modules)} ran inside autocast to {shorts(recorder.autocast.values())}, which chooses "
                "a dtype for every operation, whatever the policy says; leave out autocast and set param_dtype."
            )
        return found

    def _sums_rounded(self, param: ParamPlan) -> bool:
        """A wire dtype as wide as gradients are does not round those of one backward, but it rounds sums of several."""
        kept, sent = (self._recorder.dtypes(stage, param) for stage in (Stage.KEPT, Stage.WIRE))
        return bool(kept and sent) and min(d.itemsize for d in sent) < min(d.itemsize for d in kept)

    def __str__(self) -> str:
        return _text(self._plan, self._recorder, self.differences, self.surprises)


def precision_audit(model: nn.Module, optimizer: Any = None) -> PrecisionAudit:
    """A context that records the dtypes in steps of a sharded `model` and compares them with the plan of `precision`.

    It adds no collective and changes no result. With `optimizer`, only its steps are recorded.
    """
    return PrecisionAudit(model, optimizer)


# -- differences ------------------------------------------------------------------------------------------------


def _planned(stage: Stage, param: ParamPlan, precision: Precision = _POLICY) -> Dtypes:
    """The dtypes that are expected at a stage; none if there is no such stage."""
    dtypes, compute = param.dtypes, param.compute_dtype(precision)
    if stage in (Stage.GATHERED, Stage.COMPUTED):
        return set() if param.extended else {compute}  # an all-gather of the tensor's own may have any dtype
    if not param.trainable:
        return set()
    if stage is Stage.GRADIENT:
        return {compute, dtypes.reduce}  # accumulated gradients have the reduce dtype
    if stage is Stage.STATE:
        return set(param.state) if param.state else {dtypes.original}
    if stage is Stage.WIRE:
        return {dtypes.wire}
    summed = stage in (Stage.KEPT, Stage.REDUCED, Stage.ALL_REDUCED)
    return {dtypes.reduce} if summed else {dtypes.original}


def _differences(plan: ModelPlan, recorder: PrecisionRecorder) -> list[str]:
    found: list[str] = []
    for unit in plan.units:
        found += _parameter_differences(unit, recorder)
        found += _buffer_differences(unit, recorder)
        found += _boundary_differences(unit, recorder)
        found += _module_differences(unit, recorder)
    return found


def _parameter_differences(unit: UnitPlan, recorder: PrecisionRecorder) -> Iterator[str]:
    equal: dict[tuple[str, str, str], list[str]] = {}
    for param in unit.params:
        for stage in Stage:
            for precision in Precision:
                want, have = _planned(stage, param, precision), recorder.dtypes(stage, param, precision)
                if stage is Stage.GRADIENT:
                    want = want | _planned(stage, param, _POLICY)  # of a forward in the other precision
                if stage is Stage.GATHERED and _gathered_as_bytes(unit, want, precision):
                    have = have - {torch.uint8}
                if have and want and not have <= want:
                    key = (stage.value, shorts(want), shorts(have - want))
                    equal.setdefault(key, []).append(param.name)
    for (stage_name, want_text, have_text), names in equal.items():
        yield f"{_title(unit)}: {stage_name} planned {want_text}, found {have_text} ({quoted(names)})."

    casts = [(each, to) for each in unit.params for to in recorder.casts.get(each.param, ())]
    for param, dtype in casts:
        want = _planned(Stage.COMPUTED, param, unit.state.unit.precision)
        yield (
            f"{_title(unit)}: {param.name!r} planned to be computed with in {shorts(want)}, found converted to "
            f"{shorts([dtype])} by the model's own code."
        )


def _gathered_as_bytes(unit: UnitPlan, dtypes: Dtypes, precision: Precision) -> bool:
    """Several dtypes in one collective are sent as bytes, and so are dtypes that a backend does not support."""
    together = {each.compute_dtype(precision) for each in unit.params} | dtypes
    return len(together) > 1 or any(dtype.itemsize == 1 for dtype in dtypes)


def _buffer_differences(unit: UnitPlan, recorder: PrecisionRecorder) -> Iterator[str]:
    for each in unit.buffers:
        for precision in Precision:
            want = each.seen if precision is _POLICY else each.stored
            have = recorder.buffers.get((each.name, precision), set()) - {want}
            if have:
                yield f"{_title(unit)}: buffer {each.name!r} planned {shorts([want])}, found {shorts(have)} in forward."


def _boundary_differences(unit: UnitPlan, recorder: PrecisionRecorder) -> Iterator[str]:
    for module in unit.state.modules():
        for precision in Precision:
            for name, want, have in (
                ("inputs", _planned_input(unit, precision), recorder.inputs.get((module, precision), set())),
                ("outputs", _planned_output(unit, precision), recorder.outputs.get((module, precision), set())),
            ):
                if want is not None and have - {want}:
                    yield f"{_title(unit)}: {name} planned {shorts([want])}, found {shorts(have - {want})}."


def _planned_input(unit: UnitPlan, precision: Precision) -> torch.dtype | None:
    return unit.state.unit.compute_dtype_in(precision) if unit.state.casts_inputs else None


def _planned_output(unit: UnitPlan, precision: Precision) -> torch.dtype | None:
    return unit.policy.output_dtype if precision is _POLICY else None


def _module_differences(unit: UnitPlan, recorder: PrecisionRecorder) -> Iterator[str]:
    """Modules that compute with parameters of their own only: their inputs and outputs show the dtype."""
    tops = unit.state.modules()
    for module, params in modules_with_params(unit).items():
        if any(True for child in module.children() for _ in child.parameters()):
            continue  # what it returns may come from a module inside
        for precision in Precision:
            computed = {d for each in params if (d := each.compute_dtype(precision)).is_floating_point}
            output_dtype = _output_dtype(unit, module, module in tops, precision)
            inputs = recorder.inputs.get((module, precision), set())
            outputs = recorder.outputs.get((module, precision), set())
            autocast = recorder.autocast.get(module)
            where = f"{_title(unit)}, module {_path(module, params)!r}"
            why = f" (inside autocast to {shorts([autocast])})" if autocast else ""
            if computed and inputs and not inputs & computed:
                yield f"{where}: computation planned in {shorts(computed)}, found inputs in {shorts(inputs)}{why}."
            wanted = {output_dtype} if output_dtype is not None else computed
            if computed and outputs - wanted:
                yield f"{where}: outputs planned in {shorts(wanted)}, found {shorts(outputs - wanted)}{why}."


def _output_dtype(unit: UnitPlan, module: nn.Module, is_top: bool, precision: Precision) -> torch.dtype | None:
    """The dtype to which a module's outputs are cast, if they are."""
    if precision is not _POLICY:
        return None
    own = unit.module_policies.get(module)
    if own is not None:
        return own.output_dtype
    return unit.policy.output_dtype if is_top else None


def _path(module: nn.Module, params: list[ParamPlan]) -> str:
    return params[0].name.rpartition(".")[0] or type(module).__name__


def _title(unit: UnitPlan) -> str:
    return f"Unit {unit_title(unit.name)!r}"


# -- the text ----------------------------------------------------------------------------------------------------


def _text(plan: ModelPlan, recorder: PrecisionRecorder, differing: list[str], surprises: list[str]) -> str:
    stages = [stage for stage in Stage if stage is not Stage.GRADIENT]
    head = ["unit", "parameters", "", *(stage.value for stage in stages)]
    lines = table(head, _lines_of_units(plan, lambda unit: _parameter_lines(unit, recorder, stages)), numbers=(1,))
    boundaries = table(_BOUNDARIES, _lines_of_units(plan, lambda unit: _boundary_line(unit, recorder)))
    steps = f"Steps of an optimizer: {recorder.steps or 'none'}."
    differences = ["Differences:", *(f"- {each}" for each in differing[:_SHOWN])] if differing else ["No differences."]
    if len(differing) > _SHOWN:
        differences.append(f"- and {len(differing) - _SHOWN} more, all of them in `differences`")
    return "\n".join([*lines, "", *boundaries, "", steps, "", *differences, "", *surprise_lines(surprises)])


def _lines_of_units(plan: ModelPlan, lines_of: Callable[[UnitPlan], list[list[str]]]) -> list[list[str]]:
    """The lines of every unit after its name; units with equal lines are listed once."""
    equal: dict[Any, list[str]] = {}
    for unit in plan.units:
        equal.setdefault(tuple(tuple(line) for line in lines_of(unit)), []).append(unit.name)
    return [
        [shared_title(names) if number == 0 else "", *line]
        for lines, names in equal.items()
        for number, line in enumerate(lines)
    ]


def _parameter_lines(unit: UnitPlan, recorder: PrecisionRecorder, stages: Sequence[Stage]) -> list[list[str]]:
    lines = []
    for row in unit.rows:
        params = [each for each in unit.params if each.name in row.names]
        want = [_planned_cell(unit, params, stage) for stage in stages]
        have = [_found_cell(recorder, params, stage) for stage in stages]
        lines += [[str(len(params)), "planned", *want], ["", "found", *have]]
    return lines or [["0", "", *[NOTHING] * len(stages)]]


def _planned_cell(unit: UnitPlan, params: list[ParamPlan], stage: Stage) -> str:
    if stage is Stage.ALL_REDUCED and not unit.replicated:
        return NOTHING
    usual, stored = (shorts(d for each in params for d in _planned(stage, each, which)) for which in Precision)
    return f"{usual}, eval {stored}" if unit.policy.full_precision_in_eval and stored != usual else usual


def _found_cell(recorder: PrecisionRecorder, params: list[ParamPlan], stage: Stage) -> str:
    usual, stored = (shorts(d for each in params for d in recorder.dtypes(stage, each, which)) for which in Precision)
    return usual if stored in (NOTHING, usual) else f"{usual}, eval {stored}"


def _boundary_line(unit: UnitPlan, recorder: PrecisionRecorder) -> list[list[str]]:
    tops = unit.state.modules()
    inputs = {d for top in tops for each in Precision for d in recorder.inputs.get((top, each), ())}
    outputs = {d for top in tops for each in Precision for d in recorder.outputs.get((top, each), ())}
    seen = {d for each in unit.buffers for p in Precision for d in recorder.buffers.get((each.name, p), ())}
    to, out = _planned_input(unit, _POLICY), _planned_output(unit, _POLICY)
    return [
        [
            shorts([to] if to else [], NOT_CAST),
            shorts(inputs),
            shorts([out] if out else [], NOT_CAST),
            shorts(outputs),
            shorts(each.seen for each in unit.buffers),
            shorts(seen),
        ]
    ]
