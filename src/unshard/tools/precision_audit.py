"""Records the dtypes of real steps and compares them with the planned dtypes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.overrides import TorchFunctionMode

from .. import __version__
from ..engine.api import ManagedParam, Members, Phase, Precision, observer, tensors_in, unsharded_name
from ..errors import StateError
from ..names import FSDP_PREFIX, optimizer_parameters
from ..torch_private import never_compiled, own_buffers
from .precision_plan import ModelPlan, ParamPlan, ParamStage, UnitPlan, plan_of, state_dtypes
from .precision_report import (
    NOT_CAST,
    NOTHING,
    lines_of_units,
    quoted,
    short,
    shorts,
    surprise_lines,
    surprises_of,
    table,
    unit_title,
    units_of,
)

_POLICY = Precision.POLICY
_MOST_SHOWN = 20  # one cause often leads to a difference in every block
_BOUNDARIES = ("unit", "inputs planned", "found", "outputs planned", "found", "buffers planned", "found")
_CAST_NAMES = ("to", "type", "type_as", "float", "double", "half", "bfloat16")
_CASTS = frozenset(getattr(torch.Tensor, name) for name in _CAST_NAMES)

DtypeSet = set[torch.dtype]


class PrecisionAudit:
    """The context manager that `precision_audit` returns. `differences` lists deviations from the plan; print it."""

    def __init__(self, model: nn.Module, optimizer: Any = None):
        self._model, self._optimizer = model, optimizer
        self._prepare()

    def _prepare(self) -> None:
        self._plan = plan_of(self._model, self._optimizer)
        self._recorder = PrecisionRecorder(self._plan, self._optimizer)

    def __enter__(self) -> PrecisionAudit:
        if PrecisionRecorder.active:
            raise StateError(
                "Another precision audit is active. Leave that block first, or audit the root module, which covers all "
                "units."
            )
        self._prepare()  # again: the model may have been converted since the audit was created
        self._recorder.__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        self._recorder.__exit__(*exception)

    @property
    def steps(self) -> int:
        """The number of recorded steps of optimizers that hold parameters of the model."""
        return self._recorder.steps

    @property
    def differences(self) -> list[str]:
        """Descriptions of dtypes that differ from the plan."""
        found: list[str] = []
        for unit in self._plan.units:
            found += _parameter_differences(unit, self._recorder)
            found += _buffer_differences(unit, self._recorder)
            found += _boundary_differences(unit, self._recorder)
            found += _module_differences(unit, self._recorder)
        return found

    @property
    def surprises(self) -> list[str]:
        """Descriptions of dtypes that look unintended, in the plan or in the recorded steps."""
        return surprises_of(plan_of(self._model, self._optimizer), self._optimizer) + self._surprises_of_steps()

    def to_dict(self) -> dict[str, Any]:
        return {
            "kind": "precision",
            "unshard": __version__,
            "steps": self.steps,
            "units": units_of(self._plan),
            "findings": self.differences + self.surprises,
        }

    def _surprises_of_steps(self) -> list[str]:
        found, recorder, params = [], self._recorder, self._plan.params
        with_grad = [each for each in params if recorder.dtypes(ParamStage.GRAD, each)]
        if self._optimizer is not None and not recorder.steps:
            found.append(
                f"The {type(self._optimizer).__name__} never stepped parameters of the model: call its step() inside "
                "the audit, build it from model.parameters(), and check whether a gradient scaler skips all steps."
            )
        elif recorder.steps:
            never_updated = [each.name for each in with_grad if not recorder.dtypes(ParamStage.UPDATED, each)]
            if never_updated:
                found.append(
                    f"Parameters {quoted(never_updated)} got gradients, but no optimizer that stepped holds them; add "
                    "them to one, or freeze them."
                )
        rounded = [each for each in params if self._sums_rounded(each)]
        if rounded:
            found.append(
                f"Parameters {quoted([each.name for each in rounded])}: sums of several backwards, kept in "
                f"{shorts(each.dtypes.kept for each in rounded)}, were rounded to "
                f"{shorts(each.dtypes.wire for each in rounded)} when they were sent; leave wire_dtype None if you "
                "accumulate gradients without synchronization."
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
        """Return True if sums of several backwards were rounded to the wire dtype when they were sent."""
        kept, sent = (self._recorder.dtypes(stage, param) for stage in (ParamStage.KEPT, ParamStage.WIRE))
        return bool(kept and sent) and min(d.itemsize for d in sent) < min(d.itemsize for d in kept)

    def __str__(self) -> str:
        plan, recorder, differences = self._plan, self._recorder, self.differences
        stages = [stage for stage in ParamStage if stage is not ParamStage.GRADIENT]
        head = ["unit", "parameters", "", *(stage.value for stage in stages)]
        rows = lines_of_units(plan.units, lambda unit: _parameter_lines(unit, recorder, stages))
        boundaries = lines_of_units(plan.units, lambda unit: [_boundary_line(unit, recorder)])
        lines = [*table(head, rows, numbers=(1,)), "", *table(_BOUNDARIES, boundaries)]
        steps = f"Steps of an optimizer: {recorder.steps or 'none'}."
        shown = ["Differences:", *(f"- {each}" for each in differences[:_MOST_SHOWN])]
        if len(differences) > _MOST_SHOWN:
            shown.append(f"- and {len(differences) - _MOST_SHOWN} more, all of them in `differences`")
        shown = shown if differences else ["No differences."]
        return "\n".join([*lines, "", steps, "", *shown, "", *surprise_lines(self.surprises)])


def precision_audit(model: nn.Module, optimizer: Any = None) -> PrecisionAudit:
    """Return a context manager that records dtypes in steps of a sharded `model`, and compares them with the plan.

    The context adds no collective and changes no result. With `optimizer`, it records only this optimizer's steps.
    Raises an ArgumentError if `model` is not sharded. Example: `with precision_audit(model) as audit: train(model)`.
    """
    return PrecisionAudit(model, optimizer)


# -- recording --------------------------------------------------------------------------------------------------


class PrecisionRecorder(TorchFunctionMode, observer.Observer):
    """Records dtypes by observing the engine, modules, optimizers and torch calls. It keeps no tensors alive."""

    active = False

    def __init__(self, plan: ModelPlan, optimizer: Any = None):
        super().__init__()
        self._plan, self._optimizer = plan, optimizer
        self._handles: list[Any] = []
        self._owners = {each.param: unit for unit in plan.units for each in unit.params}
        self.parameters: defaultdict[tuple[ParamStage, ManagedParam, Precision], DtypeSet] = defaultdict(set)
        self.inputs: defaultdict[tuple[nn.Module, Precision], DtypeSet] = defaultdict(set)
        self.outputs: defaultdict[tuple[nn.Module, Precision], DtypeSet] = defaultdict(set)
        self.buffers: defaultdict[tuple[str, Precision], DtypeSet] = defaultdict(set)
        self.autocast: dict[nn.Module, torch.dtype] = {}
        self.casts: defaultdict[ManagedParam, DtypeSet] = defaultdict(set)
        """The dtypes to which the model's own code converted unsharded parameters."""
        self.steps = 0
        self._stepping: set[int] = set()  # a subclass may call its parent's step, which is not counted again

    def __enter__(self) -> PrecisionRecorder:
        self._handles += [
            register_optimizer_step_pre_hook(self._before_step),
            register_optimizer_step_post_hook(self._after_step),
        ]
        for unit in self._plan.units:
            tops = _cast_modules(unit)
            for module in dict.fromkeys([*tops, *unit.modules_with_params()]):
                # These run after the hooks that cast, which were registered before.
                before = partial(self._before_forward, unit, module in tops)
                self._handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
                self._handles.append(module.register_forward_hook(partial(self._after_forward, unit)))
        observer.add(self)
        PrecisionRecorder.active = True
        super().__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        observer.remove(self)
        PrecisionRecorder.active = False
        super().__exit__(*exception)
        while self._handles:
            self._handles.pop().remove()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Record parameter casts in the model's own code, which module inputs and outputs may not reveal."""
        result = func(*args, **(kwargs or {}))
        if func in _CASTS and unsharded_name(args[0]) is not None and result.dtype != args[0].dtype:
            for param, unit in self._owners.items():
                # Between steps, a conversion is not part of a computation.
                if param.unsharded is args[0] and unit.state.unit.phase is not Phase.IDLE:
                    self.casts[param].add(result.dtype)
        return result

    @never_compiled
    def _before_forward(self, plan: UnitPlan, is_top: bool, module: nn.Module, args: Any, kwargs: Any) -> None:
        unit = plan.state.unit
        self.inputs[module, unit.precision].update(_floats((args, kwargs)))
        if torch.is_autocast_enabled(unit.device.type):
            self.autocast[module] = torch.get_autocast_dtype(unit.device.type)
        for each in plan.buffers if is_top else ():
            buffer = own_buffers(each.module).get(each.alias.rpartition(".")[2])
            if buffer is not None:
                self.buffers[each.name, unit.precision].add(buffer.dtype)

    @never_compiled
    def _after_forward(self, plan: UnitPlan, module: nn.Module, args: Any, output: Any) -> None:
        self.outputs[module, plan.state.unit.precision].update(_floats(output))

    # -- called by the engine -------------------------------------------------------------------------------

    def all_gathering(self, params: Sequence[ManagedParam], members: Members, sent: Sequence[torch.Tensor]) -> None:
        self._all(ParamStage.GATHERED, params, members, sent)

    def unsharded(self, params: Sequence[ManagedParam]) -> None:
        for param in params:
            if param.unsharded is not None:
                self._one(ParamStage.COMPUTED, param, param.unsharded.dtype)

    def keeping(self, params: Sequence[ManagedParam], sums: Mapping[int, torch.Tensor]) -> None:
        for index, tensor in sums.items():
            self._one(ParamStage.KEPT, params[index], tensor.dtype)

    def reducing(
        self,
        params: Sequence[ManagedParam],
        members: Members,
        gradients: Mapping[int, torch.Tensor],
        sent: Sequence[torch.Tensor],
        sums: Sequence[torch.Tensor],
    ) -> None:
        for index, gradient in gradients.items():
            self._one(ParamStage.GRADIENT, params[index], gradient.dtype)
        self._all(ParamStage.WIRE, params, members, sent)
        self._all(ParamStage.REDUCED, params, members, sums)

    def all_reducing(self, params: Sequence[ManagedParam], members: Members, sums: Sequence[torch.Tensor]) -> None:
        self._all(ParamStage.ALL_REDUCED, params, members, sums)

    def delivered(self, params: Sequence[ManagedParam]) -> None:
        for param in params:
            if (grad := param.sharded.grad) is not None:
                self._one(ParamStage.GRAD, param, grad.dtype)

    def _all(
        self, stage: ParamStage, params: Sequence[ManagedParam], members: Members, tensors: Sequence[torch.Tensor]
    ) -> None:
        for inside, tensor in zip(members, tensors, strict=False):
            for index in inside:
                self._one(stage, params[index], tensor.dtype)

    def _one(self, stage: ParamStage, param: ManagedParam, dtype: torch.dtype) -> None:
        unit = self._owners.get(param)
        if unit is not None:  # None for parameters of other models
            self.parameters[stage, param, unit.state.unit.precision].add(dtype)

    def dtypes(self, stage: ParamStage, param: ParamPlan, *precisions: Precision) -> DtypeSet:
        return {d for each in precisions or Precision for d in self.parameters[stage, param.param, each]}

    # -- optimizers -----------------------------------------------------------------------------------------

    def _held_params(self, optimizer: Any) -> list[ManagedParam]:
        if self._optimizer is not None and optimizer is not self._optimizer:
            return []
        params = {id(param.sharded): param for param in self._owners}
        return [params[id(each)] for each in optimizer_parameters(optimizer) if id(each) in params]

    def _before_step(self, optimizer: Any, *unused: Any) -> None:
        held = self._held_params(optimizer)
        self.steps += bool(held) and id(optimizer) not in self._stepping
        self._stepping.add(id(optimizer))
        for param in held:
            if param.sharded.grad is not None:
                self._one(ParamStage.GRAD, param, param.sharded.grad.dtype)
                self._one(ParamStage.UPDATED, param, param.sharded.dtype)

    def _after_step(self, optimizer: Any, *unused: Any) -> None:
        self._stepping.discard(id(optimizer))
        for param in self._held_params(optimizer):
            for dtype in state_dtypes(optimizer, param.sharded) or ():
                self._one(ParamStage.STATE, param, dtype)


