"""A pool of worker processes that run one function on many ranks.

Importing torch takes seconds and a job milliseconds, so one server process imports it, the workers are forked from
that, and they live as long as the test session. The pool must therefore survive anything a test does: a rank that
raises, hangs or crashes is reported with all it can say, and the workers of a failed job are replaced.
"""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import os
import pickle
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from multiprocessing import connection, forkserver
from typing import Any

import pytest
import torch.distributed as dist
from bed.worker import CLEAN, PATIENCE, READY, RELEASE, Job, Outcome, serve

from benchmarks import mps

MOST_RANKS = 4
START_TIMEOUT = 300.0  # the server's imports, on a busy machine
CLEAN_TIMEOUT = 300.0  # leaving a process group, on the same
STACK_TIMEOUT = 20.0
MOST_THREADS = 300  # torch before 2.13 keeps process groups of ended jobs, each with threads that wake up all the time

# What the server imports before any worker is forked from it. Nothing in here may start threads or touch a GPU.
PRELOADED = ["torch", "torch._dynamo", "torch.distributed.fsdp", "torch.distributed.tensor", "pytest"]
PRELOADED += ["unshard.fsdp1", "unshard.fsdp2", "unshard.captured_step", "unshard.checkpoint"]
SINGLE_THREADED = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


class JobFailed(Exception):
    """A job did not end well on every rank; the message holds what each failing rank said."""

    def __init__(self, message: str, failures: dict[int, str]) -> None:
        super().__init__(message)
        self.failures = failures


@dataclass(eq=False)
class _Worker:
    process: Any
    pipe: connection.Connection
    dump: str

    @property
    def crowded(self) -> bool:
        """Whether it has collected so many threads that all jobs become slow."""
        threads = f"/proc/{self.process.pid}/task"
        try:
            return len(os.listdir(threads)) > MOST_THREADS
        except OSError:  # it is dead, or the system does not list threads
            return False

    def kill(self) -> None:
        self.process.kill()
        self.process.join()
        self.pipe.close()

    def stacks(self) -> str:
        """Where every thread of a hanging worker is."""
        size = os.path.getsize(self.dump)
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.process.pid, signal.SIGUSR1)
        limit = time.monotonic() + STACK_TIMEOUT
        sizes = [size]
        # The dump is written in several pieces, and has ended when it has not grown for a while.
        while (sizes[-1] == size or sizes[-1] != sizes[-5]) and time.monotonic() < limit:
            time.sleep(0.01)
            sizes = [*sizes[-4:], os.path.getsize(self.dump)]
            sizes = [size] * (5 - len(sizes)) + sizes
        return self.last_words()

    def last_words(self) -> str:
        with open(self.dump, errors="replace") as file:
            return file.read().rstrip() or "(it wrote no stack)"

    def death(self) -> str:
        """Why a worker is gone."""
        self.process.join(5.0)
        code = self.process.exitcode
        if code is None:
            return "the worker closed its pipe but lives on"
        if code < 0:
            return f"the worker was killed by {signal.Signals(-code).name}\n{self.last_words()}"
        return f"the worker ended with exit status {code} in the middle of the job"


