"""Checks a machine before training: versions, GPUs, limits, and what local ranks measure (see `diagnosis_ranks`)."""

from __future__ import annotations

import json
import os
import platform
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from .. import __version__
from ..engine.api import mps_runs
from ..errors import ArgumentError
from ..torch_private.versions import NEWEST, OLDEST
from .diagnosis_ranks import FAILED, Row, measured_by_job
from .precision_report import table

Say = Callable[[str], object]

_MARKS = {True: "ok", False: "NO", None: ""}
_GIB = 1024**3
_SHARED_MEMORY, _DISK, _HOST_MEMORY = _GIB, _GIB, 2 * _GIB
_FILES, _PROCESSES = 1024, 1024
_FILES_PER_RANK = 16
_PATIENCE = 180.0  # seconds for local ranks; the start of torch takes most of it on a busy machine
_LOCAL = "127.0.0.1"
_VARIABLES = ("NCCL_", "TORCH_NCCL_", "GLOO_", "CUDA_", "PYTORCH_", "TORCH_DISTRIBUTED_", "UNSHARD_")
_SLOW = {
    "CUDA_LAUNCH_BLOCKING": "the host waits for every kernel",
    "NCCL_P2P_DISABLE": "GPUs do not use NVLink",
    "NCCL_SHM_DISABLE": "ranks of one host exchange data over the network",
    "NCCL_IB_DISABLE": "hosts do not use InfiniBand",
}
"""Variables that are slow if they are set to a true value."""


@dataclass(frozen=True)
class Diagnosis:
    """The result of `doctor`. `rows` has a row for each checked thing, and `ok` is False if one of them needs a fix."""

    rows: list[Row]

    @property
    def ok(self) -> bool:
        return all(row.ok is not False for row in self.rows)

    def to_dict(self) -> dict[str, Any]:
        return {
            "kind": "doctor",
            "unshard": __version__,
            "ok": self.ok,
            "rows": [row.to_dict() for row in self.rows],
        }

    def __str__(self) -> str:
        lines = table(("", "what", "value"), [(_MARKS[row.ok], row.what, row.value) for row in self.rows])
        red = [f"- {row.what}: {row.advice}" for row in self.rows if row.ok is False]
        hints = [f"- {row.what}: {row.advice}" for row in self.rows if row.ok is not False and row.advice]
        lines += ["", "What to do:", *red] if red else ["", "Everything is fine."]
        return "\n".join([*lines, *(["", "Hints:", *hints] if hints else [])])


def doctor(nproc_per_node: int | None = None, *, quick: bool = False, say: Say = lambda text: None) -> Diagnosis:
    """Check versions, GPUs and limits of this machine, and let ranks measure collectives and train a small model.

    The ranks are processes that this function starts: `nproc_per_node`, by default one per GPU, or 2 without GPUs. In a
    job of torchrun, all ranks call this function together, and the job's ranks measure. With `quick`, no ranks are
    started and nothing is measured. `say` is called with what the function does next.

    Raises:
        ArgumentError: `nproc_per_node` is less than 1.

    Example::

        print(doctor(nproc_per_node=2))
    """
    if nproc_per_node is not None and nproc_per_node < 1:
        raise ArgumentError(f"nproc_per_node must be at least 1, got {nproc_per_node}.")
    if "RANK" in os.environ or dist.is_initialized():
        here = machine(int(os.environ.get("LOCAL_WORLD_SIZE", 1)))
        return Diagnosis(measured_by_job(here, quick, say))
    ranks = nproc_per_node or torch.cuda.device_count() or 2
    rows = machine(ranks)
    return Diagnosis(rows if quick else rows + _measured_by_local_ranks(ranks, say))


# -- this machine ---------------------------------------------------------------------------------------------------


def machine(ranks: int) -> list[Row]:
    """Look at this machine, on which `ranks` ranks are to run."""
    return [*_versions(), *_gpus(), *_cores(ranks), *_limits(ranks), *_environment()]


