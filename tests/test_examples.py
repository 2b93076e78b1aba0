"""The example of the wrapper's checkpoints goes on where it stopped, also with another number of processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parent.parent


def train(folder: Path, steps: int, processes: int = 2) -> dict[int, str]:
    """The printed loss of each step."""
    program = REPOSITORY / "examples" / "resume_wrapper.py"
    command = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={processes}", str(program), f"--steps={steps}", "--every=2", f"--folder={folder}"]
    path = os.pathsep.join([str(REPOSITORY / "src"), os.environ.get("PYTHONPATH", "")])
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    words = [line.split() for line in done.stdout.splitlines() if line.startswith("step ")]
    return {int(step): loss for _, step, _, loss in words}


@pytest.mark.slow
def test_the_wrappers_example_resumes(tmp_path: Path) -> None:
    straight = train(tmp_path / "straight", 4)
    first, second = train(tmp_path / "resumed", 2), train(tmp_path / "resumed", 4)
    assert {**first, **second} == straight and list(second) == [3, 4]
    assert list(train(tmp_path / "resumed", 6, processes=1)) == [5, 6]
