"""Runs programs written for `torch.distributed.fsdp` on unshard, without editing them.

`install()` replaces PyTorch's modules with ours; `unshard run script.py` does so before the script starts.
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

from ..engine.api import FSDPState, name_stages
from ..errors import UnsupportedError
from . import modules, references, torch_composable

__all__ = ["install", "is_installed", "stand_in", "uninstall"]

CHILD_PROCESSES = os.path.join(os.path.dirname(os.path.abspath(__file__)), "child_processes")
"""The folder with the `sitecustomize` that installs the drop-in in child processes."""

_undo: list[Callable[[], Any]] = []


def install(child_processes: bool = False) -> None:
    """Replace `torch.distributed.fsdp` and `torch.distributed._composable.fsdp` with our modules.

    References in modules that are already imported are replaced, too, including PyTorch's own: checkpoints and
    pipelines then test for our `FSDPModule`. A second call is a no-op.

    `child_processes`: also install in all Python processes that inherit this environment, by changing PYTHONPATH, as
    `unshard run` does. Processes that `multiprocessing` starts always have the drop-in.
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
        # PyTorch has removed the legacy composable call, so no replaced module has its name.
        _set(importlib.import_module("torch.distributed._composable"), "fully_shard", torch_composable.fully_shard)
        for name, member in STATE_MEMBERS.items():
            _set(FSDPState, name, member)
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


# -- members of the state of a module -----------------------------------------------------------------------
#
# `torch.distributed.pipelining` runs the backwards of a step with gradient synchronisation off. After the last one it
# takes `fully_shard.state(stage)`, calls `post_backward()` on each parameter group of each of its states, and then
# `_root_post_backward_final_callback()` (until torch 2.14). Torch 2.15 calls `finalize_backward` of the module.


def _end_backward(state: FSDPState) -> None:
    """Reduce the gradients of all parameter groups and reshard."""
    if state.is_initialised:
        state.find_root(state.modules()[0]).end_backward()


def _find_root(state: FSDPState) -> None:
    state.find_root(state.modules()[0])


STATE_MEMBERS = {
    "_state_ctx": property(lambda state: state),
    "all_states": (),  # no parameter group needs its own call: the last callback reduces them all
    "_root_post_backward_final_callback": _end_backward,
    "_comm_ctx": property(lambda state: state),  # 2.15 compares those of stages, which must not share one
    "_lazy_init": _find_root,
    "_pre_forward": FSDPState.pre_forward,  # torch.compile compares functions with these two
    "_post_forward": FSDPState.post_forward,
}
"""Members of `FSDPState` while the drop-in is installed, for PyTorch's code and programs."""


# -- other processes ----------------------------------------------------------------------------------------


def _install_in_spawned_processes() -> None:
    """Let processes that `multiprocessing` spawns install the drop-in before they import the main module."""
    prepare = multiprocessing.spawn.get_preparation_data
    _set(multiprocessing.spawn, "get_preparation_data", lambda name: {**prepare(name), "unshard": _InSpawned()})


def _install_in_child_processes() -> None:
    """Pass the drop-in to launchers that start `python script.py` again for each of the other ranks."""
    before = os.environ.get("PYTHONPATH")
    rest = [each for each in (before or "").split(os.pathsep) if each and each != CHILD_PROCESSES]
    os.environ["PYTHONPATH"] = os.pathsep.join([CHILD_PROCESSES, *rest])
    if before is None:
        _undo.append(functools.partial(os.environ.pop, "PYTHONPATH", None))
    else:
        _undo.append(functools.partial(os.environ.__setitem__, "PYTHONPATH", before))


class _InSpawned:
    """Calls `install` when a spawned process unpickles it, which it does first."""

    def __reduce__(self) -> Any:
        return install, ()


def _set(owner: Any, name: str, value: Any) -> None:
    if hasattr(owner, name):
        _undo.append(functools.partial(setattr, owner, name, getattr(owner, name)))
    else:
        _undo.append(functools.partial(delattr, owner, name))
    setattr(owner, name, value)
