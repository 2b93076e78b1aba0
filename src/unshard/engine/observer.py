"""Ways to watch a run.

Observers see the collectives and the stages of units, and can audit or time them. Loggers and profilers see the stages,
too. If nothing watches the run, the cost is one comparison per collective and one call per hook.
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


class Observer:
    """Base class of observers. Every unit of the process calls these methods of every added observer.

    An observer must change nothing, keep no reference to a tensor and issue no collective. All threads use the same
    observers, because autograd runs backward in its own threads. `params` are the `ManagedParam`s of a param group.
    """

    on_compute_stream = True
    """True if reductions must be issued on the compute stream, because `reducing` reads their tensors there.

    If this is False for all observers, `reducing` is not called, and reductions stay on their side stream.
    """

    def entering(self, stage: str, unit: Any) -> None:
        """Called before a stage of a unit. Stages are the methods with the decorator `traced`."""

    def leaving(self, stage: str, unit: Any) -> None:
        """Called after a stage of a unit, also if the stage raised an exception."""

    def issued(self, work: WatchedWork) -> None:
        """Called on the compute stream when a unit has issued a collective.

        Collectives are wrapped only if an observer overrides this method. The others cost nothing per collective.
        """

    def waiting(self, work: WatchedWork) -> None:
        """Called before the compute stream, or the host, waits for a collective."""

    def waited(self, work: WatchedWork) -> None:
        """Called after the compute stream, or the host, was told to wait for a collective."""

    def all_gathering(self, params: Any, members: Members, sent: Sequence[Any]) -> None:
        """Called when a unit has issued an all-gather."""

    def unsharded(self, params: Any) -> None:
        """Called when the unsharded parameters are complete."""

    def packed(self, params: Any, gradients: Any, largest: Any) -> None:
        """Called on the compute stream when local gradients have been packed, before they are freed.

        `gradients` are the local gradients of all `params`, or a dict that maps indices of `params` to them. `largest`
        is None, or a vector with the largest absolute value of each of `params`' gradients, which is NaN if any is.
        """

    def reducing(
        self, params: Any, members: Members, gradients: Any, sent: Sequence[Any], received: Sequence[Any]
    ) -> None:
        """Called when a unit has issued a reduce-scatter. `gradients` maps indices of `params` to local gradients."""

    def all_reducing(self, params: Any, members: Members, sums: Sequence[Any]) -> None:
        """Called when a unit has issued an all-reduce over its replicas."""

    def keeping(self, params: Any, sums: Any) -> None:
        """Called when a backward without synchronization stores unreduced sums."""

    def delivered(self, params: Any) -> None:
        """Called when the `.grad`s are complete."""

    def stepped(self, optimizer: Any) -> None:
        """Called after each step of any optimizer.

        A hook that comes and goes with an observer would invalidate the recordings of captured steps.
        """


current: Any = None
"""The observer that the engine calls: None, the only one, or all of them. `add` and `remove` set it."""

on_compute_stream = False
"""True if any observer has `on_compute_stream`."""

reads_gradients = False
"""True if any observer overrides `packed`."""

_observers: list[Observer] = []
_follows_collectives = False
"""True if any observer overrides `issued`."""


def watched(kind: str, params: Any, work: Any) -> Any:
    """Return `work`, or a `WatchedWork` around it if an observer follows collectives."""
    return WatchedWork(kind, params, work) if _follows_collectives else work


class WatchedWork:
    """A collective in flight that calls observers when it is issued and when something waits for it."""

    def __init__(self, kind: str, params: Any, work: Any):
        """`kind` is "all-gather", "reduce-scatter" or "all-reduce"."""
        self.kind, self.params, self.work = kind, params, work
        self.notes: dict[Any, Any] = {}
        """What observers remember about this collective, by observer."""
        current.issued(self)

    def wait(self) -> None:
        watcher = current
        if watcher is None:
            self.work.wait()
            return
        watcher.waiting(self)
        try:
            self.work.wait()
        finally:
            watcher.waited(self)


class _All:
    """Calls every observer."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        methods = [getattr(each, name) for each in _observers]

        def call(*args: Any) -> None:
            for method in methods:
                method(*args)

        return call


def add(observer: Observer) -> None:
    """Let units call `observer`, after the observers that were added before."""
    _observers.append(observer)
    _choose()


def remove(observer: Observer) -> None:
    """Stop calling `observer`. Do nothing if it was not added."""
    if observer in _observers:
        _observers.remove(observer)
    _choose()


def _choose() -> None:
    global current, on_compute_stream, reads_gradients, _follows_collectives, _of_stages, _watches_stages
    current = None if not _observers else _observers[0] if len(_observers) == 1 else _All()
    on_compute_stream = any(each.on_compute_stream for each in _observers)
    reads_gradients = any(type(each).packed is not Observer.packed for each in _observers)
    _follows_collectives = any(type(each).issued is not Observer.issued for each in _observers)
    _of_stages = [each for each in _observers if type(each).entering is not Observer.entering]
    _watches_stages = None if _second_log is None and not _of_stages else _stages_are_watched


def _stages_are_watched() -> bool:
    return bool(_of_stages) or (_second_log is not None and _second_log.isEnabledFor(logging.DEBUG))


log = logging.getLogger("unshard")
_Method = TypeVar("_Method", bound=Callable[..., Any])

_prefix = "unshard"
_second_log: logging.Logger | None = None
_of_stages: list[Observer] = []
"""The observers that are called for stages."""
_watches_stages: Callable[[], bool] | None = None
"""Returns True if an observer or the second log follows the stages. None if there are neither."""


def name_stages(prefix: str = "unshard", logger: logging.Logger | None = None) -> None:
    """Show stages as `prefix::stage (unit)` in profiles. If `logger` is not None, also log these names to it."""
    global _prefix, _second_log
    _prefix, _second_log = prefix, logger
    _choose()


def traced(stage: str) -> Callable[[_Method], _Method]:
    """Decorate a method as a stage, so that the stage appears in logs and profiles.

    The class of the method must have an attribute `unit`. `torch.compile` does not trace the method.
    """

    def decorate(method: _Method) -> _Method:
        @never_compiled
        @functools.wraps(method)
        def call(self: Any, *args: Any) -> Any:
            if profiler_enabled() or log.isEnabledFor(logging.DEBUG):
                return watched(named, self, args)
            if _watches_stages is not None and _watches_stages():
                return watched(method if _second_log is None else named, self, args)
            return method(self, *args)

        def watched(run: Callable[..., Any], self: Any, args: Any) -> Any:
            observers = _of_stages  # `_choose` replaces the list
            for each in observers:
                each.entering(stage, self.unit)
            try:
                return run(self, *args)
            finally:
                for each in observers:
                    each.leaving(stage, self.unit)

        def named(self: Any, *args: Any) -> Any:
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