def _cast_modules(unit: UnitPlan) -> list[nn.Module]:
    """Return modules whose forward receives inputs that the unit casts. For a wrapper, return the wrapped module."""
    wrapped = FSDP_PREFIX.rstrip(".")
    return [dict(top.named_children()).get(wrapped, top) for top in unit.state.modules()]


def _floats(value: Any) -> DtypeSet:
    return {tensor.dtype for tensor in tensors_in(value) if tensor.is_floating_point()}


# -- differences ------------------------------------------------------------------------------------------------


def _parameter_differences(unit: UnitPlan, recorder: PrecisionRecorder) -> Iterator[str]:
    equal: dict[tuple[str, str, str], list[str]] = {}
    for param in unit.params:
        for stage in ParamStage:
            for precision in Precision:
                want, have = param.planned(stage, precision), recorder.dtypes(stage, param, precision)
                if stage is ParamStage.GRADIENT:
                    want = want | param.planned(stage, _POLICY)  # forward may have run in the policy's precision
                if stage is ParamStage.GATHERED and _gathered_as_bytes(unit, want, precision):
                    have = have - {torch.uint8}
                if have and want and not have <= want:
                    key = (stage.value, shorts(want), shorts(have - want))
                    equal.setdefault(key, []).append(param.name)
    for (stage_name, want_text, have_text), names in equal.items():
        yield f"{_title(unit)}: {stage_name} planned {want_text}, found {have_text} ({quoted(names)})."

    for param in unit.params:
        want = param.planned(ParamStage.COMPUTED, unit.state.unit.precision)
        for dtype in recorder.casts[param.param]:
            yield (
                f"{_title(unit)}: {param.name!r} planned to be computed with in {shorts(want)}, found converted to "
                f"{shorts([dtype])} by the model's own code."
            )