def _versions() -> Iterator[Row]:
    yield Row("Python", platform.python_version(), sys.version_info >= (3, 10))
    found = tuple(int(each) for each in torch.__version__.split(".")[:2] if each.isdecimal())
    oldest, newest = (".".join(map(str, each)) for each in (OLDEST, NEWEST))
    tested = OLDEST <= found <= NEWEST  # an older torch cannot be imported together with unshard
    advice = f"unshard was tested with torch {oldest} to {newest}. If something fails, try torch {newest}."
    yield Row("torch", torch.__version__, True if tested else None, "" if tested else advice)
    yield Row("unshard", __version__, True)
    smi = _nvidia_smi("driver_version")
    if torch.version.cuda is None:
        advice = "This machine has a GPU, but torch is built without CUDA. Install torch with CUDA."
        yield Row("CUDA", "not in this torch", False if smi else None, advice if smi else "")
        return
    usable = torch.cuda.is_available()
    advice = f"torch cannot use the GPU. Install a driver for CUDA {torch.version.cuda}, or torch for an older CUDA."
    value = f"{torch.version.cuda}, {'usable' if usable else 'no usable GPU'}"
    yield Row("CUDA", value, usable or (False if smi else None), advice if smi and not usable else "")
    yield Row("driver", smi[0][0] if smi else "unknown (no nvidia-smi)", True if smi else None)
    if dist.is_nccl_available():
        yield Row("NCCL", ".".join(map(str, torch.cuda.nccl.version())), True)


