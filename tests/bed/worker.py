"""The side of the pool that runs in a worker process: take a job, run it as one rank, say how it ended."""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import faulthandler
import functools
import gc
import importlib
import os
import pickle
import signal
import sys
import time
import traceback
import warnings
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

READY, RELEASE, CLEAN = b"ready", b"release", b"clean"

# How long the pool waits for a job, in seconds. On a machine that others use, too, a job has taken ten times as long.
PATIENCE = 600.0

# Longer than that: a collective that nobody answers is reported as a hang, and never ends a test by failing by itself.
COLLECTIVE_TIMEOUT = datetime.timedelta(seconds=2 * PATIENCE)


@dataclass(frozen=True)
class Job:
    """One function call, made on every rank of a world."""

    id: str
    module: str
    name: str
    size: int
    kwargs: bytes  # pickled by themselves: to read them, `path` must hold already
    backend: str = "gloo"
    filters: tuple[str, ...] = ()
    path: tuple[str, ...] = ()


@dataclass(frozen=True)
class Outcome:
    """How one rank ended: `kind` is value, error, skip or xfail; `detail` the value, or the text.

    `when` is read off the machine's clock that all processes share: the failure that came first is the cause.
    """

    kind: str
    detail: Any
    when: float = field(default_factory=time.monotonic)


def serve(
    pipe: Connection, address: tuple[str, int], dump: str, environment: dict[str, str], namespaces: list[str]
) -> None:
    """Run jobs from the pipe until the pool closes it."""
    os.environ.update(environment)
    if namespaces:
        enter_namespaces(namespaces)
        os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
        # A process in a network keeps it alive. This one must not outlive its parent, even if it hangs in a collective.
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the pool, which then ends the workers
    with open(dump, "w") as stacks:
        # The handlers write without Python's help, so a worker that hangs or crashes inside C++ reports too.
        faulthandler.enable(file=stacks)
        faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
        if sys.platform == "linux":
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # else gloo looks up the host's name
        _rewrite_asserts()
        store = dist.TCPStore(*address, is_master=False, timeout=COLLECTIVE_TIMEOUT)
        gc.freeze()
        pipe.send_bytes(READY)
        with contextlib.suppress(EOFError):
            while True:
                _answer(pipe, store, pipe.recv_bytes())


def enter_namespaces(paths: list[str]) -> None:
    """Let this thread, and what it starts, enter namespaces."""
    libc = ctypes.CDLL(None, use_errno=True)
    for path in paths:
        with open(path) as file:
            if libc.setns(file.fileno(), 0):
                raise OSError(ctypes.get_errno(), f"cannot enter {path}")


def _answer(pipe: Connection, store: dist.Store, message: bytes) -> None:
    outcome = _run(store, message)
    pipe.send_bytes(_pack(outcome))
    if outcome.kind == "error":
        _clean()  # at once: closing our sockets wakes ranks that wait for us; then the pool ends this process
    # The others may still be inside their last collective, so we keep our end open until all have finished.
    if pipe.recv_bytes() != RELEASE:
        raise RuntimeError("the pool sent a job before releasing the one before")
    pipe.send_bytes(_clean().encode() or CLEAN)


def _run(store: dist.Store, message: bytes) -> Outcome:
    hook = sys.excepthook
    try:
        rank, job = pickle.loads(message)
        sys.path[:] = job.path  # of the pool now: it may have learnt of test folders since we started
        kwargs = pickle.loads(job.kwargs)
        with warnings.catch_warnings():
            _apply_filters(job.filters)
            _enter(rank, job, store)
            return Outcome("value", _resolve(job)(**kwargs))
    except pytest.skip.Exception as stop:
        return Outcome("skip", str(stop))
    except pytest.xfail.Exception as stop:
        return Outcome("xfail", str(stop))
    except BaseException:
        return Outcome("error", traceback.format_exc())
    finally:
        sys.excepthook = hook  # init_process_group wraps it anew each time


def _enter(rank: int, job: Job, store: dist.Store) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    if job.backend == "nccl":  # as a program does; a mesh warns of a device nobody chose
        torch.cuda.set_device(rank % torch.cuda.device_count())
        torch.cuda.init()
    dist.init_process_group(
        job.backend,
        store=dist.PrefixStore(job.id, store),
        rank=rank,
        world_size=job.size,
        timeout=COLLECTIVE_TIMEOUT,
    )


def _resolve(job: Job) -> Any:
    """The function a job names: of a test decorated with `@world`, its body."""
    found = functools.reduce(getattr, job.name.split("."), importlib.import_module(job.module))
    return getattr(found, "body", found)


def _pack(outcome: Outcome) -> bytes:
    # Plain pickle and not Connection.send: that one would hand tensors over as shared memory.
    try:
        return pickle.dumps(outcome)
    except Exception:
        text = "the rank's return value cannot be pickled:\n" + traceback.format_exc()
        return pickle.dumps(Outcome("error", text))


def _clean() -> str:
    """Leave nothing of a job behind for the next one; returns what prevented it."""
    try:
        if dist.is_initialized():
            dist.destroy_process_group()
            if "torch.distributed.tensor" in sys.modules:
                _forget_meshes()
    except Exception:
        return "while leaving the process group:\n" + traceback.format_exc()
    torch.set_default_dtype(torch.float32)
    torch.set_grad_enabled(True)
    if torch.are_deterministic_algorithms_enabled():
        torch.use_deterministic_algorithms(False)  # a second, for it imports the compiler
    gc.collect()
    gc.freeze()  # what is left are imported modules: the next collection need not walk them again
    return ""


def _forget_meshes() -> None:
    """DTensor keeps the meshes of results it has computed, and hands them out for every mesh equal to them.

    The next job's meshes may be equal, but their process groups are others; and those of this job would live on, each
    with threads of its own. There is no public way.
    """
    from torch.distributed.tensor import _collective_utils, _redistribute, debug

    debug._clear_sharding_prop_cache()
    _redistribute.clear_redistribute_planner_cache()
    _redistribute._gen_transform_infos.cache_clear()
    _collective_utils.MeshTopoInfo.build_from_mesh.cache_clear()


def _apply_filters(filters: tuple[str, ...]) -> None:
    """Treat warnings here as the pytest configuration does in the main process."""
    if filters:
        from _pytest.config import parse_warning_filter

        for line in filters:
            warnings.filterwarnings(*parse_warning_filter(line, escape=False))


def rewrite_helpers() -> None:
    """The same for the asserts in modules of the bed that are not imported yet."""
    names = {f"bed.{file.stem}" for file in Path(__file__).parent.glob("*.py")}
    pytest.register_assert_rewrite(*sorted(names - {"bed.__init__", *sys.modules}))


def _rewrite_asserts() -> None:
    """Let a bare `assert a == b` in a body show its values, as it does in the main process."""
    try:
        from _pytest.assertion import install_importhook
        from _pytest.config import get_config

        install_importhook(get_config())
        rewrite_helpers()
    except Exception as error:  # no public interface: another pytest may not have it, and plain asserts do
        warnings.warn(f"asserts in workers will not show their values: {error!r}", stacklevel=1)