class Pool:
    """Up to `MOST_RANKS` workers. `grace` is how long the other ranks may go on after one has failed.

    `filters` are warning filters for every job, in the words of pytest's `filterwarnings`. `environment` are variables
    of the workers alone.
    """

    def __init__(self, grace: float = 5.0) -> None:
        self.filters: tuple[str, ...] = ()
        self.environment: dict[str, str] = {}
        self._grace = grace
        self.wait = connection.wait  # tests of the pool decide themselves when time is up
        self._workers: list[_Worker | None] = [None] * MOST_RANKS
        self._numbers = itertools.count()
        self._store: dist.TCPStore | None = None
        self._folder = ""

    def run(
        self,
        function: Callable[..., Any] | tuple[str, str],
        size: int,
        kwargs: dict[str, Any] | None = None,
        backend: str = "gloo",
        timeout: float = PATIENCE,
        filters: Iterable[str] = (),
    ) -> list[Any]:
        """Call an importable function on ranks 0 to `size - 1` and return what each rank returned."""
        if not 1 <= size <= MOST_RANKS:
            raise ValueError(f"a world has 1 to {MOST_RANKS} ranks, not {size}")
        module, name = function if isinstance(function, tuple) else (function.__module__, function.__qualname__)
        job = Job(
            id=f"job{next(self._numbers)}",
            module=module,
            name=name,
            size=size,
            kwargs=pickle.dumps(kwargs or {}),
            backend=backend,
            filters=(*self.filters, *filters),
            path=tuple(sys.path),
        )
        messages = [pickle.dumps((rank, job)) for rank in range(size)]
        workers = self._start(size)
        try:
            for worker, message in zip(workers, messages, strict=True):
                worker.pipe.send_bytes(message)
            outcomes = self._collect(workers, timeout)
            self._release(workers, outcomes)
        except BaseException:  # an interrupt, say: nobody knows what the workers are doing now
            self._discard(workers)
            raise
        return _conclude(job, outcomes)

    def use(self, environment: dict[str, str]) -> None:
        """From now on, workers have these variables."""
        self._discard_all()
        self.environment = environment

    def make_store(self, address: str = "127.0.0.1") -> dist.TCPStore:
        """A server on a socket of IPv4.

        Torch looks up the name of every address that connects. Its own socket is one of IPv6, for which 127.0.0.1 is
        not in the list of hosts: it asks the network, and all ranks wait five seconds if an answer is lost.
        """
        listener = socket.create_server((address, 0))
        port, descriptor = listener.getsockname()[1], listener.detach()
        return dist.TCPStore(address, port, is_master=True, wait_for_workers=False, master_listen_fd=descriptor)

    def namespaces(self, place: int) -> list[str]:
        """What a worker enters before anything else."""
        return []

    def close(self) -> None:
        self._discard_all()
        self._store = None
        if self._folder:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = ""

    def _start(self, size: int) -> list[_Worker]:
        """The first `size` workers, starting those that are not there."""
        if self._store is None:
            self._store = self.make_store()
            self._folder = tempfile.mkdtemp(prefix="bed-")
        if not self.environment:  # workers that share a device with MPS must not be ended by force
            self._discard(
                [worker for worker in self._workers if worker and worker.process.is_alive() and worker.crowded]
            )
        fresh = []
        for place in range(size):
            worker = self._workers[place]
            if worker is None or not worker.process.is_alive():
                self._workers[place] = self._fork(place)
                fresh.append(self._workers[place])
        try:
            limit = time.monotonic() + START_TIMEOUT
            for worker in fresh:
                if not worker.pipe.poll(max(0.0, limit - time.monotonic())):
                    raise JobFailed(f"a worker did not start within {START_TIMEOUT:.0f} s", {})
                if worker.pipe.recv_bytes() != READY:
                    raise JobFailed("a worker started with an unknown message", {})
        except (EOFError, JobFailed) as error:
            self._discard(fresh)
            raise JobFailed(f"a worker could not start: {error!r}; its output says why", {}) from error
        return [worker for worker in self._workers[:size] if worker]

    def _fork(self, place: int) -> _Worker:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        with _environment(SINGLE_THREADED):  # a process with threads cannot be forked safely
            forkserver.ensure_running()
        ours, theirs = context.Pipe()
        dump = os.path.join(self._folder, f"worker{next(self._numbers)}.txt")
        environment = {**mps.SOCKETS, **mps.host_of(place), **self.environment}
        address = (self._store.host, self._store.port)
        arguments = (theirs, address, dump, environment, self.namespaces(place))
        process = context.Process(target=serve, args=arguments, daemon=True)
        process.start()
        theirs.close()  # so that the worker's death reads as an end of file here
        return _Worker(process, ours, dump)

    def _collect(self, workers: list[_Worker], timeout: float) -> dict[int, Outcome]:
        """What each rank says. The first bad news cuts the time of the others short."""
        outcomes: dict[int, Outcome] = {}
        limit, why = time.monotonic() + timeout, f"within {timeout:g} s"
        waiting = {worker.pipe: rank for rank, worker in enumerate(workers)}
        while waiting:
            answers = self.wait(list(waiting), max(0.0, limit - time.monotonic()))
            if not answers:
                break
            for pipe in answers:
                rank = waiting.pop(pipe)
                try:
                    outcomes[rank] = pickle.loads(pipe.recv_bytes())
                except (EOFError, ConnectionResetError):
                    outcomes[rank] = Outcome("dead", workers[rank].death())
                if outcomes[rank].kind != "value" and time.monotonic() + self._grace < limit:
                    limit = time.monotonic() + self._grace
                    why = f"within {self._grace:g} s after rank {rank} had given up"
        for rank in waiting.values():
            outcomes[rank] = Outcome("hang", f"no answer {why}; it was here:\n{workers[rank].stacks()}")
        return outcomes

    def _release(self, workers: list[_Worker], outcomes: dict[int, Outcome]) -> None:
        """Let the ranks leave the job. After a failure nobody knows what state they are in, and new ones are cheap."""
        if any(outcome.kind in _GRAVITY for outcome in outcomes.values()):
            if self.environment:
                self._discard_all()  # a process that dies with kernels under way takes down the others that share MPS
            self._discard(workers)
            return
        for worker in workers:
            with contextlib.suppress(OSError):
                worker.pipe.send_bytes(RELEASE)
        for rank, worker in enumerate(workers):
            if text := self._leave(worker):
                outcomes[rank] = Outcome("dead", f"the body had ended; {text}")
                self._discard([worker])

    def _leave(self, worker: _Worker) -> str:
        """Empty if the worker is ready for another job, else what went wrong while it cleaned up."""
        try:
            if not worker.pipe.poll(CLEAN_TIMEOUT):
                return f"cleaning up hangs:\n{worker.stacks()}"
            message = worker.pipe.recv_bytes()
            return "" if message == CLEAN else message.decode(errors="replace")
        except (EOFError, OSError):
            return f"while cleaning up, {worker.death()}"

    def _discard_all(self) -> None:
        self._discard([worker for worker in self._workers if worker])

    def _discard(self, workers: Iterable[_Worker]) -> None:
        for worker in workers:
            if worker in self._workers:
                worker.kill()
                self._workers[self._workers.index(worker)] = None


