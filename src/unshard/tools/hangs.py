"""Explains hangs: says which rank is missing in a collective that does not end, and what that rank does instead."""

from __future__ import annotations

import faulthandler
import json
import logging
import os
import select
import signal
import socket
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

import torch.distributed as dist

from ..comm.order import announcing, check
from ..comm.order.announcing import Announcer, Watcher, announcer_of_job
from ..errors import ArgumentError
from .hang_facts import (
    activity,
    caller_of_library,
    cpu_seconds,
    kernel,
    line_of,
    main_chain,
    other_threads,
    process_state,
    stack_of,
)
from .hang_report import HangReport, HangRow
from .hang_watch import JobWatch

VARIABLE = "UNSHARD_EXPLAIN_HANGS"
_FINISH_SECONDS = 15.0  # how long the end of the program may be delayed by a report in progress

_log = logging.getLogger("unshard")


def explain_hangs(seconds: float = 30.0, file: str | os.PathLike[str] | None = None) -> HangExplainer:
    """Report which rank is missing if a collective has not ended after `seconds`, and what that rank does instead.

    Call this on every rank, at any time. One rank prints a table on stderr and writes it to `file`, as JSON. SIGUSR1
    prints the table at any moment. Use the result as a context manager, or call its `stop()`.

    Raises:
        ArgumentError: `seconds` is not a positive number.

    Example::

        with explain_hangs(seconds=30, file="hang.json"):
            train(model)
    """
    if not isinstance(seconds, (int, float)) or not seconds > 0:
        raise ArgumentError(f"explain_hangs needs a positive number of seconds, got {seconds!r}.")
    return HangExplainer(float(seconds), None if file is None else Path(file))


def explain_hangs_from_environment() -> HangExplainer | None:
    """Call `explain_hangs` as `UNSHARD_EXPLAIN_HANGS=SECONDS[:FILE]` says. Return None if it is unset, empty or 0."""
    value = os.environ.get(VARIABLE, "")
    if not value or isinstance(announcing.watcher, HangExplainer):
        return None
    seconds, _, file = value.partition(":")
    try:
        limit = float(seconds)
    except ValueError:
        _log.warning("%s=%s is ignored: expected SECONDS or SECONDS:FILE", VARIABLE, value)
        return None
    return explain_hangs(limit, file or None) if limit > 0 else None


