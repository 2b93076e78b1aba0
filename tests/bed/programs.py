"""Programs that are run in processes of their own."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import unshard

PACKAGES = os.pathsep.join([str(Path(unshard.__file__).parents[1]), os.environ.get("PYTHONPATH", "")])

TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]

DROPIN = ["-m", "unshard.dropin"]


def python(*arguments: Any, status: int = 0, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *map(str, arguments)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": PACKAGES}
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, env=environment, cwd=cwd)
    assert done.returncode == status, done.stderr
    return done


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
