"""Says what is going on: log records at debug level, and ranges in a profile. Costs nothing while nobody listens."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any, TypeVar

from torch.profiler import record_function

from ..torch_private import profiling

log = logging.getLogger("unshard")
_Method = TypeVar("_Method", bound=Callable[..., Any])


def traced(stage: str) -> Callable[[_Method], _Method]:
    """Make a method of something that has a `unit` a stage of it."""

    def decorate(method: _Method) -> _Method:
        @functools.wraps(method)
        def call(self: Any, *args: Any) -> Any:
            if log.isEnabledFor(logging.DEBUG):
                log.debug("%s: %s", stage, self.unit)
            if not profiling():
                return method(self, *args)
            with record_function(f"unshard::{stage} ({self.unit.name})"):
                return method(self, *args)

        return call  # type: ignore[return-value]

    return decorate
