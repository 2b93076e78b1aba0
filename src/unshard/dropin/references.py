"""Replaces references to PyTorch's FSDP in modules imported before `install`, and restores them."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from enum import EnumMeta
from types import CellType, FunctionType, ModuleType
from typing import Any

from ..errors import StateError
from .modules import StandInModule, in_packages, is_defined_in_packages, is_torch

# PyTorch's `replicate` uses the internals of PyTorch's FSDP, so its references stay.
UNCHANGED = ("torch.distributed._composable.replicate_with_fsdp",)
DEPTH = 4  # levels of nested containers, classes and functions
# Modules that do not use FSDP. Searching them would take most of the time.
NOT_SEARCHED = sys.stdlib_module_names | {"mpmath", "networkx", "numpy", "sympy", "torchgen", "unshard"}
MUTABLE = (list, dict, set, functools.partial, FunctionType)

Undo = Callable[[], None]
Objects = dict[int, tuple[Any, Any]]
"""PyTorch's objects (held, so that ids stay valid) and their replacements, by `id` of the former."""


def replace(stand_ins: dict[str, StandInModule], undo: list[Undo]) -> None:
    """Replace references in all loaded modules. Appends the reverse of each change to `undo`; call the last first."""
    ours, missing = _replacements(stand_ins)
    every = {**missing, **ours}
    seen: set[int] = set()
    for name, module in _loaded():
        if not is_torch(name):
            _Search(name, every, undo, seen).mapping(vars(module), DEPTH, name)
        elif not ours.keys().isdisjoint(map(id, vars(module).values())):
            # PyTorch's own modules keep the objects that unshard does not have. Those that use FSDP import its names.
            _Search(name, ours, undo, seen).mapping(vars(module), 1, name)


def _replacements(stand_ins: dict[str, StandInModule]) -> tuple[Objects, Objects]:
    """Our replacements of PyTorch's objects; stand-ins and `MissingName`s for those that unshard does not have."""
    ours: Objects = {}
    missing: Objects = {}
    for stand_in in stand_ins.values():
        for name, mine in stand_in._ours.items():
            theirs = vars(stand_in._real).get(name)
            if theirs is mine or not (is_defined_in_packages(theirs) or isinstance(theirs, list | dict)):
                continue
            ours.setdefault(id(theirs), (theirs, mine))
            for key, member in _members(theirs).items():
                if key in _members(mine):
                    ours.setdefault(id(member), (member, mine[key]))
    for stand_in in stand_ins.values():
        missing[id(stand_in._real)] = (stand_in._real, stand_in)
        for name, theirs in vars(stand_in._real).items():
            if is_defined_in_packages(theirs) and id(theirs) not in ours:
                for each in (theirs, *_members(theirs).values()):
                    missing.setdefault(id(each), (each, stand_in.missing(name)))
    return ours, missing


