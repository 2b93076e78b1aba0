"""`pytest --processes 2`: run the tests in processes that are forked after collection and share one queue of files.

Collecting the tests imports torch and every test module, so one process does it for all. The processes take whole files
from the queue, for the sake of module fixtures, and send their reports to the first process, which prints them.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterator
from multiprocessing import connection
from typing import Any

import pytest

PLACES = 2  # bytes for the number of a file in the queue


def run(session: pytest.Session, count: int, leave: Callable[[], None]) -> None:
    """Run the items of `session` in `count` processes, each of which calls `leave` at its end."""
    if session.testsfailed and not session.config.option.continue_on_collection_errors:
        raise session.Interrupted(f"{session.testsfailed} errors during collection")
    files = by_file(session.items)
    queue, fill = os.pipe()  # small enough for the buffer of a pipe, and a read of a few bytes is atomic
    os.write(fill, b"".join(number.to_bytes(PLACES, "big") for number in range(len(files))))
    os.close(fill)
    running: dict[connection.Connection, int] = {}
    sys.stdout.flush()
    try:
        for _ in range(count):
            ours, theirs = connection.Pipe(duplex=False)
            process = os.fork()
            if process == 0:
                _child(session, files, queue, theirs, leave)
            theirs.close()
            running[ours] = process
        _report(session, running)
    finally:
        os.close(queue)
        for pipe, process in running.items():  # those that are left after an interrupt or the first failure
            os.kill(process, 15)
            os.waitpid(process, 0)
            pipe.close()


def by_file(items: list[pytest.Item]) -> list[list[pytest.Item]]:
    """Items of one file after another, the largest first: so no process starts a long one at the end."""
    files: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        files[str(item.path)].append(item)
    return sorted(files.values(), key=len, reverse=True)


def _report(session: pytest.Session, running: dict[connection.Connection, int]) -> None:
    """Print what the processes send until all have ended."""
    config = session.config
    current: dict[Any, str] = defaultdict(lambda: "its first test")
    while running:
        for pipe in connection.wait(list(running)):
            try:
                kind, detail = pipe.recv()  # type: ignore[union-attr]
            except EOFError:
                _, status = os.waitpid(running.pop(pipe), 0)  # type: ignore[call-overload]
                if status:
                    raise session.Interrupted(f"a process ended with status {status} in {current[pipe]}") from None
                continue
            if kind == "start":
                current[pipe], location = detail
                config.hook.pytest_runtest_logstart(nodeid=current[pipe], location=location)
            elif kind == "report":
                report = config.hook.pytest_report_from_serializable(config=config, data=detail)
                config.hook.pytest_runtest_logreport(report=report)
            if session.shouldfail:
                raise session.Failed(session.shouldfail)


def _child(
    session: pytest.Session,
    files: list[list[pytest.Item]],
    queue: int,
    pipe: connection.Connection,
    leave: Callable[[], None],
) -> None:
    status = 1
    try:
        config = session.config
        config.pluginmanager.unregister(name="terminalreporter")
        capture = config.pluginmanager.getplugin("capturemanager")
        capture.stop_global_capturing()  # its files are those of the first process
        capture.start_global_capturing()
        capture.suspend_global_capture(in_=False)
        config.pluginmanager.register(_Sender(config, pipe))
        items = _items(files, queue)
        item = next(items, None)
        while item is not None:
            following = next(items, None)
            config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            item = following
        leave()
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def _items(files: list[list[pytest.Item]], queue: int) -> Iterator[pytest.Item]:
    while number := os.read(queue, PLACES):
        yield from files[int.from_bytes(number, "big")]


class _Sender:
    def __init__(self, config: pytest.Config, pipe: connection.Connection) -> None:
        self._config = config
        self._pipe = pipe

    def pytest_runtest_logstart(self, nodeid: str, location: tuple[str, int | None, str]) -> None:
        self._pipe.send(("start", (nodeid, location)))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        data = self._config.hook.pytest_report_to_serializable(config=self._config, report=report)
        self._pipe.send(("report", data))
