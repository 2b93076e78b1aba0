"""Parameters that no unit manages: added after sharding, beside sharded modules, or shared with modules outside."""

from __future__ import annotations

import gc
import warnings
import weakref
from collections.abc import Iterable, Iterator
from functools import cache
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.nn.parallel import DistributedDataParallel

from ..errors import listed
from ..torch_private import is_replicated, own_modules, own_parameters, stack_level_of_program
from .param_group import param_group_of, param_groups_of
from .params.param import ParamLocation
from .unit import STATE_KEY, Unit

_SHOWN = 5


class Unmanaged:
    """Searches for unmanaged parameters before the first forward, and after the modules below the root have changed.

    Torch calls hooks when a parameter or a module is registered. Therefore, forwards without such changes need no
    search. However, some libraries write to `module._modules`, which calls no hook. Therefore, the 2nd, 4th, 8th, ...
    forward searches, too.
    """

    _watched: weakref.WeakKeyDictionary[nn.Module, Unmanaged] = weakref.WeakKeyDictionary()

    def __init__(self) -> None:
        self.changed = True
        """True if the modules have changed since the last search."""
        self._asked = 0
        self._named: set[str] = set()
        self._frozen: list[tuple[dict[str, Any], str]] = []
        """Unmanaged parameters that were frozen at the time of the last search."""
        _register()

    def due(self) -> bool:
        """Return True if a search is due. Call this method before every forward of the root that records a graph."""
        self._asked += 1
        if self.changed or self._asked & (self._asked - 1) == 0:
            return True
        return any((parameter := held.get(name)) is not None and parameter.requires_grad for held, name in self._frozen)

    def check(self, top: nn.Module, managed: Iterable[ParamLocation], ranks: int) -> None:
        """Warn about new unmanaged parameters below `top`, the root module.

        `managed` must include ignored parameters.
        """
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
                f"No unit manages these parameters: {listed(news, _SHOWN)}. They were added after the model was "
                f"sharded, so their gradients are not reduced: each of the {ranks} ranks trains its own. Add modules "
                "and parameters before sharding the root; freeze them (requires_grad_(False)) if they should not be "
                "trained; or name them as ignored when sharding, and reduce their gradients in your program.",
                stacklevel=stack_level_of_program(),
            )

    @classmethod
    def notice(cls, module: nn.Module, *unused: Any) -> None:
        """Mark the model of `module` as changed.

        This is called before a parameter or a module is registered in `module`.
        """
        watched = cls._watched.get(module)
        if watched is not None:
            watched.changed = True


def _modules_outside_replicas(top: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield modules with the prefixes of their parameters. Modules whose gradients `replicate` reduces are skipped."""
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
    register_module_module_registration_hook(Unmanaged.notice)
    register_module_parameter_registration_hook(_parameter_comes)


def _parameter_comes(module: nn.Module, name: str, parameter: Any) -> None:
    if own_parameters(module).get(name) is None:  # otherwise it is replaced, which its unit detects
        Unmanaged.notice(module)


def warn_of_unsharded_root(parameters: list[Any]) -> None:
    """Warn if an optimizer steps parameters beside sharded modules, in a module that was not sharded itself."""
    ranks = max([each.shards.world * each.replicas.world for each in param_groups_of(parameters)], default=1)
    outside = {
        id(each): each
        for each in parameters
        if each.requires_grad and not isinstance(each, DTensor) and param_group_of(each) is None
    }
    if ranks == 1 or not outside:
        return
    modules = list(all_modules())
    parents: dict[nn.Module, list[nn.Module]] = {}
    for module in modules:
        for child in own_modules(module).values():
            if child is not None:
                parents.setdefault(child, []).append(module)
    sharded = {module for module in modules if STATE_KEY in module.__dict__}
    around = _with_ancestors(sharded, parents)
    tops: dict[nn.Module, None] = {}
    for module in modules:
        if not outside.keys().isdisjoint(map(id, own_parameters(module).values())):
            above = _with_ancestors({module}, parents)
            if sharded.isdisjoint(above) and not any(map(_reduces, above)):
                tops.update(dict.fromkeys(each for each in above if each in around and each not in parents))
    for top in tops:
        names = [name for name, each in top.named_parameters() if id(each) in outside]
        warnings.warn(
            f"No unit manages these parameters: {listed(names, _SHOWN)}. The {type(top).__name__} that contains them "
            "and sharded modules was not sharded itself, so their gradients are not reduced: each of the "
            f"{ranks} ranks trains its own. Shard this module last (fully_shard(model)), or reduce these gradients in "
            "your program.",
            stacklevel=stack_level_of_program(),
        )


def _reduces(module: nn.Module) -> bool:
    return isinstance(module, DistributedDataParallel) or is_replicated(module)


def _with_ancestors(modules: set[nn.Module], parents: dict[nn.Module, list[nn.Module]]) -> set[nn.Module]:
    found, waiting = set(modules), list(modules)
    while waiting:
        above = [each for each in parents.get(waiting.pop(), ()) if each not in found]
        found.update(above)
        waiting += above
    return found


def warn_of_untied(units: list[Unit]) -> None:
    """Warn about modules outside all units that still hold an original parameter, which sharding has replaced."""
    kept: dict[int, tuple[str, Unit]] = {}
    for unit in units:
        for param in unit.params:
            origin = param.origin()
            if origin is not None and origin is not param.sharded and param.sharded.requires_grad:
                kept[id(origin)] = param.name, unit
    for module in all_modules() if kept else ():
        for other, parameter in own_parameters(module).items():
            if id(parameter) in kept:
                name, unit = kept[id(parameter)]
                warnings.warn(
                    f"Parameter {name!r} of {unit} was shared with {other!r} of a {type(module).__name__} that no unit "
                    "contains. After sharding, they are two separate parameters. Shard a module that contains both as "
                    "one unit, or both with fully_shard([first, second]).",
                    stacklevel=stack_level_of_program(),
                )


def all_modules() -> Iterator[nn.Module]:
    for each in gc.get_objects():
        # Not `isinstance`, which reads `__class__`: some objects then import a module or warn.
        if issubclass(type(each), nn.Module) and "_parameters" in each.__dict__:
            yield each