class _Search:
    """Replaces the references in one module."""

    def __init__(self, module: str, objects: Objects, undo: list[Undo], seen: set[int]):
        self._module = module
        self._objects = objects
        self._undo = undo
        self._seen = seen

    def mapping(self, values: dict[Any, Any], depth: int, where: str) -> None:
        for key, value in list(values.items()):
            new = self._new(value, depth, f"{where}.{key}")
            if new is not value:
                values[key] = new
                self._undo.append(functools.partial(_put_back, values, key, value, new))

    def _new(self, value: Any, depth: int, where: str) -> Any:
        """Return the replacement of `value`, or `value` itself after replacing references inside it."""
        new = self._replacement(value)
        if new is not value or depth == 0:
            return new
        kind = type(value)  # `isinstance` would read `value.__class__`, which warns for some deprecated objects
        if kind is tuple or kind is frozenset:
            items = [self._new(item, depth - 1, where) for item in value]
            return kind(items) if any(new is not old for new, old in zip(items, value, strict=True)) else value
        if (kind in MUTABLE or issubclass(kind, type)) and id(value) not in self._seen:
            self._seen.add(id(value))
            self._inside(value, depth - 1, where)
        return value

    def _replacement(self, value: Any) -> Any:
        return self._objects.get(id(value), (value, value))[1]

    def _inside(self, value: Any, depth: int, where: str) -> None:
        if isinstance(value, dict):
            self.mapping(value, depth, where)
            self._keys(value)
        elif isinstance(value, list):
            self._list(value, depth, where)
        elif isinstance(value, set):
            self._set(value, depth, where)
        elif isinstance(value, functools.partial):
            self._partial(value, depth, where)
        elif getattr(value, "__module__", None) == self._module:
            if isinstance(value, type):
                self._class(value, depth, where)
            else:
                self._function(value, depth, where)

    def _list(self, values: list[Any], depth: int, where: str) -> None:
        for index, value in enumerate(values):
            new = self._new(value, depth, where)
            if new is not value:
                values[index] = new
                self._undo.append(functools.partial(_put_back, values, index, value, new))

    def _keys(self, values: dict[Any, Any]) -> None:
        new = {key: self._replacement(key) for key in values}
        if any(new[key] is not key for key in new):
            old = dict(values)
            _refill(values, {new[key]: value for key, value in old.items()})
            self._undo.append(functools.partial(_refill, values, old))

    def _set(self, values: set[Any], depth: int, where: str) -> None:
        for value in list(values):
            new = self._new(value, depth, where)
            if new is not value:
                values.remove(value)
                values.add(new)
                self._undo += [functools.partial(values.add, value), functools.partial(values.discard, new)]

    def _partial(self, value: functools.partial[Any], depth: int, where: str) -> None:
        func = self._new(value.func, depth, where)
        args = self._new(value.args, depth, where)
        keywords = {key: self._new(each, depth, where) for key, each in value.keywords.items()}
        before = (value.func, value.args, dict(value.keywords), vars(value))
        if func is not value.func or args is not value.args or any(keywords[k] is not before[2][k] for k in keywords):
            value.__setstate__((func, args, keywords, vars(value)))  # type: ignore[attr-defined]
            self._undo.append(functools.partial(value.__setstate__, before))  # type: ignore[attr-defined]

    def _function(self, function: FunctionType, depth: int, where: str) -> None:
        for name in ("__defaults__", "__kwdefaults__"):
            old = getattr(function, name)
            new = self._new(old, depth + 1, where)
            if new is not old:
                setattr(function, name, new)
                self._undo.append(functools.partial(setattr, function, name, old))
        for cell in function.__closure__ or ():
            self._cell(cell, depth, where)

    def _cell(self, cell: CellType, depth: int, where: str) -> None:
        try:
            old = cell.cell_contents
        except ValueError:  # the variable is not assigned yet
            return
        new = self._new(old, depth, where)
        if new is not old:
            cell.cell_contents = new
            self._undo.append(functools.partial(setattr, cell, "cell_contents", old))

    def _class(self, cls: type, depth: int, where: str) -> None:
        for base in cls.__mro__[1:]:
            if in_packages(base.__module__) and not is_torch(self._module):
                raise StateError(
                    f"{where} derives from PyTorch's own {base.__module__}.{base.__name__}. Call "
                    f"unshard.dropin.install() before {self._module} is imported, or start with `unshard run`."
                )
        for name, value in list(vars(cls).items()):
            inner = _inner(value)
            new = self._new(inner, depth, f"{where}.{name}")
            if new is not inner:
                setattr(cls, name, _outer(value, new))
                self._undo.append(functools.partial(setattr, cls, name, value))


def _loaded() -> Iterator[tuple[str, ModuleType]]:
    """Modules to search: all except PyTorch's FSDP itself, its stand-ins and `NOT_SEARCHED`."""
    for name, module in list(sys.modules.items()):
        if not issubclass(type(module), ModuleType) or isinstance(module, StandInModule):
            continue
        if name.split(".")[0] not in NOT_SEARCHED and name not in UNCHANGED and not in_packages(name):
            yield name, module


def _inner(value: Any) -> Any:
    """The function inside a static method, class method or property."""
    if isinstance(value, staticmethod | classmethod):
        return value.__func__
    return value.fget if isinstance(value, property) else value


def _outer(value: Any, new: Any) -> Any:
    """A static method, class method or property like `value` with the function `new`."""
    if isinstance(value, staticmethod | classmethod):
        return type(value)(new)
    return property(new, value.fset, value.fdel) if isinstance(value, property) else new


def _members(value: Any) -> dict[str, Any]:
    return dict(value.__members__) if isinstance(value, EnumMeta) else {}


def _refill(values: dict[Any, Any], new: dict[Any, Any]) -> None:
    values.clear()
    values.update(new)


def _put_back(container: Any, key: Any, old: Any, new: Any) -> None:
    try:
        if container[key] is new:
            container[key] = old
    except LookupError:
        pass  # the program has removed it
