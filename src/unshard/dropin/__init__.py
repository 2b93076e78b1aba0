"""Runs programs written for `torch.distributed.fsdp` on unshard, without editing them.

`install()` replaces PyTorch's modules with ours. `unshard run script.py` calls `install()` before the script starts.
"""

from __future__ import annotations

import functools
import importlib
import logging
import multiprocessing.spawn
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import EnumMeta
from types import FunctionType, ModuleType
from typing import Any

import torch.distributed as dist

from ..engine.api import FSDPState, name_stages
from ..errors import StateError, UnsupportedError
from . import modules, torch_composable
from .modules import StandInModule, in_packages, is_defined_in_packages, is_torch

__all__ = ["install", "is_installed", "stand_in", "uninstall"]

CHILD_PROCESSES = os.path.join(os.path.dirname(os.path.abspath(__file__)), "child_processes")
"""The folder with the `sitecustomize` that installs the drop-in in child processes."""

# PyTorch's `replicate` uses the internals of PyTorch's FSDP, so its references are not replaced.
UNCHANGED = "torch.distributed._composable.replicate_with_fsdp"
DEPTH = 4  # levels of nested containers, classes and functions in which references are replaced
# Modules that do not use FSDP. Searching them would take most of the time.
NOT_SEARCHED = sys.stdlib_module_names | {"mpmath", "networkx", "numpy", "sympy", "torchgen", "unshard"}
MUTABLE = (list, dict, set, functools.partial, FunctionType)

Objects = dict[int, tuple[Any, Any]]
"""Maps ids of PyTorch's objects to (object, replacement). The reference to the object keeps its id valid."""

_undo: list[Callable[[], Any]] = []
"""Functions that each undo one change. `uninstall` calls the last one first."""


def install(child_processes: bool = False) -> None:
    """Replace `torch.distributed.fsdp` and `torch.distributed._composable.fsdp` with our modules.

    References in modules that are already imported are also replaced. This includes PyTorch's own modules, so
    checkpoints and pipelines recognize our `FSDPModule`. A second call is a no-op.

    With `child_processes`, this function also changes `PYTHONPATH`, so all Python processes that inherit the
    environment install the drop-in. `unshard run` passes `child_processes=True`. Processes that `multiprocessing`
    starts always install the drop-in.

    Raises:
        StateError: a class that already exists derives from one of PyTorch's classes.
        UnsupportedError: this build of PyTorch has no `torch.distributed`.

    Example::

        unshard.dropin.install()
        from torch.distributed.fsdp import fully_shard  # unshard's
    """
    if _undo:
        return
    sys.meta_path[:] = [each for each in sys.meta_path if not hasattr(each, "unshard_dropin")]
    if not dist.is_available():
        raise UnsupportedError("unshard.dropin needs torch.distributed, which this build of PyTorch does not have.")
    importlib.import_module(UNCHANGED)  # before the replacement, so that it imports PyTorch's FSDP
    stand_ins = modules.build()
    try:
        _replace_modules(stand_ins)
        _replace_references(stand_ins)
        # PyTorch has removed this function, so no replaced module has its name.
        _assign(importlib.import_module("torch.distributed._composable"), "fully_shard", torch_composable.fully_shard)
        for name, member in STATE_MEMBERS.items():
            _assign(FSDPState, name, member)
        name_stages("FSDP", logging.getLogger("torch.distributed.fsdp.fully_shard"))
        _undo.append(name_stages)
        # Processes that `multiprocessing` spawns unpickle this object before they import the main module.
        prepare = multiprocessing.spawn.get_preparation_data
        _assign(multiprocessing.spawn, "get_preparation_data", lambda name: {**prepare(name), "unshard": _InSpawned()})
        if child_processes:
            _install_in_child_processes()
    except BaseException:
        uninstall()
        raise
    if os.environ.get("UNSHARD_EXPLAIN_HANGS"):  # the program may never use a name of `unshard`, which turns it on
        from ..tools.hangs import explain_hangs_from_environment

        explain_hangs_from_environment()


