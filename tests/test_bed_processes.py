"""`pytest --processes 2`: every test runs once, failures are reported, a process that dies ends the run."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from bed import processes

CONFTEST = f"""
import importlib.util

spec = importlib.util.spec_from_file_location("processes", {processes.__file__!r})
processes = importlib.util.module_from_spec(spec)
spec.loader.exec_module(processes)

def pytest_runtestloop(session):
    processes.run(session, 2, lambda: print("left", flush=True))
    return True
"""
TESTS = """
import os
import pytest

@pytest.fixture(scope="module")
def process():
    yield os.getpid()
    with open("ended", "a") as file:
        file.write(__name__ + chr(10))

@pytest.mark.parametrize("number", range({count}))
def test_passes(number, process, tmp_path):
    assert os.getpid() == process

def test_fails(process):
    print("what it printed")
    assert os.getpid() == 0

def test_is_skipped():
    pytest.skip("not today")
"""


def run(folder: Path, *options: str, **files: str) -> subprocess.CompletedProcess[str]:
    """Run pytest on these files in two processes."""
    (folder / "conftest.py").write_text(CONFTEST)
    for name, source in files.items():
        (folder / f"test_{name}.py").write_text(source)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *options]
    return subprocess.run(command, capture_output=True, text=True, cwd=folder, timeout=300)


def test_every_test_runs_once_and_failures_are_reported(tmp_path: Path) -> None:
    files = {name: TESTS.format(count=count) for name, count in (("a", 3), ("b", 5), ("c", 2))}
    done = run(tmp_path, "--junit-xml=ran.xml", **files)
    assert done.returncode == pytest.ExitCode.TESTS_FAILED, done.stdout
    assert "3 failed, 10 passed, 3 skipped" in done.stdout
    ran = re.findall(r'<testcase classname="(\S+)" name="(\S+)"', (tmp_path / "ran.xml").read_text())
    assert len(ran) == len(set(ran)) == 16
    assert done.stdout.count("what it printed") == 2 * 3  # in the source and in the captured output, each time
    assert sorted((tmp_path / "ended").read_text().split()) == ["test_a", "test_b", "test_c"]
    assert done.stdout.count("left") == 2


def test_a_process_that_dies_ends_the_run(tmp_path: Path) -> None:
    done = run(tmp_path, a="import os\ndef test_dies(): os._exit(3)", b="def test_passes(): pass")
    assert done.returncode == pytest.ExitCode.INTERRUPTED
    assert "ended with status 768 in test_a.py::test_dies" in done.stdout


def test_errors_while_collecting_end_the_run(tmp_path: Path) -> None:
    done = run(tmp_path, a="raise ValueError('no')", b="def test_passes(): pass")
    assert done.returncode == pytest.ExitCode.INTERRUPTED
    assert "1 passed" not in done.stdout
