"""The hosts of `bed.hosts`: names, links, disks, and that nothing outlives them."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from bed.hosts import hosts

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