def uninstall() -> None:
    """Restore everything that `install` replaced. Modules that were imported after `install` keep our objects.

    Example::

        unshard.dropin.uninstall()
    """
    while _undo:
        _undo.pop()()


def is_installed() -> bool:
    """Return True if the drop-in is installed. Example: `assert unshard.dropin.is_installed()`."""
    return bool(_undo)


@contextmanager
def stand_in() -> Iterator[None]:
    """Install the drop-in for the duration of a `with` block.

    Example::

        with unshard.dropin.stand_in():
            from torch.distributed.fsdp import fully_shard  # unshard's
    """
    already = is_installed()
    install()
    try:
        yield
    finally:
        if not already:
            uninstall()


def _replace_modules(stand_ins: dict[str, StandInModule]) -> None:
    for name, stand_in in stand_ins.items():
        _undo.append(functools.partial(sys.modules.__setitem__, name, sys.modules[name]))
        sys.modules[name] = stand_in
    for package in modules.PACKAGES:
        parent, _, last = package.rpartition(".")
        _assign(sys.modules[parent], last, stand_ins[package])


def _assign(owner: Any, name: str, value: Any) -> None:
    if hasattr(owner, name):
        _undo.append(functools.partial(setattr, owner, name, getattr(owner, name)))
    else:
        _undo.append(functools.partial(delattr, owner, name))
    setattr(owner, name, value)


# -- members of the state of a module -----------------------------------------------------------------------
#
# `torch.distributed.pipelining` turns gradient synchronization off during the backwards of a step. After the last one,
# torch up to 2.14 takes `fully_shard.state(stage)`, and calls `post_backward()` on each param group of each of its
# states. It then calls `_root_post_backward_final_callback()`. Torch 2.15 calls the module's `finalize_backward`.


def _find_root(state: FSDPState) -> Any:
    return state.find_root(state.modules()[0])


def _end_backward(state: FSDPState) -> None:
    if state.is_initialized:
        _find_root(state).end_backward()


STATE_MEMBERS: dict[str, Any] = {
    "_state_ctx": property(lambda state: state),
    "all_states": (),  # `_end_backward` reduces all param groups, so none needs its own call
    "_root_post_backward_final_callback": _end_backward,
    "_comm_ctx": property(lambda state: state),  # torch 2.15 compares the contexts of stages, which must differ
    "_lazy_init": _find_root,
    "_pre_forward": FSDPState.pre_forward,  # torch.compile compares functions with these two
    "_post_forward": FSDPState.post_forward,
}
"""The members that `FSDPState` has while the drop-in is installed. PyTorch's own code and programs use them."""


# -- other processes ----------------------------------------------------------------------------------------


def _install_in_child_processes() -> None:
    """Make child processes install the drop-in. Some launchers start `python script.py` again for other ranks."""
    before = os.environ.get("PYTHONPATH")
    rest = [each for each in (before or "").split(os.pathsep) if each and each != CHILD_PROCESSES]
    os.environ["PYTHONPATH"] = os.pathsep.join([CHILD_PROCESSES, *rest])
    if before is None:
        _undo.append(functools.partial(os.environ.pop, "PYTHONPATH", None))
    else:
        _undo.append(functools.partial(os.environ.__setitem__, "PYTHONPATH", before))


class _InSpawned:
    """Calls `install` when a spawned process unpickles this object, before the process imports the main module."""

    def __reduce__(self) -> Any:
        return install, ()


# -- references in modules that were imported before ----------------------------------------------------------


def _replace_references(stand_ins: dict[str, StandInModule]) -> None:
    ours, missing = _replacements(stand_ins)
    every = {**missing, **ours}
    seen: set[int] = set()
    for name, module in _loaded():
        if not is_torch(name):
            _Search(name, every, seen).values(vars(module), DEPTH, name)
        elif not ours.keys().isdisjoint(map(id, vars(module).values())):
            # PyTorch's own modules keep objects that unshard lacks. Modules without names of FSDP are not searched.
            _Search(name, ours, seen).values(vars(module), 1, name)


