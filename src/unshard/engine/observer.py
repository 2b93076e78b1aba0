"""Ways to watch a run: an observer sees collectives (for audits); loggers and profilers see the stages of units.

While nobody watches, the cost is one comparison per collective and one call per hook.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from torch.profiler import record_function

from ..torch_private import never_compiled, profiler_enabled

Members = Sequence[tuple[int, ...]]
"""For each tensor of a collective, the numbers of the parameters in it."""


current: Any = None
"""The observer (`tools/precision_audit.py`). It must change nothing, keep no tensor and issue no collective.

Every unit of the process calls `all_gathering`, `reducing` and `all_reducing` when it issues these collectives;
`unsharded` and `delivered` when the unsharded parameters and the `.grad`s are complete; `keeping` when a backward
without synchronization leaves sums. All threads share the observer, because autograd has its own threads.
"""

log = logging.getLogger("unshard")
_Method = TypeVar("_Method", bound=Callable[..., Any])

_prefix = "unshard"
_second_log: logging.Logger | None = None


def name_stages(prefix: str = "unshard", logger: logging.Logger | None = None) -> None:
    """Show stages as `prefix::stage (unit)` in profiles, and also log these names to `logger`, if any."""
    global _prefix, _second_log
    _prefix, _second_log = prefix, logger


def traced(stage: str) -> Callable[[_Method], _Method]:
    """Decorate a method as a stage, which logs and profiles show and `torch.compile` skips. `self` needs a `unit`."""

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
