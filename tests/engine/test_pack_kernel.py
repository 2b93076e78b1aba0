"""The kernel that packs gradients on a device, run by Triton's interpreter on the CPU."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec

import pytest


@pytest.mark.slow
@pytest.mark.skipif(find_spec("triton") is None, reason="Triton comes with torch for CUDA only")
def test_equal_to_torch() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(["tests", *sys.path])}
    ran = subprocess.run([sys.executable, "-m", "bed.packed"], env=environment, capture_output=True, text=True)
    assert (ran.returncode, ran.stdout) == (0, "equal\n"), ran.stderr
