"""Several hosts on one machine: namespaces with a network, a hostname, processes and a disk of their own.

Each host is held by one process, which is process 1 of the host and waits for the end of its input. When that process
ends, the kernel ends every process of the host, and then removes its network and its mounts. Nothing has a name outside
the hosts. So nothing can be left behind, even if the test process is killed: its end of the pipe is then closed.
"""

from __future__ import annotations

import contextlib
import functools
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from bed.pool import Pool, shared
from bed.programs import PACKAGES
from bed.worker import enter_namespaces

HOLD = ["unshare", "--net", "--uts", "--ipc", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
PROBE = "ip link add eth0 type veth peer name eth1 && ip link add bridge type bridge && {tbf}"
TBF = "tc qdisc add dev {device} root tbf rate {mbit}mbit burst 32kb latency 100ms"
PATH = os.pathsep.join([PACKAGES, str(Path(__file__).parents[1])])
START_TIMEOUT = 60.0  # for commands that take milliseconds, on a busy machine
PORT = 29500  # free: every host has its own ports


@dataclass
class Done:
    """A command that ended: -9 and the like for a signal; both output streams in one text."""

    status: int
    output: str


@dataclass
class Running:
    process: subprocess.Popen[bytes]
    output: Path

    def finish(self, timeout: float = 300.0) -> Done:
        """Wait for the end; after `timeout` seconds, fail with the output so far."""
        try:
            status = self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running after {timeout} s:\n{self.text()}") from None
        return Done(status, self.text())

    def wait_for(self, text: str, timeout: float = 300.0) -> None:
        """Return as soon as the command has written this text."""
        limit = time.monotonic() + timeout
        while text not in self.text():
            if self.process.poll() is not None or time.monotonic() > limit:
                raise AssertionError(f"no {text!r}; status {self.process.poll()}:\n{self.text()}")
            time.sleep(0.02)

    def text(self) -> str:
        return self.output.read_text(errors="replace")


class Hosts:
    """`count` hosts named host0, host1, ... for `ranks` ranks each. Use `hosts()` to make one.

    Every host has `eth0`, which sends at most `mbit` Mbit/s, a loopback that is not limited, and all files of the
    machine, except that `disk` is another folder on each host. The names of the hosts are in their /etc/hosts.
    """

    def __init__(self, count: int, ranks: int, folder: Path, mbit: int) -> None:
        self.count, self.ranks, self.folder, self.mbit = count, ranks, folder, mbit
        self.disk = folder / "disk"
        self.disk.mkdir()
        self._names = folder / "etc_hosts"
        lines = ["127.0.0.1 localhost", *(f"{self.address(each)} host{each}" for each in range(count))]
        self._names.write_text("\n".join([*lines, ""]))
        self._started: list[Running] = []
        self.holders: dict[int, subprocess.Popen[str]] = {}
        self._switch = _hold("ip link add bridge type bridge && ip link set bridge up")

    def address(self, host: int) -> str:
        return f"10.77.0.{host + 1}"

    def private(self, host: int) -> Path:
        """What `disk` is on this host."""
        return self.folder / f"disk{host}"

    def start(self, host: int, command: Sequence[Any], **environment: str) -> Running:
        """Start a command on a host."""
        output = self.folder / f"output{len(self._started)}.txt"
        temporary = self.folder / "tmp"
        temporary.mkdir(exist_ok=True)
        here = {"OMP_NUM_THREADS": "1", "PYTHONPATH": PATH, "TMPDIR": str(temporary)}
        variables = {**os.environ, **here, **environment}
        holder = str(self.holders[host].pid)
        spaces = ["--net", "--uts", "--ipc", "--mount", f"--pid=/proc/{holder}/ns/pid_for_children"]
        with open(output, "wb") as file:
            # nsenter stays outside, waits for the command, and takes its status.
            process = subprocess.Popen(
                ["nsenter", "--target", holder, *spaces, f"--wd={os.getcwd()}", "--", *map(str, command)],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                env=variables,
            )
        self._started.append(Running(process, output))
        return self._started[-1]

    def run(self, host: int, command: Sequence[Any], timeout: float = 300.0, **environment: str) -> Done:
        """Run a command on a host to its end."""
        return self.start(host, command, **environment).finish(timeout)

    def torchrun(
        self, *program: Any, elastic: bool = False, options: Sequence[Any] = (), **environment: str
    ) -> list[Running]:
        """Start torchrun on every host. `elastic`: with a c10d rendezvous on host 0 instead of fixed node ranks.

        `options` are further options of torchrun, before the program.
        """
        return [self.torchrun_on(host, *program, elastic=elastic, options=options, **environment) for host in self.up]

    def torchrun_on(
        self,
        host: int,
        *program: Any,
        elastic: bool = False,
        options: Sequence[Any] = (),
        launcher: str = "torch.distributed.run",
        **environment: str,
    ) -> Running:
        size = [f"--nnodes={self.count}", f"--nproc-per-node={self.ranks}"]
        place = ["--rdzv-backend=c10d", f"--rdzv-endpoint=host0:{PORT}", "--rdzv-id=job"]
        if not elastic:
            place = [f"--master-addr={self.address(0)}", f"--master-port={PORT}", f"--node-rank={host}"]
        command = [sys.executable, "-m", *launcher.split(), *size, *place, *options, *program]
        return self.start(host, command, **environment)

    @property
    def up(self) -> list[int]:
        return [*self.holders]

    def cut(self, host: int) -> None:
        """Unplug a host: packets vanish, and connections stay open on both sides."""
        self._plug(host, "down")

    def restore(self, host: int) -> None:
        self._plug(host, "up")

    def kill(self, host: int) -> None:
        """End all processes of a host. They close their connections, unless the host was unplugged before."""
        _end(self.holders.pop(host))

    def boot(self, host: int) -> None:
        """Start a host, also again after `kill`, with the same disk."""
        self.private(host).mkdir(exist_ok=True)
        mounts = {self.private(host): self.disk, self._names: "/etc/hosts"}
        binds = [f"mount --bind {source} {target}" for source, target in mounts.items()]
        holder = _hold(" && ".join([f"hostname host{host}", "ip link set lo up", *binds]))
        self.holders[host] = holder
        port = f"port{host}"
        # The kernel removes the old port of a host that was killed a moment later.
        free = f"for i in $(seq 1000); do ip link show {port} >/dev/null 2>&1 || break; sleep 0.01; done"
        # With a new address, the other hosts would send to the old one for up to a minute after a host was replaced.
        ethernet = f"02:00:00:00:00:{host + 1:02x}"
        pair = f"ip link add {port} type veth peer name eth0 address {ethernet} netns {holder.pid}"
        _do(self._switch, f"{free}; {pair} && ip link set {port} master bridge up")
        # One packet for each segment, so that the counters see every header.
        setup = ["ip link set eth0 gso_max_segs 1", f"ip addr add {self.address(host)}/24 dev eth0"]
        setup += [TBF.format(device="eth0", mbit=self.mbit), "ip link set eth0 up"]
        _do(holder, " && ".join(setup))

    def sent(self, host: int) -> int:
        """Bytes that a host has sent to other hosts, with all headers from Ethernet up."""
        for line in Path(f"/proc/{self.holders[host].pid}/net/dev").read_text().splitlines():
            name, _, counters = line.partition(":")
            if name.strip() == "eth0":
                return int(counters.split()[8])
        raise AssertionError(f"host{host} has no eth0")

    def _plug(self, host: int, state: str) -> None:
        _do(self._switch, f"ip link set port{host} {state}")

    def close(self) -> None:
        for holder in [*self.holders.values(), self._switch]:
            _end(holder)
        for running in self._started:
            running.process.wait(START_TIMEOUT)


class HostPool(Pool):
    """Workers on hosts, for tests that start their ranks in milliseconds.

    They have the network and the hostname of their host, but see the processes and files of the machine.
    """

    def __init__(self, bed: Hosts, grace: float = 5.0) -> None:
        super().__init__(grace)
        self.bed, self.filters = bed, shared().filters

    def make_store(self, address: str = "") -> dist.TCPStore:
        """On host 0, though this process is on none: a socket stays in the network that it was made in."""
        with open("/proc/thread-self/ns/net") as here:
            try:
                enter_namespaces(self.namespaces(0)[:1])
                return super().make_store(self.bed.address(0))
            finally:
                enter_namespaces([f"/proc/self/fd/{here.fileno()}"])

    def namespaces(self, place: int) -> list[str]:
        holder = self.bed.holders[place // self.bed.ranks].pid
        return [f"/proc/{holder}/ns/{each}" for each in ("net", "uts")]


@contextlib.contextmanager
def hosts(count: int, ranks: int, folder: Path, mbit: int = 1000) -> Iterator[Hosts]:
    """Hosts for one test, which is skipped where namespaces are not permitted. `folder`: an empty folder."""
    if why := _obstacle():
        pytest.skip(f"cannot make hosts: {why}")
    made = Hosts(count, ranks, folder, mbit)
    try:
        for host in range(count):
            made.boot(host)
        yield made
    finally:
        made.close()


@functools.cache
def _obstacle() -> str:
    command = [*HOLD, "bash", "-c", PROBE.format(tbf=TBF.format(device="eth0", mbit=1))]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=START_TIMEOUT)
    except OSError as error:
        return str(error)
    return done.stderr.strip() or f"status {done.returncode}" if done.returncode else ""


def _hold(script: str) -> subprocess.Popen[str]:
    """Start process 1 of a host. Bash, because it also reaps processes whose parents have ended."""
    command = [*HOLD, "bash", "-c", f"{script} || exit 1\necho ready\nread"]
    holder = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)
    assert holder.stdout is not None
    if holder.stdout.readline() != "ready\n":
        _end(holder)
        raise AssertionError(f"a host did not start: {command}")
    return holder


def _do(holder: subprocess.Popen[str], script: str) -> None:
    """Run a script in the network of a host, with the processes and files of the machine."""
    command = ["nsenter", "--target", str(holder.pid), "--net", "bash", "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, timeout=START_TIMEOUT)
    if done.returncode:
        raise AssertionError(f"{script}: {done.stderr}")


def _end(holder: subprocess.Popen[str]) -> None:
    """Return when all processes of the host have ended."""
    assert holder.stdin is not None and holder.stdout is not None
    holder.stdin.close()
    holder.stdout.close()
    holder.wait(START_TIMEOUT)
