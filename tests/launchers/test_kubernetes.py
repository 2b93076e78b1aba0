"""examples/launchers/kubernetes.yaml is valid. Opt in: `pip install kubernetes-validate`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

MANIFEST = Path(__file__).parents[2] / "examples" / "launchers" / "kubernetes.yaml"


@pytest.mark.slow
@pytest.mark.parametrize("version", ["1.28", "1.37"])
def test_the_manifest(version: str) -> None:
    pytest.importorskip("kubernetes_validate")
    command = [sys.executable, "-m", "kubernetes_validate", "--strict", "-k", version, MANIFEST]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    told = done.stdout + done.stderr
    assert done.returncode == 0 and told.count(" passed for resource ") == 2, told
