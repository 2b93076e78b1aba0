"""The table of ranks names the rank that is missing, its line, and what it does instead of its collective."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
from bed import hanging
from bed.branches import quick, sharded, step
from bed.hanging import is_last
from bed.pool import JobFailed, Pool
from bed.programs import PACKAGES, free_port, python
from bed.world import mostly_slow, world

from unshard.tools import explain_hangs, hangs
from unshard.tools.hang_watch import JobWatch

SECONDS = 2.0
LIMIT = 30.0  # in which the rank must be named


@pytest.fixture
def ranks() -> Iterator[Pool]:
    """Workers of this test alone, which end by force."""
    workers = Pool(grace=20.0)
    yield workers
    workers.close()


def explained(ranks: Pool, cause: Callable[..., None], size: int, file: Path, **options: Any) -> dict[str, Any]:
    began = time.time()
    with pytest.raises(JobFailed) as caught:
        ranks.run(hanging.run, size, {"cause": cause, "file": str(file), "seconds": SECONDS, **options})
    assert file.exists(), caught.value
    assert file.stat().st_mtime - began < LIMIT
    return json.loads(file.read_text())


QUICK = (hanging.loads_data, hanging.skips_a_unit)


@pytest.mark.parametrize("cause", mostly_slow([each[0] for each in hanging.CAUSES], QUICK))
def test_the_rank_that_is_missing_is_named(ranks: Pool, tmp_path: Path, cause: Callable[..., None]) -> None:
    report = explained(ranks, cause, 3, tmp_path / "hang.json")
    hanging.check_report(report, cause, 3)
    if cause is hanging.skips_a_unit:  # reported with the error, before any time is up
        assert report["reason"].startswith("a collective has failed on rank")
        assert report["finding"].startswith("The ranks want different collectives: ")


@pytest.mark.slow
def test_a_rank_on_another_host(ranks: Pool, tmp_path: Path) -> None:
    """A rank on that host looks at the process."""
    report = explained(ranks, hanging.is_stopped, 4, tmp_path / "hang.json", hosts=True)
    hanging.check_report(report, hanging.is_stopped, 4)


def test_the_end_of_the_program_waits_for_a_report() -> None:
    """Also while the report begins and ends. It was lost if an error ended the program at that moment."""
    announcer, waited = mock.MagicMock(rank=0, size=2), list[bool]()
    announcer.job.check.return_value, announcer.job.compare_set.return_value = False, b"0"
    watch = JobWatch(announcer, 1.0, mock.Mock(), mock.Mock(), mock.Mock())

    def note(*unused: Any, **named: Any) -> None:
        waited.append(watch.is_reporting())

    stages = {"_answer": mock.Mock(), "_look_for_late": mock.Mock(), "_begin": note, "_conclude": note}
    with mock.patch.multiple(watch, **stages):
        watch.failed("a collective has failed")
        watch.look()
        assert waited == [True] and not watch.is_reporting()
        watch._inquiry = mock.Mock(asked=[], deadline=0.0)
        watch.look()
        assert waited == [True, True] and not watch.is_reporting()


def wait_until(what: Callable[[], Any]) -> None:
    limit = time.monotonic() + 60
    while not what():
        assert time.monotonic() < limit
        time.sleep(0.02)


@world(2, 3)
def test_the_job_goes_on_when_the_rank_arrives() -> None:
    """One rank prints the table, and says so when the rank has arrived."""
    store, said, late = dist.distributed_c10d._get_default_store(), list[str](), dist.get_world_size() - 1
    with quick(), mock.patch.object(hangs, "_say", said.append), explain_hangs(1.0) as explainer:
        model = sharded()
        step(model, [0, 1, 2])
        dist.barrier()
        if is_last():
            store.wait(["reported"])
        elif dist.get_rank() == 0:  # the main thread is free: nobody waits yet
            step_thread = hangs.threading.Thread(target=step, args=(model, [0, 1, 2]))
            step_thread.start()
            wait_until(lambda: explainer.reports)
            store.set("reported", "")
            step_thread.join()
        if dist.get_rank() > 0:
            step(model, [0, 1, 2])
        if dist.get_rank() == 0:
            (report,) = explainer.reports
            assert report.missing == [late] and f"rank {late}, main thread:" in str(report)
            wait_until(lambda: len(said) == 2)
            assert re.fullmatch(rf"unshard: rank {late} arrived after \d+ s", said[1])
        dist.barrier()
    assert len(explainer.reports) == (dist.get_rank() == 0)


@world(3)
def test_a_report_of_ranks_that_train() -> None:
    """What SIGUSR1 asks for: every rank's line and stack, and no rank is called missing."""
    with quick(), explain_hangs(3.0) as explainer:
        model = sharded()
        step(model, [0, 1, 2])
        dist.barrier()
        if is_last():
            wait_until(lambda: explainer._watches)
            explainer._ask_all()
            wait_until(lambda: explainer.reports)
        dist.barrier()
    if is_last():
        found = explainer.reports[0].to_dict()
        assert found["missing"] == [] and "All ranks are at the same position." in found["finding"]
        assert all("test_hangs.py" in row["line"] and row["stack"] for row in found["rows"]), found
        assert len({row["pid"] for row in found["rows"]}) == 3


