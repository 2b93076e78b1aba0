"""References to PyTorch's objects in modules that were imported before: changed to ours, and back."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from enum import EnumMeta
from types import CellType, FunctionType, ModuleType
from typing import Any

from ..errors import StateError
from .facades import Facade, in_trees, is_own, is_torch

# PyTorch's `replicate` is built on the inside of its own FSDP, and stays what it is.
UNTOUCHED = ("torch.distributed._composable.replicate_with_fsdp",)
DEEPEST = 4
CHANGEABLE = (list, dict, set, functools.partial, FunctionType)

Undo = Callable[[], None]


class Table:
    """What takes the place of which object, by identity."""

    def __init__(self, facades: dict[str, Facade]):
        self._ours: dict[int, Any] = {}
        self._explained: dict[int, Any] = {}
        self._alive: list[Any] = []  # so that no id is given to another object
        for facade in facades.values():
            self._add_ours(facade)
        for facade in facades.values():
            self._add_explained(facade)

    def _add_ours(self, facade: Facade) -> None:
        for name in getattr(facade._ours, "__all__", ()):
            theirs, ours = vars(facade._real).get(name), getattr(facade._ours, name)
            if theirs is ours or not (is_own(theirs) or isinstance(theirs, list | dict)):
                continue
            self._put(self._ours, theirs, ours)
            for name, member in _members(theirs).items():
                if name in _members(ours):
                    self._put(self._ours, member, ours[name])

    def _add_explained(self, facade: Facade) -> None:
        self._put(self._explained, facade._real, facade)
        for name, theirs in vars(facade._real).items():
            if is_own(theirs) and id(theirs) not in self._ours:
                missing = facade._explained(name)
                self._put(self._explained, theirs, missing)
                for member in _members(theirs).values():
                    self._put(self._explained, member, missing)

    def _put(self, table: dict[int, Any], theirs: Any, ours: Any) -> None:
        self._alive.append(theirs)
        table.setdefault(id(theirs), ours)

    def replacement(self, value: Any, for_torch: bool) -> Any:
        """What to hold instead of `value`; itself if it may stay. PyTorch's modules keep what we have nothing for."""
        found = self._ours.get(id(value), self)
        if found is self and not for_torch:
            found = self._explained.get(id(value), self)
        return value if found is self else found


class Rebinding:
    """One pass over the loaded modules. What undoes each change is added to `undo`, to be called last one first."""

    def __init__(self, table: Table, undo: list[Undo]):
        self._table = table
        self._undo = undo
        self._seen: set[int] = set()
        self._for_torch = False
        self._module = ""

    def run(self) -> None:
        for name, module in _loaded():
            self._module, self._for_torch = name, is_torch(name)
            self._mapping(vars(module), 1 if self._for_torch else DEEPEST, name)

    def _mapping(self, values: dict[Any, Any], depth: int, where: str) -> None:
        for key, value in list(values.items()):
            new = self._new(value, depth, f"{where}.{key}")
            if new is not value:
                values[key] = new
                self._undo.append(functools.partial(_put_back, values, key, value, new))

    def _new(self, value: Any, depth: int, where: str) -> Any:
        """What to hold instead of `value`; what can be changed itself is."""
        new = self._table.replacement(value, self._for_torch)
        if new is not value or depth == 0:
            return new
        kind = type(value)  # not `isinstance`, which asks the value: some warn that they are deprecated
        if kind is tuple or kind is frozenset:
            items = [self._new(item, depth - 1, where) for item in value]
            return kind(items) if any(new is not old for new, old in zip(items, value, strict=True)) else value
        if (kind in CHANGEABLE or issubclass(kind, type)) and id(value) not in self._seen:
            self._seen.add(id(value))
            self._inside(value, depth - 1, where)
        return value

    def _inside(self, value: Any, depth: int, where: str) -> None:
        if isinstance(value, dict):
            self._mapping(value, depth, where)
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
        new = {key: self._table.replacement(key, self._for_torch) for key in values}
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
        except ValueError:  # nothing in it yet
            return
        new = self._new(old, depth, where)
        if new is not old:
            cell.cell_contents = new
            self._undo.append(functools.partial(setattr, cell, "cell_contents", old))

    def _class(self, cls: type, depth: int, where: str) -> None:
        for base in cls.__mro__[1:]:
            if in_trees(base.__module__) and not self._for_torch:
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
    """The modules whose references count: not PyTorch's trees themselves, nor the facades, nor ours."""
    for name, module in list(sys.modules.items()):
        if not issubclass(type(module), ModuleType) or isinstance(module, Facade):
            continue
        if name.split(".")[0] != "unshard" and name not in UNTOUCHED and not in_trees(name):
            yield name, module


def _inner(value: Any) -> Any:
    """The function behind a method that is no plain one."""
    if isinstance(value, staticmethod | classmethod):
        return value.__func__
    return value.fget if isinstance(value, property) else value


def _outer(value: Any, new: Any) -> Any:
    """What `value` is to `_inner(value)`, to another function."""
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
        pass  # gone meanwhile
