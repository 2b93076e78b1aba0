"""The hosts of `bed.hosts`: names, links, disks, and that nothing outlives them."""

from __future__ import annotations

import contextlib
import os
import random
import re
import subprocess
import sys
import time
import uuid
from pathlib import Path
from typing import Any

import pytest
from bed.hosts import PATH, hosts

SEND = "import socket; socket.create_connection(('{address}', 5000)).sendall(bytes({size}))"
RECEIVE = "import socket; c = socket.create_server(('', 5000)).accept()[0]\nwhile c.recv(2**16): pass"


def test_names_links_and_disks(tmp_path: Path) -> None:
    with hosts(2, 1, tmp_path) as bed:
        assert [bed.run(host, ["hostname"]).output for host in range(2)] == ["host0\n", "host1\n"]
        assert bed.run(1, ["getent", "hosts", "host0"]).output.split() == ["10.77.0.1", "host0"]
        for host in range(2):
            assert bed.run(host, ["bash", "-c", f"hostname > {bed.disk}/name; exit {host}"]).status == host
            assert (bed.private(host) / "name").read_text() == f"host{host}\n"
        assert not list(bed.disk.iterdir())
        before, begin = bed.sent(0), time.monotonic()
        receiver = bed.start(1, [sys.executable, "-c", RECEIVE])
        again = f'until {sys.executable} -c "{SEND.format(address="host1", size=10**6)}" 2>/dev/null; do :; done'
        assert bed.run(0, ["bash", "-c", again]).status == 0
        assert receiver.finish().status == 0
        assert 10**6 * 66 / 1448 < bed.sent(0) - before - 10**6 < 10**6 * 0.06
        assert time.monotonic() - begin > 8e6 / 1e9


def test_kill_and_boot(tmp_path: Path) -> None:
    with hosts(2, 1, tmp_path) as bed:
        sleeping = [bed.start(host, ["bash", "-c", "echo here; sleep 600"]) for host in range(2)]
        for each in sleeping:
            each.wait_for("here")
        bed.kill(1)
        assert sleeping[1].finish(60).status == -9
        assert sleeping[0].process.poll() is None
        bed.boot(1)
        assert bed.run(1, ["bash", "-c", "ps ax | grep -c '[s]leep'"]).output == "0\n"
    assert sleeping[0].finish(60).status == -9


# Makes hosts, and trains on them until it is killed.
BED = """
import sys
from pathlib import Path
from bed.hosts import hosts
folder = Path(sys.argv[1])
folder.mkdir()
with hosts(2, 2, folder) as bed:
    print("up", flush=True)
    for running in bed.torchrun(sys.argv[2]):
        running.finish(600)
"""

TRAIN = """
import torch
import torch.distributed as dist
from unshard import fully_shard

dist.init_process_group("gloo")
model = fully_shard(torch.nn.Linear(64, 64))
while True:
    model(torch.ones(2, 64)).sum().backward()
"""


def processes(mark: str) -> list[str]:
    """The processes whose environment has this mark, and the namespaces that they are in."""
    found = []
    for each in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended
            if mark.encode() in (each / "environ").read_bytes():
                found.append(os.readlink(each / "ns" / "net"))
    return found


# Other programs of the machine also mount and unmount.
LEFT_BEHIND = r"nsfs| /proc | /etc/hosts | \S*/bed\d"


def state_of_the_machine() -> list[Any]:
    """Its network devices, mounts that a bed could leave behind, which include named namespaces, and shared memory."""
    mounts = [each for each in Path("/proc/self/mounts").read_text().splitlines() if re.search(LEFT_BEHIND, each)]
    return [sorted(os.listdir("/sys/class/net")), mounts, sorted(os.listdir("/dev/shm"))]


@pytest.mark.parametrize("kills", [1, pytest.param(20, marks=pytest.mark.slow)])
def test_a_test_that_is_killed_leaves_nothing_behind(kills: int, tmp_path: Path) -> None:
    """At a random moment: while hosts start, or while their ranks train."""
    program, before = tmp_path / "train.py", state_of_the_machine()
    program.write_text(TRAIN)
    killed = []
    for number in range(kills):
        mark, place = uuid.uuid4().hex, tmp_path / f"bed{number}"
        place.mkdir()
        environment = {**os.environ, "PYTHONPATH": PATH, "TMPDIR": str(place), "MARK": mark}
        command = [sys.executable, "-c", BED, str(place / "hosts"), str(program)]
        with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as running:
            if kills == 1:
                assert running.stdout is not None and running.stdout.readline() == "up\n"
            time.sleep(random.uniform(0, 1 if kills == 1 else 15))
            killed.append(processes(mark))
            running.kill()
        limit = time.monotonic() + 60
        while processes(mark) and time.monotonic() < limit:
            time.sleep(0.05)
        # A namespace without a process or a name has ended.
        assert processes(mark) == []
        assert {each.name for each in place.iterdir()} <= {"hosts"}
    assert state_of_the_machine() == before
    sizes = [f"{len(each)} in {len(set(each))}" for each in killed]
    print("processes in networks when the test was killed:", ", ".join(sizes))