@pytest.mark.slow
@world(3)
def test_no_false_alarm() -> None:
    """A thousand steps, in some of which a rank is two seconds late."""
    with explain_hangs(5.0) as explainer:
        model = sharded()
        for number in range(1000):
            if number % 100 == 50 and dist.get_rank() == number // 100 % 3:
                time.sleep(2)
            step(model, [0, 1, 2])
        dist.barrier()
    assert not explainer.reports


SIGNALS = """
import faulthandler, os, signal, sys, threading, time
from unshard.errors import ArgumentError
from unshard.tools import explain_hangs
ours, called = os.pipe(), []
os.set_blocking(ours[1], False)
signal.set_wakeup_fd(ours[1])

def blocked(explainer):
    lock = threading.Lock()
    lock.acquire()
    threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGUSR1)).start()
    def release():
        while not explainer.reports:
            time.sleep(0.02)
        lock.release()
    threading.Thread(target=release, daemon=True).start()
    lock.acquire()
    return explainer.reports[0].rows[0]

with explain_hangs(60) as explainer:
    row = blocked(explainer)
    assert row.pid == os.getpid() and row.stack[0].endswith("in blocked: lock.acquire()"), row
    assert row.state.startswith("waiting for a lock"), row
signal.signal(signal.SIGUSR1, lambda *_: called.append(1))
with explain_hangs(60) as explainer:
    blocked(explainer)
    assert called == [1], called
os.kill(os.getpid(), signal.SIGUSR1)
assert called == [1, 1] and signal.set_wakeup_fd(ours[1]) == ours[1]
signal.signal(signal.SIGUSR1, signal.SIG_DFL)
with open(sys.argv[1], "w") as file:
    faulthandler.register(signal.SIGUSR1, file)
    with explain_hangs(60) as explainer:
        os.kill(os.getpid(), signal.SIGUSR1)
        time.sleep(0.5)
        assert not explainer.reports
assert "most recent call first" in open(sys.argv[1]).read()
faulthandler.unregister(signal.SIGUSR1)
explain_hangs(60).stop()
os.kill(os.getpid(), signal.SIGUSR1)  # as before: it ends the program
"""


def test_signals(tmp_path: Path) -> None:
    """SIGUSR1 is answered while the main thread is blocked. Handlers of the program and its wakeup fd stay."""
    program = tmp_path / "program.py"
    program.write_text(SIGNALS)
    done = python(program, tmp_path / "dump.txt", status=-signal.SIGUSR1)
    assert "SIGUSR1 prints no table of ranks, because a handler that is not Python's" in done.stderr
    assert done.stderr.count("unshard: this process received SIGUSR1") == 2


STOPPED_STORE = """
import os, signal, sys, time, threading
import torch, torch.distributed as dist
from unshard import fully_shard
dist.init_process_group("gloo")
model = fully_shard(torch.nn.Linear(4, 4))
for _ in range(3):
    model(torch.ones(1, 4)).sum().backward()
time.sleep(1.5)
if dist.get_rank() == 0:
    os.kill(os.getpid(), signal.SIGSTOP)
model(torch.ones(1, 4)).sum().backward()
"""


@pytest.mark.slow
def test_the_process_that_hosts_the_store_is_stopped(tmp_path: Path) -> None:
    """Then no rank can be asked, and each rank reports alone. The environment turns the explainer on."""
    file = tmp_path / "hang.json"
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2", "PYTHONPATH": PACKAGES}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", STOPPED_STORE],
            env={**os.environ, **common, "RANK": str(rank), "UNSHARD_EXPLAIN_HANGS": f"2:{file}"},
        )
        for rank in range(2)
    ]
    try:
        wait_until(file.exists)
        report = json.loads(file.read_text())
        assert [row["rank"] for row in report["rows"]] == [1] and "unit" in report["rows"][0]["last"]
        assert f"process {ranks[0].pid}: stopped (SIGSTOP)" in report["finding"]
    finally:
        for each in ranks:
            each.kill()
            each.wait()
