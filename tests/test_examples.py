"""The examples train, and go on where they stopped, also with another number of processes."""

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
    report = Path(re.findall(r"^report: (.*)$", text, re.MULTILINE)[-1])
    assert report.parent == (folder / "report").resolve() and "10 steps on 1 rank" in report.read_text()
    assert "nothing to do" in train("train_bytes.py", 1, *SMALL, f"--folder={folder}")[1]


def test_ranks_with_uneven_work_train_together() -> None:
    """Ranks have different numbers of micro-batches, some steps have none, and ranks skip the vision tower."""
    printed, text = train("two_towers.py", 2)
    assert list(printed) == list(range(1, 41)), text
    tokens = [int(each) for each in re.findall(r"step .* tokens (\d+)", text)]
    assert 0 in tokens and max(tokens) > 1000 and len(set(tokens)) > 30, text
    found = [float(printed[step]) for step in printed]
    assert sum(found[-5:]) < 0.3 * sum(found[:5]), text
    evaluated = re.search(r"evaluation loss (\S+)", text)
    assert evaluated and float(evaluated[1]) < 0.5 * found[0], text


def test_the_program_of_the_page_about_uneven_steps(tmp_path: Path) -> None:
    page = (REPOSITORY / "docs" / "uneven_steps.md").read_text()
    listing, output = re.findall(r"^```(?:python|text)\n(.*?)^```", page, re.MULTILINE | re.DOTALL)[:2]
    path = tmp_path / "uneven.py"
    path.write_text(listing)
    found, text = train(str(path), 2)
    expected = losses(output.splitlines())
    assert list(found) == list(expected) == list(range(5)), text
    for step, loss in expected.items():
        assert float(found[step]) == pytest.approx(float(loss), abs=0.01), text
    rest = r"tokens .*"
    assert re.findall(rest, text) == re.findall(rest, output)


def programs_of_the_start() -> Iterator[tuple[str, list[str]]]:
    """The program after each step of docs/start.md, and what the page says that it prints."""
    text, code, printed = (REPOSITORY / "docs" / "start.md").read_text(), "", []
    for step in re.split(r"^## (?=\d)", text, flags=re.MULTILINE)[1:]:
        for kind, block in re.findall(r"^```(python|diff)\n(.*?)^```", step, re.MULTILINE | re.DOTALL):
            lines = block.splitlines(keepends=True)
            old = "".join(line[1:] for line in lines if line[0] != "+")
            new = "".join(line[1:] for line in lines if line[0] != "-")
            assert kind == "python" or code.count(old) == 1, old
            code = block if kind == "python" else code.replace(old, new)
        printed = re.findall(r"^step \d+ +loss \S+", step, re.MULTILINE) or printed  # a captured step prints the same
        yield code, printed


def test_the_first_steps_print_what_the_page_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = list(programs_of_the_start())
    assert len(steps) == 5
    compare(steps[3], 2, tmp_path, monkeypatch)
    assert sorted(each.name for each in (tmp_path / "checkpoints").iterdir()) == ["step_00000020", "step_00000030"]


@pytest.mark.slow
def test_every_first_step_prints_what_the_page_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = list(programs_of_the_start())
    for number, processes in enumerate((1, 2, 2, 2, 3)):
        compare(steps[number], processes, tmp_path, monkeypatch)


def compare(step: tuple[str, list[str]], processes: int, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)  # where the program saves
    code, printed = step
    (folder / "train.py").write_text(code)
    found, text = train(str(folder / "train.py"), processes)
    expected = losses(printed)
    assert list(found) == list(expected) and len(found) == 3, text
    for number, loss in expected.items():
        assert float(found[number]) == pytest.approx(float(loss), abs=0.01), text