def _gathered_as_bytes(unit: UnitPlan, dtypes: DtypeSet, precision: Precision) -> bool:
    """Return True if the all-gather may send bytes, because its dtypes differ or have 8 bits."""
    together = {each.dtypes_in(precision).compute for each in unit.params} | dtypes
    return len(together) > 1 or any(dtype.itemsize == 1 for dtype in dtypes)


def _buffer_differences(unit: UnitPlan, recorder: PrecisionRecorder) -> Iterator[str]:
    for each in unit.buffers:
        for precision in Precision:
            want = each.seen if precision is _POLICY else each.stored
            have = recorder.buffers[each.name, precision] - {want}
            if have:
                yield f"{_title(unit)}: buffer {each.name!r} planned {shorts([want])}, found {shorts(have)} in forward."


def _boundary_differences(unit: UnitPlan, recorder: PrecisionRecorder) -> Iterator[str]:
    for module in _cast_modules(unit):
        for precision in Precision:
            for name, want, have in (
                ("inputs", _planned_input(unit, precision), recorder.inputs[module, precision]),
                ("outputs", _planned_output(unit, precision), recorder.outputs[module, precision]),
            ):
                if want is not None and have - {want}:
                    yield f"{_title(unit)}: {name} planned {shorts([want])}, found {shorts(have - {want})}."


