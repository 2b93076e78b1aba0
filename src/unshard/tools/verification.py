"""Trains a model unsharded and sharded, and reports whether losses, gradients and parameters agree, and why not."""

from __future__ import annotations

import importlib
import multiprocessing
import os
import pickle
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from multiprocessing import connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from .. import __version__
from ..errors import ArgumentError, StateError
from .precision_report import NOTHING, table
from .program import Program, load_program, sizes_in
from .verification_causes import Run
from .verification_compare import compare
from .verification_runs import Job, is_shape, probe, run_rank

_SLOW_IMPORT = "torch._dynamo"  # optimizers import it, in each process if the parent of all has not done it
LIMIT_S = 1800
"""The time that each run may take. A collective may take `verification_runs.COLLECTIVE_LIMIT_S`."""


@dataclass(frozen=True)
class Verification:
    """The result of `verify`. `str()` returns a report."""

    name: str
    steps: int
    device: str
    runs: tuple[Run, ...]

    @property
    def agree(self) -> bool:
        return all(each.agree for each in self.runs)

    def to_dict(self) -> dict[str, Any]:
        runs = [{"ranks": each.ranks, "agree": each.agree, **asdict(each)} for each in self.runs]
        return {
            "kind": "verify",
            "unshard": __version__,
            "name": self.name,
            "agree": self.agree,
            "steps": self.steps,
            "device": self.device,
            "runs": runs,
        }

    def __str__(self) -> str:
        head = ["ranks", "agrees", "first difference", "step", "difference", "tolerance"]
        rows = [_row(each) for each in self.runs]
        lines = [f"{self.name}: {self.steps} steps on {self.device}, sharded and unsharded", ""]
        lines += table(head, rows, numbers=(0, 3, 4, 5))
        told: dict[tuple[str, ...], list[str]] = {}
        for run in self.runs:
            told.setdefault((*run.causes, *(f"Note: {each}" for each in run.notes)), []).append(str(run.ranks))
        for texts, ranks in told.items():
            if texts:
                lines += ["", f"{', '.join(ranks)} ranks:", *(f"- {each}" for each in texts)]
        verdict = "The sharded model trains like the unsharded one."
        return "\n".join([*lines, "", verdict if self.agree else "The sharded model trains differently."])


def _row(run: Run) -> list[str]:
    each = run.differs
    if each is None:
        return [str(run.ranks), "yes", NOTHING, NOTHING, NOTHING, NOTHING]
    what = f"{each.what} of {each.name}" if each.what != "loss" else f"loss; gradient of {each.name or 'none'}"
    return [str(run.ranks), "no", what, str(each.step), f"{each.difference:.1e}", f"{each.tolerance:.1e}"]


