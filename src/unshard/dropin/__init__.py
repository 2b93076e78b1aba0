"""Lets programs that were written for `torch.distributed.fsdp` run on unshard, unedited.

`install()` puts our modules in the places of PyTorch's; `unshard run script.py` does so before a script starts.
"""

from __future__ import annotations

import functools
import importlib
import multiprocessing.spawn
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

from ..compat import torch_composable
from ..errors import UnsupportedError
from . import facades, rebinding

__all__ = ["install", "is_installed", "stand_in", "uninstall"]

_undo: list[Callable[[], Any]] = []


def install() -> None:
    """Put our modules in the places of `torch.distributed.fsdp` and `torch.distributed._composable.fsdp`.

    Also in modules that have imported names from there already, PyTorch's own among them: checkpoints and pipelines ask
    whether a module is an `FSDPModule`, and mean ours from now on. Calling it again does nothing.
    """
    if _undo:
        return
    if not dist.is_available():
        raise UnsupportedError("This build of PyTorch has no torch.distributed.")
    for name in rebinding.UNTOUCHED:
        importlib.import_module(name)  # while all they import is PyTorch's
    ours = facades.build()
    try:
        _replace_modules(ours)
        rebinding.Rebinding(rebinding.Table(ours), _undo).run()
        _offer_legacy()
        _install_in_children()
    except BaseException:
        uninstall()
        raise


def uninstall() -> None:
    """Put everything back. What was imported in between keeps what it got."""
    while _undo:
        _undo.pop()()


def is_installed() -> bool:
    return bool(_undo)


@contextmanager
def stand_in() -> Iterator[None]:
    """Installed in here; for tests."""
    already = is_installed()
    install()
    try:
        yield
    finally:
        if not already:
            uninstall()


def _replace_modules(ours: dict[str, facades.Facade]) -> None:
    for name, facade in ours.items():
        _undo.append(functools.partial(sys.modules.__setitem__, name, sys.modules[name]))
        sys.modules[name] = facade
    for tree in facades.TREES:
        parent, _, last = tree.rpartition(".")
        _set(sys.modules[parent], last, ours[tree])


def _offer_legacy() -> None:
    """The older call has been taken out of PyTorch; programs of its time find it where it was."""
    package = importlib.import_module("torch.distributed._composable")
    for name in torch_composable.__all__:
        _set(package, name, getattr(torch_composable, name))


def _install_in_children() -> None:
    """Processes that `multiprocessing` spawns import the main module anew; they install before they do."""
    prepare = multiprocessing.spawn.get_preparation_data
    _set(multiprocessing.spawn, "get_preparation_data", lambda name: {**prepare(name), "unshard": _InChild()})


class _InChild:
    """Installs where it is unpickled, which is the first thing that such a process does."""

    def __reduce__(self) -> Any:
        return install, ()


def _set(owner: Any, name: str, value: Any) -> None:
    if hasattr(owner, name):
        _undo.append(functools.partial(setattr, owner, name, getattr(owner, name)))
    else:
        _undo.append(functools.partial(delattr, owner, name))
    setattr(owner, name, value)