def _planned_input(unit: UnitPlan, precision: Precision) -> torch.dtype | None:
    return unit.state.unit.compute_dtype_in(precision) if unit.casts_inputs else None


def _planned_output(unit: UnitPlan, precision: Precision) -> torch.dtype | None:
    return unit.policy.output_dtype if precision is _POLICY else None


def _module_differences(unit: UnitPlan, recorder: PrecisionRecorder) -> Iterator[str]:
    """Check modules whose children have no parameters. Inputs and outputs of such modules show the compute dtype."""
    tops = _cast_modules(unit)
    for module, params in unit.modules_with_params().items():
        if any(True for child in module.children() for _ in child.parameters()):
            continue  # its outputs may come from a module inside
        for precision in Precision:
            computed = {d for each in params if (d := each.dtypes_in(precision).compute).is_floating_point}
            policy = unit.module_policies.get(module, unit.policy if module in tops else None)
            output_dtype = policy.output_dtype if policy is not None and precision is _POLICY else None
            inputs, outputs = recorder.inputs[module, precision], recorder.outputs[module, precision]
            autocast = recorder.autocast.get(module)
            path = params[0].name.rpartition(".")[0] or type(module).__name__
            where = f"{_title(unit)}, module {path!r}"
            why = f" (inside autocast to {shorts([autocast])})" if autocast else ""
            if computed and inputs and not inputs & computed:
                yield f"{where}: computation planned in {shorts(computed)}, found inputs in {shorts(inputs)}{why}."
            wanted = {output_dtype} if output_dtype is not None else computed
            if computed and outputs - wanted:
                yield f"{where}: outputs planned in {shorts(wanted)}, found {shorts(outputs - wanted)}{why}."


