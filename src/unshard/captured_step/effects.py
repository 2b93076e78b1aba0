"""What a step does on the host, and a replay would not do: found by comparing the host before and after a step."""

from __future__ import annotations

import random
import sys
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ..torch_private import version_of
from .arguments import Arguments
from .trained import Trained

_watching: list[HostEffects] = []
"""Those whose steps run."""


class HostEffects:
    """Made before a step; `found` says afterwards what it has done."""

    def __init__(self, trained: Trained, arguments: Arguments):
        self._trained, self._arguments = trained, arguments
        self._versions = arguments.versions()
        self._rates, self._tensors, self._stages = self._learning_rates(), trained.tensors(), trained.stages()
        self._counters, self._signature = self._host_state(), trained.signature(())
        self._awaited = trained.awaited()
        self._strangers: dict[str, None] = {}
        self._torch, self._python, self._numpy = torch.random.get_rng_state(), random.getstate(), _numpy_state()
        _watch_optimizers()
        _watching.append(self)

    def stop(self) -> None:
        """To be called when the step has ended, in whichever way."""
        _watching.remove(self)

    def found(self) -> str:
        """In words, or empty."""
        if self._strangers:
            names = ", ".join(self._strangers)
            return f"it, or another thread meanwhile, steps an optimizer ({names}) that was not passed to capture"
        if self._arguments.versions() != self._versions:
            return "it writes to its arguments, and a replay would write to its own copies of them"
        if self._learning_rates() != self._rates:
            return (
                "it sets learning rates (by scheduler.step(), for example), which a replay does not. Do that after it"
            )
        if self._stages or self._trained.stages():
            return "it begins or ends between scaler.unscale_() and scaler.update(). Do both in it, or none"
        if self._trained.signature(()) != self._signature:
            return (
                "it changes train or eval mode, requires_grad, or settings of units or optimizers, which a replay does "
                "not. Do that outside of it"
            )
        if left := self._trained.unit_left_unsharded():
            return left
        if self._trained.awaited() > self._awaited:
            return "it runs a forward of the model whose backward it does not run. Use torch.no_grad() for that forward"
        if not self._tensors.are_in(self._trained.tensors()):  # new ones may come: a first step makes state
            return "it replaces a buffer of a module or a tensor of an optimizer's state. Write into it (copy_) instead"
        for (name, key), value in self._host_state().items():
            if self._counters.get((name, key), value) != value:
                return f"{name} keeps {key!r} on the host, which a replay does not change"
        used = [
            name
            for name, same in (
                ("torch (a CPU generator)", torch.equal(torch.random.get_rng_state(), self._torch)),
                ("random", random.getstate() == self._python),
                ("numpy", _numpy_state() == self._numpy),
            )
            if not same
        ]
        return (
            f"it, or another thread meanwhile, draws random numbers on the host, from {' and '.join(used)}; a replay "
            "would repeat those of the step"
        ) * bool(used)

    def note_step(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer steps."""
        if not any(optimizer is each for each in self._trained.optimizers):
            self._strangers[type(optimizer).__name__] = None

    def _learning_rates(self) -> list[Any]:
        """As objects, and how often they were written."""
        rates = [group.get("lr") for optimizer in self._trained.optimizers for group in optimizer.param_groups]
        return [(id(rate), version_of(rate) if isinstance(rate, torch.Tensor) else 0) for rate in rates]

    def _host_state(self) -> dict[tuple[str, str], list[Any]]:
        """Numbers and CPU tensors that optimizers have, by the optimizer's name and the key or attribute."""
        found: dict[tuple[str, str], list[Any]] = defaultdict(list)
        for optimizer in self._trained.optimizers:
            name, device = type(optimizer).__name__, self._trained.device
            for key, value in vars(optimizer).items():
                if type(value) in (int, float) or isinstance(value, torch.Tensor):
                    found[name, key] += _on_host(value, device)
            for owner, entry in optimizer.state.items():
                entries: dict[Any, Any] = entry if isinstance(entry, dict) else {_name_of(owner): entry}
                for key, value in entries.items():
                    found[name, str(key)] += _on_host(value, device)
        return found


@cache
def _watch_optimizers() -> None:
    """Once, for good: hooks that come and go would be changes to other captured steps, in other threads."""
    register_optimizer_step_pre_hook(_note_step)


def _note_step(optimizer: torch.optim.Optimizer, *unused: Any) -> None:
    for each in list(_watching):
        each.note_step(optimizer)


def _name_of(owner: Any) -> str:
    """Of a key of `optimizer.state`: a parameter, or a name that the optimizer chose."""
    return owner if isinstance(owner, str) else "state"


def _on_host(value: Any, device: torch.device | None) -> Iterator[Any]:
    """Numbers, and how often CPU tensors were written, also inside of containers."""
    if isinstance(value, int | float):
        yield value
    elif isinstance(value, torch.Tensor):
        if device is not None and value.device.type != device.type:
            yield version_of(value)
    elif isinstance(value, dict | list | tuple):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _on_host(each, device)


def _numpy_state() -> Any:
    """Comparable; None if the program does not use numpy."""
    numpy: Any = sys.modules.get("numpy")
    if numpy is None:
        return None
    name, keys, *rest = numpy.random.get_state()
    return name, keys.tobytes(), *rest