class HangExplainer(Watcher):
    """Explains hangs until `stop()`. `reports` are the reports that this rank has made, oldest first."""

    def __init__(self, seconds: float, file: Path | None):
        self.seconds, self.file = seconds, file
        self.reports: list[HangReport] = []
        self._watches: dict[Announcer, JobWatch] = {}
        self._known: dict[str, Any] = {"host": socket.gethostname(), "kernel": kernel(), "pid": os.getpid()}
        if error_file := os.environ.get("TORCHELASTIC_ERROR_FILE"):
            self._known["error_file"] = error_file
        self._place, self._changed, self._cpu = ("", ""), time.monotonic(), 0.0
        self._process = os.getpid()
        self._host_of_store: dict[str, Any] = {}
        self._broken = False
        if isinstance(announcing.watcher, HangExplainer):
            announcing.watcher.stop()
        announcing.watcher = self
        self._signals = _Signals()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="unshard explains hangs", daemon=True)
        self._thread.start()
        for announcer in announcing.announcers():
            announcer.wake()

    def __enter__(self) -> HangExplainer:
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: TracebackType | None) -> None:
        self.stop()

    def stop(self) -> None:
        """Explain no more hangs."""
        self.finish()
        if announcing.watcher is self:
            announcing.watcher = None
        self._stopped.set()
        self._signals.close()

    # -- called by announcers ------------------------------------------------------------------------------

    def pause(self, announcer: Announcer) -> float:
        return self._watch_of(announcer).pause()

    def facts(self) -> dict[str, Any]:
        """Return host, process and place in the program. The main thread keeps its last known place at its end."""
        error = getattr(sys, "last_value", None)
        chain = main_chain() if error is None else _frames_of(error)
        if threading.current_thread() is threading.main_thread():
            chain = caller_of_library(chain)
        if line_of(chain) and (place := (line_of(chain), activity(chain))) != self._place:
            self._place, self._changed, self._cpu = place, time.monotonic(), cpu_seconds()
        age = time.monotonic() - self._changed
        return {
            **self._known,
            "every": max([watch.pause() for watch in list(self._watches.values())], default=self.seconds / 3),
            "line": self._place[0],
            "doing": self._place[1],
            "age": round(age, 1),
            "busy": cpu_seconds() - self._cpu > age / 10,
        }

    def look(self, announcer: Announcer) -> None:
        if self._broken:
            return
        try:
            if not self._host_of_store:  # ask while it answers
                self._host_of_store = announcer.records([0])[0].get("facts", {})
            self._watch_of(announcer).look()
        except RuntimeError:  # the store does not answer
            raise
        except Exception:
            self._broken = True
            _log.warning("explain_hangs failed and is off on this rank", exc_info=True)

    def failed(self, announcer: Announcer, error: str) -> None:
        if not self._broken and not announcer.store_failed:
            self._watch_of(announcer).failed(error)

    def finish(self) -> None:
        limit = time.monotonic() + _FINISH_SECONDS
        for watch in list(self._watches.values()):
            watch.say_arrived()
        while time.monotonic() < limit and os.getpid() == self._process:
            watches = [each for each in self._watches.values() if each.is_reporting()]
            if self._broken or not any(_runs(each.announcer) for each in watches):
                return
            time.sleep(0.02)

    def _watch_of(self, announcer: Announcer) -> JobWatch:
        if announcer not in self._watches:
            self._watches[announcer] = JobWatch(announcer, self.seconds, self._publish, _say, self.facts)
        return self._watches[announcer]

    def _publish(self, report: HangReport) -> None:
        self.reports.append(report)
        _say(f"\n{report}\n")
        if self.file is not None:
            try:
                temporary = self.file.with_name(f"{self.file.name}.{os.getpid()}")
                temporary.write_text(json.dumps(report.to_dict(), indent=1))
                temporary.replace(self.file)
            except OSError as error:
                _log.warning("explain_hangs cannot write %s: %s", self.file, error)

    # -- what needs no other rank --------------------------------------------------------------------------

    def _run(self) -> None:
        pause = min(1.0, self.seconds / 3)
        while not self._stopped.is_set() and os.getpid() == self._process:
            try:
                if self._signals.wait(pause) and not self._stopped.is_set():
                    self._ask_all()
                for announcer, watch in [each for each in list(self._watches.items()) if each[0].has_left()]:
                    watch.say_arrived()
                    del self._watches[announcer]
                self._start_announcing()
                self._look_for_silent_store()
            except Exception:
                _log.debug("explain_hangs: no local report", exc_info=True)
                self._stopped.wait(pause)
        if os.getpid() == self._process:
            self._signals.close_pipe()

    def _start_announcing(self) -> None:
        """Announce this rank before it shards a module, so that others know where it is."""
        if self._watches or announcing.announcers() or not dist.is_initialized():
            return
        if dist.get_world_size() > 1 and dist.get_backend() not in ("fake", "mpi"):
            announcer_of_job(check.POLL_SECONDS)

    def _ask_all(self) -> None:
        alive = [each for each in self._watches.values() if _runs(each.announcer)]
        if alive and time.monotonic() - alive[-1].beat < 2 * alive[-1].announcer.interval + 1:
            alive[-1].ask()
        else:
            self._report_alone("this process received SIGUSR1", "It is in no job, or the job's store does not answer.")

    def _look_for_silent_store(self) -> None:
        for announcer, watch in list(self._watches.items()):
            silent = time.monotonic() - watch.beat
            lost = announcer.store_failed or silent > max(self.seconds, 3 * watch.pause() + 1)
            stall = watch.stall()
            if not lost or stall < self.seconds or announcer.has_left():
                continue
            if activity(main_chain()).startswith("in ") and threading.main_thread().is_alive():
                where = self._host_of_store
                state = process_state(where["pid"]) if where.get("kernel") == self._known["kernel"] else ""
                who = f"Rank 0, {where.get('host', 'host unknown')} process {where.get('pid', 'unknown')}"
                self._report_alone(
                    f"rank {announcer.rank} waits, and the job's store does not answer",
                    "The process that hosts the store, rank 0 or the launcher, has ended, is stopped, or cannot be "
                    f"reached. {who}: {state or 'state unknown'}. Other ranks cannot be asked. If it cannot be reached "
                    "again, end the job on all ranks.",
                )
                del self._watches[announcer]

    def _report_alone(self, reason: str, finding: str) -> None:
        facts, chain = self.facts(), main_chain()
        rank = dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", 0))
        row = HangRow(rank, facts["host"], facts["pid"], facts["doing"] or "runs", line=facts["line"])
        row.stack, row.threads = stack_of(chain), other_threads()
        for watch in list(self._watches.values()):
            for peers in watch.announcer.all_peers():
                row.position, row.last = max((row.position, row.last), peers.progress.last_announced())
        self._publish(HangReport(reason, finding, rows=[row]))


def _runs(announcer: Announcer) -> bool:
    return announcer in announcing.announcers() and not announcer.store_failed


def _say(text: str) -> None:
    with suppress(OSError, ValueError):  # stderr may be closed
        sys.stderr.write(text + "\n")
        sys.stderr.flush()


def _frames_of(error: BaseException) -> list[FrameType]:
    frames, trace = [], error.__traceback__
    while trace is not None:
        frames.append(trace.tb_frame)
        trace = trace.tb_next
    return frames[::-1]


class _Signals:
    """Wakes a thread on SIGUSR1, even while the main thread is blocked in C++.

    Python's own handlers run in the main thread, between bytecodes. `faulthandler` writes to a pipe in the C handler,
    and leaves the program's wakeup descriptor alone. A handler of the program is called as well.
    """

    def __init__(self) -> None:
        self._read, self._write = os.pipe()
        for each in (self._read, self._write):
            os.set_blocking(each, False)  # the handler must never wait for this pipe
        self._registered = False
        before = signal.getsignal(signal.SIGUSR1)
        if before in (signal.SIG_DFL, None) and _is_caught(signal.SIGUSR1):
            _log.warning("SIGUSR1 prints no table of ranks, because a handler that is not Python's has it already")
        else:
            faulthandler.register(signal.SIGUSR1, self._write, all_threads=False, chain=callable(before))
            self._registered = True

    def wait(self, seconds: float) -> bool:
        """Return True if a signal has come within `seconds`."""
        ready, _, _ = select.select([self._read], [], [], seconds)
        while ready:
            time.sleep(0.05)  # the handler writes in several pieces
            try:
                os.read(self._read, 1 << 16)
            except BlockingIOError:
                break
        return bool(ready)

    def close(self) -> None:
        """Give the signal back. The thread that waits closes the pipe afterwards."""
        if self._registered:
            self._registered = False
            faulthandler.unregister(signal.SIGUSR1)

    def close_pipe(self) -> None:
        os.close(self._read)
        os.close(self._write)


def _is_caught(number: int) -> bool:
    with suppress(OSError, StopIteration):
        lines = Path("/proc/self/status").read_text().splitlines()
        mask = next(line for line in lines if line.startswith("SigCgt:"))
        return bool(int(mask.split()[1], 16) >> (number - 1) & 1)
    return False
