"""Ways to watch a run.

An observer sees the collectives and can audit them. Loggers and profilers see the stages of units. If nothing watches
the run, the cost is one comparison per collective and one call per hook.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from torch.profiler import record_function

from ..torch_private import never_compiled, profiler_enabled

Members = Sequence[tuple[int, ...]]
"""The indices of the parameters in each tensor of a collective."""


current: Any = None
"""The observer of this process, or None. `tools/precision_audit.py` is an example.

Every unit of the process calls these methods of the observer:

- `all_gathering`, `reducing` and `all_reducing` when the unit issues these collectives
- `unsharded` when the unsharded parameters are complete
- `delivered` when the `.grad`s are complete
- `keeping` when a backward without synchronization stores unreduced sums

The observer must change nothing, keep no reference to a tensor and issue no collective. All threads use the same
observer, because autograd runs backward in its own threads.
"""

log = logging.getLogger("unshard")
_Method = TypeVar("_Method", bound=Callable[..., Any])

_prefix = "unshard"
_second_log: logging.Logger | None = None


def name_stages(prefix: str = "unshard", logger: logging.Logger | None = None) -> None:
    """Show stages as `prefix::stage (unit)` in profiles. If `logger` is not None, also log these names to it."""
    global _prefix, _second_log
    _prefix, _second_log = prefix, logger


def traced(stage: str) -> Callable[[_Method], _Method]:
    """Decorate a method as a stage, so that the stage appears in logs and profiles.

    The class of the method must have an attribute `unit`. `torch.compile` does not trace the method.
    """

    def decorate(method: _Method) -> _Method:
        @never_compiled
        @functools.wraps(method)
        def call(self: Any, *args: Any) -> Any:
            if profiler_enabled() or log.isEnabledFor(logging.DEBUG):
                return watched(self, *args)
            if _second_log is not None and _second_log.isEnabledFor(logging.DEBUG):
                return watched(self, *args)
            return method(self, *args)

        def watched(self: Any, *args: Any) -> Any:
            log.debug("%s: %s", stage, self.unit)
            name = f"{_prefix}::{stage}" if stage.startswith("root_") else f"{_prefix}::{stage} ({self.unit.name})"
            if _second_log is not None:
                _second_log.debug("%s", name)
            if not profiler_enabled():
                return method(self, *args)
            with record_function(name):
                return method(self, *args)

        return call  # type: ignore[return-value]

    return decorate
