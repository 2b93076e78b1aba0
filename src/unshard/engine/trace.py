"""The hooks' own wrapper: keeps the compiler out, and tells loggers and profilers which stage runs.

Costs one call while nobody compiles, logs or profiles.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any, TypeVar

from torch.profiler import record_function

from ..torch_private import never_compiled, profiler_enabled

log = logging.getLogger("unshard")
_Method = TypeVar("_Method", bound=Callable[..., Any])

_prefix = "unshard"
_second_log: logging.Logger | None = None


def name_stages(prefix: str = "unshard", logger: logging.Logger | None = None) -> None:
    """Call stages `prefix::stage (unit)` in profiles, and log them under that name to `logger`, too."""
    global _prefix, _second_log
    _prefix, _second_log = prefix, logger


def traced(stage: str) -> Callable[[_Method], _Method]:
    """Make a method of something that has a `unit` a stage of it, which `torch.compile` does not trace."""

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