def _nvidia_smi(*fields: str) -> list[list[str]]:
    """Ask nvidia-smi, which takes no memory of the GPUs. Return a list per GPU, or nothing."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    command = [program, f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return []
    found = [line.split(", ") for line in done.stdout.splitlines()] if done.returncode == 0 else []
    return [values for values in found if len(values) == len(fields)]


def _gpus() -> Iterator[Row]:
    in_use = {uuid: int(used) * 2**20 for uuid, used in _nvidia_smi("uuid", "memory.used") if used.isdecimal()}
    for number in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(number)
        used = in_use.get(f"GPU-{getattr(gpu, 'uuid', '')}", 0)
        busy = used > gpu.total_memory / 10
        advice = "Other processes use its memory: see `nvidia-smi`." if busy else ""
        value = f"{gpu.name}, {_size(gpu.total_memory)}, {_size(used)} in use"
        yield Row(f"GPU {number}", value, None if busy else True, advice)
    if torch.cuda.is_available():
        yield Row("MPS", "runs (several processes share a GPU)" if mps_runs() else "does not run")


def _cores(ranks: int) -> Iterator[Row]:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    yield Row("CPU cores", str(cores), None if ranks > cores else True, _few_cores(ranks, cores))
    threads = os.environ.get("OMP_NUM_THREADS", "")
    if not threads.isdecimal():
        yield Row("OMP_NUM_THREADS", threads or "not set (torchrun sets 1 for several ranks)", not threads or None)
    elif ranks > 1 and int(threads) * ranks > cores:
        advice = f"{ranks} ranks with {threads} threads share {cores} cores. Set it to {max(1, cores // ranks)}."
        yield Row("OMP_NUM_THREADS", threads, int(threads) == 1, advice if int(threads) > 1 else "")
    else:
        yield Row("OMP_NUM_THREADS", threads, True)


def _few_cores(ranks: int, cores: int) -> str:
    return f"{ranks} ranks share {cores} cores, so they are slower than they could be." if ranks > cores else ""


def _limits(ranks: int) -> Iterator[Row]:
    if (memory := _available_memory()) is not None:
        advice = "Free memory on the host, or give the container more. Checkpoints and CPU offload need it."
        yield _least("host memory", f"{_size(memory)} available", memory, _HOST_MEMORY, advice)
    if os.path.isdir("/dev/shm"):
        disk = shutil.disk_usage("/dev/shm")
        advice = "Start the container with --shm-size=8g or --ipc=host: NCCL and data loader workers need it."
        yield _least(
            "shared memory", f"{_size(disk.free)} of {_size(disk.total)} free", disk.free, _SHARED_MEMORY, advice
        )
    place = tempfile.gettempdir()
    free = shutil.disk_usage(place).free
    advice = f"Free space in {place}, or set TMPDIR: the compiler and the ranks write files there."
    yield _least("temporary files", f"{_size(free)} free in {place}", free, _DISK, advice)
    for what, kind, least, flag in (
        ("open files", resource.RLIMIT_NOFILE, max(_FILES, _FILES_PER_RANK * ranks), "-n"),
        ("processes", resource.RLIMIT_NPROC, _PROCESSES, "-u"),
    ):
        soft, _ = resource.getrlimit(kind)
        unlimited = soft == resource.RLIM_INFINITY
        advice = f"Raise the limit: `ulimit {flag} 65536`."
        yield _least(
            what, "unlimited" if unlimited else f"at most {soft:,}", least if unlimited else soft, least, advice
        )


def _least(what: str, value: str, found: int, least: int, advice: str) -> Row:
    return Row(what, value, found >= least, "" if found >= least else advice)


def _available_memory() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), None)


def _environment() -> Iterator[Row]:
    for name, value in sorted(os.environ.items()):
        if name.startswith(_VARIABLES):
            slow = name in _SLOW and value not in ("", "0")
            yield Row(name, value, None, f"Unset it unless you need it: {_SLOW[name]}." if slow else "")


def _size(count: float) -> str:
    for unit in ("bytes", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}"
        count /= 1024
    return f"{count:,.1f} GiB"


# -- local ranks ----------------------------------------------------------------------------------------------------


def _measured_by_local_ranks(ranks: int, say: Say) -> list[Row]:
    """Start ranks that measure, and return their rows. Ranks that fail or hang are a row, too."""
    say(f"starting {ranks} ranks")
    store = dist.TCPStore(_LOCAL, 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=_PATIENCE))
    with tempfile.TemporaryDirectory(prefix="unshard_doctor_") as folder:
        outputs = [Path(folder, f"{rank}.txt") for rank in range(ranks)]
        started = [_start(rank, ranks, store.port, outputs[rank]) for rank in range(ranks)]
        try:
            failed = _wait(started, store, say)
        finally:
            for process in started:
                process.kill()
                process.wait()
        if failed is None:
            return [Row(**row) for row in json.loads(store.get("rows"))]
        rank, what = failed
        stage = _said(store, f"stage{rank}") or "starting"
        lines = outputs[rank].read_text(errors="replace").strip().splitlines()
        said = _said(store, f"error{rank}") or (lines[-1] if lines else "no output")
        return [Row("ranks", f"rank {rank} {what} while {stage}: {said}", False, FAILED)]


def _start(rank: int, ranks: int, port: int, output: Path) -> subprocess.Popen[bytes]:
    settings = {"OMP_NUM_THREADS": "1", **os.environ, "RANK": str(rank), "LOCAL_RANK": str(rank)}
    settings.update(WORLD_SIZE=str(ranks), LOCAL_WORLD_SIZE=str(ranks), UNSHARD_DOCTOR_PORT=str(port))
    package = str(Path(__file__).resolve().parents[2])
    settings["PYTHONPATH"] = os.pathsep.join(filter(None, [package, os.environ.get("PYTHONPATH")]))
    command = [sys.executable, "-c", "from unshard.tools.diagnosis_ranks import main; main()"]
    with output.open("wb") as file:
        return subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, env=settings)


def _wait(started: list[subprocess.Popen[bytes]], store: Any, say: Say) -> tuple[int, str] | None:
    """Wait for all ranks. Return None, or the number of a rank that failed and what it did."""
    end, stage = time.monotonic() + _PATIENCE, ""
    while True:
        codes = [process.poll() for process in started]
        for rank, code in enumerate(codes):
            if code:
                return rank, f"ended with signal {-code}" if code < 0 else "failed"
        if all(code == 0 for code in codes):
            return None
        if time.monotonic() > end:
            return codes.index(None), f"did not finish in {_PATIENCE:.0f} s"
        now = _said(store, "stage0")
        if now and now != stage:
            say(stage := now)
        time.sleep(0.05)


def _said(store: Any, key: str) -> str:
    return store.get(key).decode() if store.check([key]) else ""
