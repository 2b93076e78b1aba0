"""The examples go on where they stopped, also with another number of processes."""

from __future__ import annotations

import os
import random
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parent.parent


@contextmanager
def program(name: str, processes: int, *options: str) -> Iterator[subprocess.Popen[str]]:
    """An example under torchrun; what it writes to both streams is in one."""
    command = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={processes}", str(REPOSITORY / "examples" / name), *options]
    path = os.pathsep.join([str(REPOSITORY / "src"), os.environ.get("PYTHONPATH", "")])
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as running:
        try:
            yield running
        finally:
            running.kill()  # a test that fails leaves no process


def losses(lines: list[str]) -> dict[int, str]:
    """The printed loss of each step."""
    found = (re.search(r"step (\d+)\S* +loss (\S+)", line) for line in lines)
    return {int(match[1]): match[2] for match in found if match}


def train(name: str, processes: int, *options: str) -> tuple[dict[int, str], str]:
    """Run to the end; the losses, and all that it wrote."""
    with program(name, processes, *options) as running:
        text, _ = running.communicate(timeout=900)
    assert running.returncode == 0, text
    return losses(text.splitlines()), text


@pytest.mark.slow
def test_the_wrappers_example_resumes(tmp_path: Path) -> None:
    def run(folder: str, steps: int, processes: int = 2) -> dict[int, str]:
        options = (f"--steps={steps}", "--every=2", f"--folder={tmp_path / folder}")
        return train("resume_wrapper.py", processes, *options)[0]

    straight = run("straight", 4)
    first, second = run("resumed", 2), run("resumed", 4)
    assert {**first, **second} == straight and list(second) == [3, 4]
    assert list(run("resumed", 6, processes=1)) == [5, 6]


SMALL = ("--layers=1", "--dim=32", "--seq=16", "--batch=12", "--steps=10", "--save-every=2")

# The trainer, and a signal that one of its ranks gets in the middle of a step.
DRIVER = """
import os, signal, sys
sys.path.insert(0, {examples!r})
import train_bytes
draw_starts = train_bytes.draw_starts
def draw_starts_and_stop(data, step, args):
    if step == {step} and int(os.environ["RANK"]) == {rank}:
        os.kill(os.getpid(), signal.{signal})
    return draw_starts(data, step, args)
train_bytes.draw_starts = draw_starts_and_stop
train_bytes.main()
"""


def interrupted(folder: Path, processes: int, step: int, rank: int, name: str) -> tuple[dict[int, str], str, int]:
    """The losses, all that it wrote, and the exit status."""
    driver = folder.parent / "driver.py"
    driver.write_text(DRIVER.format(examples=str(REPOSITORY / "examples"), step=step, rank=rank, signal=name))
    with program(str(driver), processes, *SMALL, f"--folder={folder}") as running:
        text, _ = running.communicate(timeout=900)
    return losses(text.splitlines()), text, running.returncode


def begun(text: str) -> int:
    found = re.search(r"has step (\d+) of 10: going on", text)
    return int(found[1]) if found else 0


@pytest.mark.slow
def test_the_trainer_resumes_with_other_numbers_of_processes(tmp_path: Path) -> None:
    folder, chance = tmp_path / "run", random.Random()
    straight, _ = train("train_bytes.py", 2, *SMALL)
    assert list(straight) == list(range(1, 11))

    killed_in, rank = chance.randint(3, 7), chance.randrange(2)
    first, text, status = interrupted(folder, 2, killed_in, rank, "SIGKILL")
    assert status != 0 and list(first) == list(range(1, killed_in)), text
    assert {step: straight[step] for step in first} == first  # the same arithmetic

    stopped_in, rank = chance.randint(8, 9), chance.randrange(3)
    second, text, status = interrupted(folder, 3, stopped_in, rank, "SIGTERM")
    # The save that was under way when a rank was killed may not be published; the one before it is.
    assert status == 0 and killed_in - 5 < begun(text) < killed_in, (killed_in, text)
    assert list(second) == list(range(begun(text) + 1, stopped_in + 1))
    assert f"stopped after step {stopped_in};" in text

    third, text = train("train_bytes.py", 1, *SMALL, f"--folder={folder}")
    assert begun(text) == stopped_in and list(third) == list(range(stopped_in + 1, 11))
    for step, loss in [*second.items(), *third.items()]:
        assert float(loss) == pytest.approx(float(straight[step]), rel=1e-6), (killed_in, stopped_in, step)
    assert "nothing to do" in train("train_bytes.py", 1, *SMALL, f"--folder={folder}")[1]
