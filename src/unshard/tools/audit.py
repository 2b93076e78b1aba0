"""Compares what really happens in some steps with the plan."""

from __future__ import annotations

from types import TracebackType
from typing import Any

from torch import nn

from ..engine import observer
from ..errors import StateError
from .comparison import differences, text
from .findings import Casts, Findings, Stage
from .plan import Member, plan_of
from .surprises import surprises
from .words import quoted, shorts


class PrecisionAudit:
    """`differences`: where what was found is not what was planned. `str()`: a table of both, differences, surprises."""

    def __init__(self, model: nn.Module, optimizer: Any = None):
        self._model, self._optimizer = model, optimizer
        self._plan = plan_of(model, optimizer)
        self._findings = Findings(self._plan, optimizer)
        self._handles: list[Any] = []
        self._casts = Casts(self._findings)

    def __enter__(self) -> PrecisionAudit:
        if observer.current is not None:
            raise StateError(
                "Another precision audit is under way, and the engine has room for one observer. Leave that block "
                "first, or audit the whole model in one."
            )
        # As the model is now: it may have been converted since the audit was made.
        self._plan = plan_of(self._model, self._optimizer)
        self._findings = Findings(self._plan, self._optimizer)
        self._handles = self._findings.install()
        self._casts = Casts(self._findings)
        self._casts.__enter__()
        observer.current = self._findings
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
        """How often an optimizer stepped that holds parameters of the model."""
        return self._findings.steps

    @property
    def differences(self) -> list[str]:
        return differences(self._plan, self._findings)

    @property
    def surprises(self) -> list[str]:
        """Those of the plan, with the optimizer's state as it is by now, and those of the steps."""
        return surprises(plan_of(self._model, self._optimizer), self._optimizer) + self._of_steps()

    def _of_steps(self) -> list[str]:
        found, findings = [], self._findings
        members = [each for unit in self._plan.units for each in unit.members]
        learning = [each for each in members if findings.of(Stage.GRAD, each)]
        if self._optimizer is not None and not findings.steps:
            found.append(
                f"The {type(self._optimizer).__name__} never stepped on parameters of the model: call its step() "
                "inside the audit, build it of model.parameters(), and see whether a gradient scaler skips all steps."
            )
        elif findings.steps:
            idle = [each.name for each in learning if not findings.of(Stage.UPDATED, each)]
            if idle:
                found.append(
                    f"Parameters {quoted(idle)} got gradients, but no optimizer that stepped holds them; add them to "
                    "one, or freeze them."
                )
        rounded = [each for each in members if self._sums_rounded(each)]
        if rounded:
            found.append(
                f"Parameters {quoted([each.name for each in rounded])}: sums of several backwards, kept in "
                f"{shorts(each.dtypes.reduce for each in rounded)}, were rounded to "
                f"{shorts(each.dtypes.wire for each in rounded)} when they were sent; leave wire_dtype None where "
                "gradients are accumulated without synchronisation."
            )
        if findings.autocast:
            names = {module: name for name, module in self._model.named_modules()}
            modules = [names.get(module, type(module).__name__) or "(root)" for module in findings.autocast]
            found.append(
                f"Modules {quoted(modules)} ran inside autocast to {shorts(findings.autocast.values())}, which chooses "
                "a dtype for every operation, whatever the policy says; leave it away and let param_dtype decide."
            )
        return found

    def _sums_rounded(self, member: Member) -> bool:
        """A wire as wide as the gradients loses nothing of one backward, but digits of a sum of several."""
        kept, sent = (self._findings.of(stage, member) for stage in (Stage.KEPT, Stage.WIRE))
        return bool(kept and sent) and min(d.itemsize for d in sent) < min(d.itemsize for d in kept)

    def __str__(self) -> str:
        return text(self._plan, self._findings, self.differences, self.surprises)


def precision_audit(model: nn.Module, optimizer: Any = None) -> PrecisionAudit:
    """A context in which steps of a sharded `model` are watched, and compared with `precision`'s plan afterwards.

    Adds no collective and changes no result. With `optimizer`, only its steps are looked at.
    """
    return PrecisionAudit(model, optimizer)