@contextlib.contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


_GRAVITY = {"dead": 1, "error": 2, "hang": 3}


def _conclude(job: Job, outcomes: dict[int, Outcome]) -> list[Any]:
    """Return the values, or raise what the ranks ended with; a failure outweighs a skip."""
    __tracebackhide__ = True
    # A death is noticed late and ends the others' collectives, so it comes first; a hang is a consequence at most.
    causes = sorted(outcomes.items(), key=lambda item: (_GRAVITY.get(item[1].kind, 0), item[1].when))
    failures = {rank: outcome.detail for rank, outcome in causes if outcome.kind in _GRAVITY}
    if failures:
        head = f"{job.module}.{job.name} failed on {len(failures)} of {job.size} ranks"
        parts = [f"--- rank {rank} of {job.size} ---\n{text.rstrip()}" for rank, text in failures.items()]
        raise JobFailed("\n".join([f"{head}, first on rank {next(iter(failures))}", *parts]), failures)
    for outcome in outcomes.values():
        if outcome.kind == "skip":
            pytest.skip(outcome.detail)
        if outcome.kind == "xfail":
            pytest.xfail(outcome.detail)
    return [outcomes[rank].detail for rank in range(job.size)]


_shared: list[Pool] = []


def shared() -> Pool:
    """The pool of this test session."""
    if not _shared:
        _shared.append(Pool())
    return _shared[0]


def close_shared() -> None:
    while _shared:
        _shared.pop().close()
