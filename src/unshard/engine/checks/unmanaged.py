"""Parameters of a model that no unit manages: added after sharding, or shared with a module outside all units."""

from __future__ import annotations

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

from ...errors import listed
from ...torch_private import is_replicated, own_modules, own_parameters, stack_level_of_program
from ..params.param import ParamLocation

_SHOWN = 5


class Unmanaged:
    """Looks for them before the first forward, and before one that follows a change of the modules below the root.

    Torch calls hooks when a module is given a parameter or a module, so forwards in between pay nothing. Some libraries
    write to `module._modules` instead, for which there is no hook, so the 2nd, 4th, 8th ... forward looks as well.
    """

    _watched: weakref.WeakKeyDictionary[nn.Module, Unmanaged] = weakref.WeakKeyDictionary()

    def __init__(self) -> None:
        self.changed = True
        """Whether the modules have changed since the last look."""
        self._asked = 0
        self._named: set[str] = set()
        self._frozen: list[tuple[dict[str, Any], str]] = []
        """Parameters that no unit manages and that were not trained at the last look."""
        _register()

    def due(self) -> bool:
        """Whether it is time to look. To be asked before every forward of the root that makes a graph."""
        self._asked += 1
        if self.changed or self._asked & (self._asked - 1) == 0:
            return True
        return any((parameter := held.get(name)) is not None and parameter.requires_grad for held, name in self._frozen)

    def check(self, top: nn.Module, managed: Iterable[ParamLocation], ranks: int) -> None:
        """`top`: the root module. `managed`: where units, or their callers, know of a parameter."""
        self.changed = False
        known = {(id(location.parameters), location.name) for location in managed}
        names, self._frozen = [], []
        for prefix, module in _modules_outside_replicas(top):
            self._watched[module] = self
            for name, parameter in own_parameters(module).items():
                if parameter is None or (id(own_parameters(module)), name) in known:
                    continue
                if parameter.requires_grad:
                    names.append(prefix + name)
                else:
                    self._frozen.append((own_parameters(module), name))
        news = [name for name in names if name not in self._named]
        self._named.update(news)
        if news and ranks > 1:
            warnings.warn(
                f"No unit manages these parameters: {listed(news, _SHOWN)}. They came to the model after it was "
                f"sharded, so their gradients are not reduced: each of the {ranks} ranks trains its own. Add modules "
                "and parameters before sharding the root; freeze them (requires_grad_(False)) if they are not to be "
                "trained; or name them as ignored when sharding, and reduce their gradients in your program.",
                stacklevel=stack_level_of_program(),
            )

    @classmethod
    def notice(cls, module: nn.Module) -> None:
        """The module is about to be given a parameter or a module."""
        watched = cls._watched.get(module)
        if watched is not None:
            watched.changed = True


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
