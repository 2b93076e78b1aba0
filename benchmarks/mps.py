"""Several ranks of NCCL on one CUDA device: CUDA's multi-process service, and the variables that NCCL needs."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

CONTROL = "nvidia-cuda-mps-control"

# NCCL refuses two ranks on one device of a host. Each rank says that it is a host of its own (`host_of`), so they talk
# over sockets, which is a slow network.
SOCKETS = {"NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}

# As many work queues as a process has on a GPU of its own. The service would give it fewer, and streams of one rank
# could hold each other up.
QUEUES = {"CUDA_DEVICE_MAX_CONNECTIONS": os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS", "8")}


def is_there() -> bool:
    return shutil.which(CONTROL) is not None


def host_of(rank: int) -> dict[str, str]:
    return {"NCCL_HOSTID": f"host{rank}"}


@contextmanager
def running() -> Iterator[dict[str, str]]:
    """The environment of processes that use the service. Without it their kernels take turns, which is far slower."""
    folder = Path(tempfile.mkdtemp(prefix="mps-"))
    environment = {"CUDA_MPS_PIPE_DIRECTORY": str(folder / "pipe"), "CUDA_MPS_LOG_DIRECTORY": str(folder / "log")}
    for path in environment.values():
        Path(path).mkdir()
    subprocess.run([CONTROL, "-d"], env={**os.environ, **environment}, check=True)
    try:
        yield environment
    finally:
        subprocess.run([CONTROL], input=b"quit\n", env={**os.environ, **environment}, check=False)
        shutil.rmtree(folder, ignore_errors=True)
