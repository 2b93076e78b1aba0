"""Runs programs that were written for `torch.distributed.fsdp` on unshard without an edit.

`install()` replaces PyTorch's modules by ours; `unshard run script.py` does so before the script starts.
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
from typing import Any

import torch.distributed as dist

from ..engine.api import name_stages
from ..errors import UnsupportedError
from . import modules, references, torch_composable, torch_pipelining

__all__ = ["install", "is_installed", "stand_in", "uninstall"]

CHILD_PROCESSES = os.path.join(os.path.dirname(os.path.abspath(__file__)), "child_processes")
"""The folder with the `sitecustomize` that installs the drop-in in child processes."""

_undo: list[Callable[[], Any]] = []


def install(child_processes: bool = False) -> None:
    """Replace `torch.distributed.fsdp` and `torch.distributed._composable.fsdp` by our modules.

    References in modules that were imported before are replaced, too. PyTorch's own modules are among them: checkpoints
    and pipelines then test whether a module is our `FSDPModule`. A second call does nothing.

    `child_processes`: also in all Python processes that this one starts with its environment, which changes PYTHONPATH.
    `unshard run` does so. Processes that `multiprocessing` starts always have the drop-in.
    """
    if _undo:
        return
    sys.meta_path[:] = [each for each in sys.meta_path if not hasattr(each, "unshard_dropin")]
    if not dist.is_available():
        raise UnsupportedError("unshard.dropin needs torch.distributed, which this build of PyTorch does not have.")
    for name in references.UNCHANGED:
        importlib.import_module(name)  # before the replacement, so that it imports PyTorch's own
    stand_ins = modules.build()
    try:
        _replace_modules(stand_ins)
        references.replace(stand_ins, _undo)
        _add_names()
        name_stages("FSDP", logging.getLogger("torch.distributed.fsdp.fully_shard"))
        _undo.append(name_stages)
        _install_in_spawned_processes()
        if child_processes:
            _install_in_child_processes()
    except BaseException:
        uninstall()
        raise


def uninstall() -> None:
    """Restore what `install` replaced. Modules that were imported in between keep our objects."""
    while _undo:
        _undo.pop()()


def is_installed() -> bool:
    return bool(_undo)


@contextmanager
def stand_in() -> Iterator[None]:
    """Install for the duration of a `with` block."""
    already = is_installed()
    install()
    try:
        yield
    finally:
        if not already:
            uninstall()


def _replace_modules(stand_ins: dict[str, modules.StandInModule]) -> None:
    for name, stand_in in stand_ins.items():
        _undo.append(functools.partial(sys.modules.__setitem__, name, sys.modules[name]))
        sys.modules[name] = stand_in
    for package in modules.PACKAGES:
        parent, _, last = package.rpartition(".")
        _set(sys.modules[parent], last, stand_ins[package])


def _add_names() -> None:
    """Names that are not in the replaced modules: the removed composable call, and what pipelines call."""
    composable = importlib.import_module("torch.distributed._composable")
    for name in torch_composable.__all__:
        _set(composable, name, getattr(torch_composable, name))
    for name, member in torch_pipelining.MEMBERS.items():
        _set(torch_pipelining.FSDPState, name, member)


def _install_in_spawned_processes() -> None:
    """Processes that `multiprocessing` spawns import the main module again; they install before that."""
    prepare = multiprocessing.spawn.get_preparation_data
    _set(multiprocessing.spawn, "get_preparation_data", lambda name: {**prepare(name), "unshard": _InSpawned()})


def _install_in_child_processes() -> None:
    """Launchers that start `python script.py` once more for each other rank."""
    before = os.environ.get("PYTHONPATH")
    rest = [each for each in (before or "").split(os.pathsep) if each and each != CHILD_PROCESSES]
    os.environ["PYTHONPATH"] = os.pathsep.join([CHILD_PROCESSES, *rest])
    if before is None:
        _undo.append(functools.partial(os.environ.pop, "PYTHONPATH", None))
    else:
        _undo.append(functools.partial(os.environ.__setitem__, "PYTHONPATH", before))


class _InSpawned:
    """Calls `install` when it is unpickled, which a spawned process does first."""

    def __reduce__(self) -> Any:
        return install, ()


def _set(owner: Any, name: str, value: Any) -> None:
    if hasattr(owner, name):
        _undo.append(functools.partial(setattr, owner, name, getattr(owner, name)))
    else:
        _undo.append(functools.partial(delattr, owner, name))
    setattr(owner, name, value)