def verify(
    program: Program | str | Callable[[], nn.Module],
    *,
    ranks: Sequence[int] | int = (2, 3),
    steps: int = 3,
    device: str = "cpu",
    batch: Any = None,
    tolerance: float | None = None,
) -> Verification:
    """Train `program` for `steps` steps unsharded and on each number of `ranks`, in other processes, and compare.

    `program` is a `Program`, `FILE:FUNCTION`, or the function that builds the unsharded model. The unsharded model
    trains on the batches of all ranks, with the mean of their losses. `batch` is a function `batch(rank, step)`, a
    shape such as "4x128", or a constant. `tolerance` is relative to the norm of each tensor, 1e-5 by default in
    float32. Before each forward, the generators of Python, NumPy and torch are seeded by rank and step.

    `device` is "cpu" (Gloo) or "cuda" (NCCL).

    Raises:
        ArgumentError: the program or another argument is invalid.
        StateError: a rank of the sharded model failed, and the unsharded model did not.

    Example::

        print(verify("train.py:build_model", ranks=(2, 3)))
    """
    loaded = load_program(program) if isinstance(program, str) else program
    if not isinstance(loaded, Program):
        if not callable(loaded) or isinstance(loaded, nn.Module):
            raise ArgumentError(
                f"Expected a Program, FILE:FUNCTION or a function that builds the model, got {type(loaded).__name__}."
            )
        loaded = Program(loaded, name=getattr(loaded, "__qualname__", "build"))
    worlds = (ranks,) if isinstance(ranks, int) else tuple(ranks)
    _check(worlds, steps, device, batch)
    with tempfile.TemporaryDirectory(prefix="unshard-verify-") as folder:
        # A process forked from one with OpenMP threads must not start threads itself.
        threads = max(1, torch.get_num_threads() // max(worlds)) if loaded.target else 1
        job = Job(loaded.target or loaded, batch, steps, device, Path(folder), tolerance, threads)
        _run(job, [(probe, ())])
        runs = []
        for world in worlds:
            _run(job, [(run_rank, (rank, world)) for rank in range(world)])
            runs += _run(job, [(compare, (world,))])
    return Verification(loaded.name or "model", steps, device, tuple(runs))


def _check(worlds: tuple[int, ...], steps: int, device: str, batch: Any) -> None:
    if not worlds or any(not isinstance(each, int) or each < 1 for each in worlds):
        raise ArgumentError(f"ranks must be positive integers such as (2, 3), got {worlds}.")
    if not isinstance(steps, int) or steps < 1:
        raise ArgumentError(f"steps must be a positive integer, got {steps!r}.")
    if device not in ("cpu", "cuda"):
        raise ArgumentError(f"device must be 'cpu' or 'cuda', got {device!r}.")
    if device == "cuda" and torch.cuda.device_count() < max(worlds):
        raise ArgumentError(
            f"{max(worlds)} ranks need {max(worlds)} CUDA devices, but there are {torch.cuda.device_count()}. Pass "
            "fewer ranks, or the device cpu."
        )
    if is_shape(batch):
        sizes_in(batch)
    if dist.is_initialized():
        raise StateError(
            "verify starts its own jobs. Call it in a process without a process group, not in a job. If a file joins a "
            'job when it is imported, put that under `if __name__ == "__main__":`.'
        )


# -- processes ----------------------------------------------------------------------------------------------


def _context(job: Job) -> Any:
    """Choose how to start processes. Only a fork can take functions that cannot be imported; CUDA survives no fork."""
    known = multiprocessing.get_all_start_methods()
    if job.device == "cpu" and "fork" in known:
        if not isinstance(job.program, str):
            importlib.import_module(_SLOW_IMPORT)
            return multiprocessing.get_context("fork")
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([_SLOW_IMPORT, __name__])
        return context
    try:
        pickle.dumps(job)
    except Exception as error:
        raise ArgumentError(
            f"Other processes cannot import this program ({error}). Pass FILE:FUNCTION, or functions that are at the "
            "top of a module."
        ) from error
    return multiprocessing.get_context("spawn")


def _run(job: Job, tasks: Sequence[tuple[Callable[..., Any], tuple[int, ...]]]) -> list[Any]:
    """Run each task in a process, and return the results. If a process fails, end the others and raise."""
    context, processes = _context(job), []
    files = [job.folder / f"result-{number}" for number in range(len(tasks))]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of forks; the children use one thread
            for (task, arguments), file in zip(tasks, files, strict=True):
                processes.append(context.Process(target=_work, args=(task, job, arguments, file)))
                processes[-1].start()
        end = time.monotonic() + LIMIT_S
        running = dict(enumerate(processes))
        while running:
            ready = connection.wait([each.sentinel for each in running.values()], max(0.0, end - time.monotonic()))
            ended = {number: each for number, each in running.items() if each.sentinel in ready}
            if not ended:
                raise StateError(f"{_title(tasks, min(running))} did not finish in {LIMIT_S} s. Take fewer steps.")
            for each in ended.values():
                each.join()
            if any(each.exitcode for each in ended.values()):
                time.sleep(0.2)  # others fail because of the first failure, or reveal that they failed before
                _raise_first(tasks, files, processes)
            for number in ended:
                del running[number]
    finally:
        for each in processes:
            if each.is_alive():
                each.kill()
            each.join()
    return [pickle.loads(file.read_bytes())["result"] for file in files]


def _title(tasks: Sequence[tuple[Callable[..., Any], tuple[int, ...]]], number: int) -> str:
    task, _ = tasks[number]
    return f"Rank {number} of {len(tasks)}" if task is run_rank else "The unsharded model"


def _raise_first(tasks: Any, files: Sequence[Path], processes: Sequence[Any]) -> None:
    """Raise the error of the process that failed first. A process that died without an error comes before all."""
    for number, (file, process) in enumerate(zip(files, processes, strict=True)):
        if process.exitcode and not file.exists():
            raise StateError(
                f"{_title(tasks, number)} died with exit status {process.exitcode} (-9: killed, perhaps because memory "
                "ran out; -11: crashed)."
            )
    failed = {n: pickle.loads(file.read_bytes()) for n, file in enumerate(files) if file.exists()}
    failed = {number: each for number, each in failed.items() if "error" in each}
    number = min(failed, key=lambda each: failed[each]["time"])
    if failed[number]["is_argument"]:
        who = f"{_title(tasks, number)} failed: " if tasks[number][0] is run_rank else ""
        raise ArgumentError(who + failed[number]["error"])
    cause = RuntimeError(f"traceback of that process:\n{failed[number]['traceback']}")
    raise StateError(f"{_title(tasks, number)} failed: {failed[number]['error']}") from cause


def _place(error: BaseException) -> str:
    """Return the last line outside this package and torch, which is the user's."""
    error = error.__cause__ or error
    libraries = tuple(str(Path(each).parent) for each in (torch.__file__, __file__.rpartition("tools")[0]))
    frames = [each for each in traceback.extract_tb(error.__traceback__) if not each.filename.startswith(libraries)]
    return f" (at {frames[-1].filename}:{frames[-1].lineno})" if frames else ""


def _work(task: Callable[..., Any], job: Job, arguments: tuple[int, ...], file: Path) -> None:
    os.dup2(2, 1)  # what the program prints must not get into the report
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # gloo would look up the name of the host
    torch.set_num_threads(job.threads)
    if job.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # fully_shard would choose CUDA
    try:
        content = {"result": task(job, *arguments)}
    except BaseException as error:
        lines, is_argument = str(error).strip().splitlines() or [""], isinstance(error, ArgumentError)
        content = {
            "error": (str(error) if is_argument else f"{type(error).__name__}: {lines[0]}") + _place(error),
            "traceback": traceback.format_exc(),
            "is_argument": is_argument,
            "time": time.time(),
        }
    part = file.with_suffix(".part")
    part.write_bytes(pickle.dumps(content))
    part.rename(file)
    if "error" in content:
        os._exit(1)
