"""Parameters of a model that no unit manages: added after sharding, or shared with a module outside all units."""

from __future__ import annotations

import gc
import warnings
import weakref
from collections.abc import Iterable, Iterator
from functools import cache
from typing import Any

from torch import nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from ..torch_private import is_replicated, own_modules, own_parameters
from .caller import stack_level_of_program
from .faces import Home
from .unit import Unit

_SHOWN = 5


class Unmanaged:
    """Looks for them before the first forward, and before one that follows a change of the modules below the root.

    Torch calls hooks when a module is given a parameter or a module, so forwards in between pay nothing.
    """

    _watched: weakref.WeakKeyDictionary[nn.Module, Unmanaged] = weakref.WeakKeyDictionary()

    def __init__(self) -> None:
        self.changed = True
        """Whether it is time to look."""
        self._named: set[str] = set()
        _register()

    def look(self, top: nn.Module, managed: Iterable[Home], ranks: int) -> None:
        """`top`: the root module. `managed`: where units, or their callers, know of a parameter."""
        self.changed = False
        known = {(id(home.parameters), home.name) for home in managed}
        names = []
        for prefix, module in _modules_outside_replicas(top):
            self._watched[module] = self
            for name, parameter in own_parameters(module).items():
                trained = parameter is not None and parameter.requires_grad
                if trained and (id(own_parameters(module)), name) not in known:
                    names.append(prefix + name)
        news = [name for name in names if name not in self._named]
        self._named.update(news)
        if news and ranks > 1:
            listed = ", ".join(news[:_SHOWN]) + (f" and {len(news) - _SHOWN} more" if len(news) > _SHOWN else "")
            warnings.warn(
                f"No unit manages these parameters: {listed}. They came to the model after it was sharded, so their "
                f"gradients are not reduced, and each of the {ranks} ranks trains its own. Add modules and parameters "
                "before sharding the root; freeze them (requires_grad_(False)) if they are not to be trained; or name "
                "them as ignored when sharding, and reduce their gradients in your program.",
                stacklevel=stack_level_of_program(),
            )

    @classmethod
    def notice(cls, module: nn.Module) -> None:
        """The module is about to be given a parameter or a module."""
        look = cls._watched.get(module)
        if look is not None:
            look.changed = True


def _modules_outside_replicas(top: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """With what comes before the names of their parameters; what torch's `replicate` has, it reduces."""
    seen: set[nn.Module] = set()
    waiting = [("", top)]
    while waiting:
        prefix, module = waiting.pop(0)
        if module in seen or is_replicated(module):
            continue
        seen.add(module)
        yield prefix, module
        waiting += [(f"{prefix}{name}.", child) for name, child in own_modules(module).items() if child is not None]


@cache
def _register() -> None:
    """Once per process."""
    register_module_module_registration_hook(_module_comes)
    register_module_parameter_registration_hook(_parameter_comes)


def _module_comes(module: nn.Module, name: str, child: Any) -> None:
    Unmanaged.notice(module)


def _parameter_comes(module: nn.Module, name: str, parameter: Any) -> None:
    if own_parameters(module).get(name) is None:  # else it is replaced, which its unit notices
        Unmanaged.notice(module)


def warn_of_untied(units: list[Unit]) -> None:
    """A module outside all units that shared a parameter with one inside has kept the parameter as it was.

    Nearly always nobody holds an original parameter any more, and there is nothing to look for.
    """
    kept: dict[int, tuple[str, Unit]] = {}
    for unit in units:
        for slot in unit.slots:
            origin = slot.origin()
            if origin is not None and origin is not slot.sharded and slot.sharded.requires_grad:
                kept[id(origin)] = slot.name, unit
    if kept:
        for module in _all_modules():
            for name, parameter in own_parameters(module).items():
                if id(parameter) in kept:
                    _warn_of_untied(*kept[id(parameter)], f"{name!r} of a {type(module).__name__}")


def _all_modules() -> Iterator[nn.Module]:
    for each in gc.get_objects():
        # Not `isinstance`, which asks the object: some answer with an import or a warning.
        if issubclass(type(each), nn.Module) and "_parameters" in each.__dict__:
            yield each


def _warn_of_untied(name: str, unit: Unit, other: str) -> None:
    warnings.warn(
        f"Parameter {name!r} of {unit} was shared with {other} that no unit holds. Since it was sharded they are two "
        "parameters with values of their own. Shard a module that contains both as one unit, or both with "
        "fully_shard([first, second]).",
        stacklevel=stack_level_of_program(),
    )
