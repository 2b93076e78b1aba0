"""examples/launchers/ray_train.py with two workers on this machine, one of which is killed.

Opt in: LAUNCHERS_PYTHON names an interpreter with torch and ray[train].
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest
from bed.programs import PACKAGES

EXAMPLES = Path(__file__).parents[2] / "examples"
PYTHON = os.environ.get("LAUNCHERS_PYTHON")
pytestmark = [pytest.mark.slow, pytest.mark.skipif(PYTHON is None, reason="LAUNCHERS_PYTHON is not set")]

PAUSE = "        mine = torch.arange("


def test_a_killed_worker(tmp_path: Path) -> None:
    (tmp_path / "launchers").mkdir()
    script = shutil.copy(EXAMPLES / "launchers" / "ray_train.py", tmp_path / "launchers")
    text = (EXAMPLES / "elastic.py").read_text()
    assert PAUSE in text
    (tmp_path / "elastic.py").write_text(text.replace(PAUSE, f"        time.sleep(0.05)\n{PAUSE}"))
    assert PYTHON is not None
    output = tmp_path / "output.txt"
    environment = {"PYTHONPATH": PACKAGES, "OMP_NUM_THREADS": "1", "RAY_DEDUP_LOGS": "0", "RAY_COLOR_PREFIX": "0"}
    with output.open("w") as file:
        command = [PYTHON, script, tmp_path / "checkpoints"]
        given = {**os.environ, **environment, "RAY_USAGE_STATS_ENABLED": "0"}
        running = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, env=given)
    limit = time.monotonic() + 300
    while not (step := re.search(r"RayTrainWorker pid=(\d+).* step 30 ", output.read_text())):
        assert running.poll() is None and time.monotonic() < limit, output.read_text()
        time.sleep(0.1)
    os.kill(int(step[1]), signal.SIGKILL)
    try:
        assert running.wait(300) == 0, output.read_text()
    finally:
        running.kill()
    lines = output.read_text()
    resumed = [int(each) for each in re.findall(r"resume at step (\d+)", lines)]
    losses = re.findall(r" step (\d+) (sample .*)", lines)
    assert {0, *resumed} == {*resumed} and 20 <= max(resumed) < 200, lines
    assert {int(each) for each, _ in losses} == set(range(1, 201))
    assert len(set(losses)) == 200, "steps that ran twice must be equal"
