"""Finds side effects of a step that a replay would not repeat, and the program line that stopped a recording."""

from __future__ import annotations

import random
import sys
import traceback
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ..torch_private import LIBRARY_FILES, version_of
from .signature import Arguments
from .trained import Trained

_SEED = 0x2D99787926D46932  # a seed that no program sets
_watching: list[HostEffects] = []
"""The `HostEffects` of steps that are running now."""


class HostEffects:
    """Detects changes that a step makes on the host. Create it before the step, and call `found` after the step."""

    def __init__(self, trained: Trained, arguments: Arguments):
        self.trained, self._arguments = trained, arguments
        self._versions = arguments.versions()
        self._rates, self._tensors, self._stages = self._learning_rates(), trained.tensors(), trained.stages()
        self._counters, self._signature = self._host_state(), trained.signature(None, ())
        self._awaited = trained.awaited()
        self.strangers: dict[str, None] = {}
        """Class names of optimizers that stepped although they were not passed to `capture`."""
        self._generators = _generators()
        _watch_optimizers()
        _watching.append(self)

    def stop(self) -> None:
        """Stop watching optimizers. Call this when the step has ended, even if the step raised an exception."""
        _watching.remove(self)

    def found(self) -> str:
        """Return the reason why the step cannot be recorded, or an empty string."""
        if self.strangers:
            names = ", ".join(self.strangers)
            return f"it, or another thread meanwhile, steps an optimizer ({names}) that was not passed to capture"
        if self._arguments.versions() != self._versions:
            return "it writes to its arguments, and a replay would write to its own copies of them"
        if self._learning_rates() != self._rates:
            return "it sets learning rates (for example, scheduler.step()), which a replay does not. Do that after it"
        if self._stages or self.trained.stages():
            return "it begins or ends between scaler.unscale_() and scaler.update(). Call both in the step, or neither"
        if self.trained.signature(None, ()) != self._signature:
            return (
                "it changes train or eval mode, requires_grad, or settings of units or optimizers, which a replay does "
                "not. Do that outside the step"
            )
        if left := self.trained.unit_left_unsharded():
            return left
        if self.trained.awaited() > self._awaited:
            return "it runs a forward of the model without its backward. Use torch.no_grad() for that forward"
        if not self._tensors.are_in(self.trained.tensors()):  # more tensors are fine: the first step creates state
            return "it replaces a buffer of a module or a tensor of an optimizer's state. Write into it (copy_) instead"
        for (name, key), value in self._host_state().items():
            if self._counters.get((name, key), value) != value:
                return f"{name} keeps {key!r} on the host, which a replay does not change"
        used = [name for name, state in _generators().items() if state != self._generators.get(name)]
        if not used:
            return ""
        return (
            f"it, or another thread meanwhile, draws random numbers on the host, from {' and '.join(used)}; a replay "
            "would repeat the same numbers"
        )

    def _learning_rates(self) -> list[tuple[int, int]]:
        rates = [group.get("lr") for optimizer in self.trained.optimizers for group in optimizer.param_groups]
        return [(id(rate), version_of(rate) if isinstance(rate, torch.Tensor) else 0) for rate in rates]

    def _host_state(self) -> dict[tuple[str, str], list[Any]]:
        """Return numbers that optimizers keep on the host, and the version counters of their CPU tensors.

        Each key of the result is a pair: the class name of an optimizer, and an attribute name or a state key.
        """
        found: dict[tuple[str, str], list[Any]] = defaultdict(list)
        for optimizer in self.trained.optimizers:
            name, device = type(optimizer).__name__, self.trained.device
            for key, value in vars(optimizer).items():
                if type(value) in (int, float) or isinstance(value, torch.Tensor):
                    found[name, key] += _on_host(value, device)
            state: dict[Any, Any] = optimizer.state  # keys are parameters, or names that the optimizer chose
            for owner, entry in state.items():
                entries = entry if isinstance(entry, dict) else {owner if isinstance(owner, str) else "state": entry}
                for key, value in entries.items():
                    found[name, str(key)] += _on_host(value, device)
        return found


@cache
def _watch_optimizers() -> None:
    """Register the hook `_note_step` for all optimizers. Removing the hook later would invalidate recordings."""
    register_optimizer_step_pre_hook(_note_step)


def _note_step(optimizer: torch.optim.Optimizer, *unused: Any) -> None:
    for each in list(_watching):
        if not any(optimizer is own for own in each.trained.optimizers):
            each.strangers[type(optimizer).__name__] = None


def _on_host(value: Any, device: torch.device | None) -> Iterator[Any]:
    """Yield the numbers in `value` and its nested containers, and the versions of tensors that are not on `device`."""
    if isinstance(value, int | float):
        yield value
    elif isinstance(value, torch.Tensor):
        if device is not None and value.device.type != device.type:
            yield version_of(value)
    elif isinstance(value, dict | list | tuple):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _on_host(each, device)


def _generators() -> dict[str, Any]:
    states = {"torch (a CPU generator)": torch.random.get_rng_state().tolist(), "random": random.getstate()}
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None:
        name, keys, *rest = numpy.random.get_state()
        states["numpy"] = name, keys.tobytes(), *rest
    return states


@contextmanager
def refusing_seeds(trained: Trained) -> Iterator[None]:
    """A context in which a recording raises an exception if the step sets the device's seed or random state.

    A replay would not set these. During a recording, CUDA raises an exception if the step sets a new seed, but not if
    the step sets the current seed again. This context therefore sets a seed that no program uses.
    """
    device = trained.device
    if device is None or device.type != "cuda" or trained.has_dropout_of_cudnn():
        yield
        return
    generator = torch.cuda.default_generators[torch.cuda.current_device() if device.index is None else device.index]
    state = generator.get_state()
    generator.manual_seed(_SEED)
    try:
        yield
    finally:
        generator.set_state(state)


def describe(error: BaseException) -> str:
    """Return the program's innermost line in the traceback of `error`, and the error's message."""
    lines = str(error).strip().splitlines()
    said = f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not frame.filename.startswith(LIBRARY_FILES)]
    if not own:
        return said
    return f"{own[-1].filename}:{own[-1].lineno}, {own[-1].line!r}, cannot be recorded ({said})"
