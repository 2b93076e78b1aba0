"""Tools that look at a sharded model before, during and after a run. They change no result."""

import importlib
from typing import TYPE_CHECKING, Any

from .precision_audit import PrecisionAudit, precision_audit
from .precision_report import PrecisionReport, precision

# A training step imports none of these modules: the first use of a name imports its module. Modules and names differ,
# because importing a module sets an attribute of this package.
_MODULES = {
    "explain_hangs": "hangs",
    "plan": "memory_plan",
    "ledger": "memory_ledger",
    "watch": "watching",
    "timeline": "step_times",
    "verify": "verification",
    "doctor": "diagnosis",
    "record": "recording",
    "report": "html_report",
}

__all__ = [
    "PrecisionAudit",
    "PrecisionReport",
    "doctor",
    "explain_hangs",
    "ledger",
    "plan",
    "precision",
    "precision_audit",
    "record",
    "report",
    "timeline",
    "verify",
    "watch",
]

if TYPE_CHECKING:  # with `__getattr__`, all of these would be `Any`
    from .diagnosis import doctor
    from .hangs import explain_hangs
    from .html_report import report
    from .memory_ledger import ledger
    from .memory_plan import plan
    from .recording import record
    from .step_times import timeline
    from .verification import verify
    from .watching import watch
else:

    def __getattr__(name: str) -> Any:
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(importlib.import_module(f".{_MODULES[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