def _title(unit: UnitPlan) -> str:
    return f"Unit {unit_title(unit.name)!r}"


# -- the text ----------------------------------------------------------------------------------------------------


def _parameter_lines(unit: UnitPlan, recorder: PrecisionRecorder, stages: Sequence[ParamStage]) -> list[list[str]]:
    lines = []
    for row in unit.rows:
        params = [each for each in unit.params if each.name in row.names]
        want = [_planned_cell(unit, params, stage) for stage in stages]
        have = [_found_cell(recorder, params, stage) for stage in stages]
        lines += [["", str(len(params)), "planned", *want], ["", "", "found", *have]]
    return lines or [["", "0", "", *[NOTHING] * len(stages)]]


def _planned_cell(unit: UnitPlan, params: list[ParamPlan], stage: ParamStage) -> str:
    if stage is ParamStage.ALL_REDUCED and not unit.replicated:
        return NOTHING
    usual, stored = (shorts(d for each in params for d in each.planned(stage, which)) for which in Precision)
    return f"{usual}, eval {stored}" if unit.policy.full_precision_in_eval and stored != usual else usual


def _found_cell(recorder: PrecisionRecorder, params: list[ParamPlan], stage: ParamStage) -> str:
    usual, stored = (shorts(d for each in params for d in recorder.dtypes(stage, each, which)) for which in Precision)
    return usual if stored in (NOTHING, usual) else f"{usual}, eval {stored}"


def _boundary_line(unit: UnitPlan, recorder: PrecisionRecorder) -> list[str]:
    tops = _cast_modules(unit)
    inputs = {d for top in tops for each in Precision for d in recorder.inputs[top, each]}
    outputs = {d for top in tops for each in Precision for d in recorder.outputs[top, each]}
    seen = {d for each in unit.buffers for p in Precision for d in recorder.buffers[each.name, p]}
    to, out = _planned_input(unit, _POLICY), _planned_output(unit, _POLICY)
    return [
        "",
        short(to, NOT_CAST),
        shorts(inputs),
        short(out, NOT_CAST),
        shorts(outputs),
        shorts(each.seen for each in unit.buffers),
        shorts(seen),
    ]
