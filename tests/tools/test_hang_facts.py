"""What is found out about processes of this host, and about what a thread is doing."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch.utils.data import DataLoader

from unshard.tools import hang_facts
from unshard.tools.hang_facts import activity, caller_of_library, line_of, other_threads, process_state, stack_of
from unshard.torch_private import frames

SLEEPS = "import time; time.sleep(600)"


@contextmanager
def program(code: str) -> Iterator[subprocess.Popen[bytes]]:
    """A child that is not waited for, so that it stays a zombie after its end."""
    child = subprocess.Popen([sys.executable, "-c", code])
    try:
        yield child
    finally:
        child.kill()
        child.wait()


def state_after(child: subprocess.Popen[bytes], begin: str, error_file: str = "") -> str:
    limit = time.monotonic() + 30
    while not (text := process_state(child.pid, error_file)).startswith(begin):
        assert time.monotonic() < limit, text
        time.sleep(0.01)
    return text


def test_processes_that_ended(tmp_path: Path) -> None:
    with program(SLEEPS) as child:
        assert state_after(child, "alive")
        os.kill(child.pid, signal.SIGSTOP)
        assert state_after(child, "stopped") == "stopped (SIGSTOP)"
        child.kill()
        assert state_after(child, "dead") == "dead: killed by SIGKILL"
        child.wait()
        assert process_state(child.pid) == f"dead: process {child.pid} is gone"
        with mock.patch.object(
            hang_facts, "_kernel_log", lambda: f"Out of memory: Killed process {child.pid} (python)"
        ):
            assert process_state(child.pid).endswith("is gone; the kernel killed it for lack of memory")
        with mock.patch.object(hang_facts, "memory_kills", lambda: hang_facts._kills_before + 1):
            assert "has killed 1 process(es) of this container" in process_state(child.pid)
    (tmp_path / "error.json").write_text(json.dumps({"message": {"message": "ValueError: x", "extraInfo": {}}}))
    with program("raise SystemExit(3)") as child:
        text = state_after(child, "dead", str(tmp_path / "error.json"))
    assert text == "dead: ended with exit status 3; torchrun noted: ValueError: x"


def seen_in(
    body: Callable[[], Any], leave: Callable[[], Any], expected: str, function: str = ""
) -> tuple[list[str], str]:
    """The stack and line of a thread that runs `body`, once its activity (and its function) is the expected one."""
    thread = threading.Thread(target=body, daemon=True)
    thread.start()
    limit = time.monotonic() + 30
    while True:
        chain = list(frames(sys._current_frames().get(thread.ident or 0)))
        if chain and activity(chain) == expected and line_of(chain).endswith(function):
            break
        assert time.monotonic() < limit, [stack_of(chain), activity(chain)]
        time.sleep(0.01)
    found = stack_of(chain), line_of(chain)
    leave()
    thread.join()
    return found


class Waiting:
    """Data that come when the event is set."""

    def __init__(self) -> None:
        self.event = threading.Event()

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> torch.Tensor:
        self.event.wait()
        return torch.zeros(1)


def test_activities() -> None:
    data: Any = Waiting()
    stack, line = seen_in(lambda: list(DataLoader(data)), data.event.set, hang_facts.DATA, "__getitem__")
    assert line.endswith("in __getitem__") and stack[0].endswith("in __getitem__: self.event.wait()")
    assert any(each.startswith("(torch/utils/data/") for each in stack) and stack[-1].startswith("(")

    items: queue.Queue[int] = queue.Queue()
    seen_in(items.get, lambda: items.put(1), hang_facts.LOCK)

    lock = threading.Lock()
    lock.acquire()
    seen_in(lambda: take(lock), lock.release, hang_facts.LOCK)
    stop = threading.Event()
    seen_in(lambda: naps(stop), stop.set, hang_facts.SLEEP)

    value = torch.ones(1, requires_grad=True)
    doubled = value * 2
    doubled.register_hook(lambda gradient: None if stop_backward(data) else gradient)
    data.event = threading.Event()
    _, line = seen_in(doubled.sum().backward, data.event.set, "in backward")
    assert line.endswith("in stop_backward")


def take(lock: Any) -> None:
    with lock:
        pass


def naps(stop: threading.Event) -> None:
    while not stop.is_set():
        time.sleep(0.05)


def stop_backward(data: Waiting) -> bool:
    while not data.event.is_set():
        pass
    return False


def test_threads_of_the_program() -> None:
    stop = threading.Event()
    thread = threading.Thread(target=naps, args=(stop,), name="napper", daemon=True)
    thread.start()
    try:
        assert any("in naps" in each for each in other_threads()["napper"])
    finally:
        stop.set()
        thread.join()
    assert "napper" not in other_threads()


def test_frames_of_the_library_are_left_out() -> None:
    chain = hang_facts.main_chain()
    assert chain[0].f_code.co_name == "main_chain"
    assert caller_of_library(chain)[0].f_code.co_name == "test_frames_of_the_library_are_left_out"


@pytest.mark.parametrize("version", [1, 2])
def test_kills_for_memory(version: int, tmp_path: Path) -> None:
    line, file = (
        ("7:memory:/job", "memory/job/memory.oom_control") if version == 1 else ("0::/job", "job/memory.events")
    )
    (tmp_path / file).parent.mkdir(parents=True)
    (tmp_path / file).write_text("oom 3\noom_kill 2\n")
    groups = tmp_path / "cgroup"
    groups.write_text(f"9:cpu:/job\n{line}\n")
    assert hang_facts.memory_kills(groups, tmp_path) == 2