def _replacements(stand_ins: dict[str, StandInModule]) -> tuple[Objects, Objects]:
    """Return two maps: PyTorch's objects to our replacements, and PyTorch's modules and other objects to stand-ins."""
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
    def __init__(self, module: str, objects: Objects, seen: set[int]):
        self._module = module
        self._objects = objects
        self._seen = seen

    def values(self, container: dict[Any, Any] | list[Any], depth: int, where: str) -> None:
        pairs = container.items() if isinstance(container, dict) else enumerate(container)
        for key, value in list(pairs):
            new = self._new(value, depth, f"{where}.{key}")
            if new is not value:
                container[key] = new
                _undo.append(functools.partial(_put_back, container, key, value, new))

    def _new(self, value: Any, depth: int, where: str) -> Any:
        """Return the replacement of `value`. If there is none, return `value` with references inside replaced."""
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
        if isinstance(value, dict | list):
            self.values(value, depth, where)
            if isinstance(value, dict):
                self._keys(value)
        elif isinstance(value, set):
            self._set(value, depth, where)
        elif isinstance(value, functools.partial):
            self._partial(value, depth, where)
        elif getattr(value, "__module__", None) == self._module:
            if isinstance(value, type):
                self._class(value, depth, where)
            else:
                self._function(value, depth, where)

    def _keys(self, values: dict[Any, Any]) -> None:
        new = {key: self._replacement(key) for key in values}
        if any(new[key] is not key for key in new):
            old = dict(values)
            _refill(values, {new[key]: value for key, value in old.items()})
            _undo.append(functools.partial(_refill, values, old))

    def _set(self, values: set[Any], depth: int, where: str) -> None:
        for value in list(values):
            new = self._new(value, depth, where)
            if new is not value:
                values.remove(value)
                values.add(new)
                _undo.extend([functools.partial(values.add, value), functools.partial(values.discard, new)])

    def _partial(self, value: functools.partial[Any], depth: int, where: str) -> None:
        func = self._new(value.func, depth, where)
        args = self._new(value.args, depth, where)
        keywords = {key: self._new(each, depth, where) for key, each in value.keywords.items()}
        before = (value.func, value.args, dict(value.keywords), vars(value))
        if func is not value.func or args is not value.args or any(keywords[k] is not before[2][k] for k in keywords):
            value.__setstate__((func, args, keywords, vars(value)))  # type: ignore[attr-defined]
            _undo.append(functools.partial(value.__setstate__, before))  # type: ignore[attr-defined]

    def _function(self, function: FunctionType, depth: int, where: str) -> None:
        places: list[Any] = [(function, "__defaults__", depth + 1), (function, "__kwdefaults__", depth + 1)]
        places += [(cell, "cell_contents", depth) for cell in function.__closure__ or ()]
        for owner, name, levels in places:
            try:
                old = getattr(owner, name)
            except ValueError:  # the variable of a cell is not assigned yet
                continue
            new = self._new(old, levels, where)
            if new is not old:
                _assign(owner, name, new)

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
                _undo.append(functools.partial(setattr, cls, name, value))


def _loaded() -> Iterator[tuple[str, ModuleType]]:
    for name, module in list(sys.modules.items()):
        if not issubclass(type(module), ModuleType) or isinstance(module, StandInModule):
            continue
        if name.split(".")[0] not in NOT_SEARCHED and name != UNCHANGED and not in_packages(name):
            yield name, module


def _inner(value: Any) -> Any:
    if isinstance(value, staticmethod | classmethod):
        return value.__func__
    return value.fget if isinstance(value, property) else value


def _outer(value: Any, new: Any) -> Any:
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
