"""examples/launchers/slurm.sh in a SLURM of two nodes, on two hosts of this machine."""

from __future__ import annotations

import itertools
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from bed.hosts import Hosts, hosts

EXAMPLES = Path(__file__).parents[2] / "examples"
BINARIES = ("munged", "slurmctld", "slurmd", "sbatch")
# Debian: apt-get install slurmctld slurmd slurm-client munge
missing = [each for each in BINARIES if shutil.which(each, path="/usr/bin:/usr/sbin") is None]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(missing), reason=f"needs {', '.join(missing)}"),
]

CONFIGURATION = """
ClusterName=bed
SlurmctldHost=host0({address0})
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
ReturnToService=2
SlurmdTimeout=10
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
NodeName=host0 NodeAddr={address0} CPUs=1
NodeName=host1 NodeAddr={address1} CPUs=1
PartitionName=all Nodes=ALL Default=YES State=UP
"""

# The example with pauses, so that the test can interrupt it.
DRIVER = """
import runpy, sys, time
import torch
following = torch.nn.functional.mse_loss
def slowly(*args, **options):
    time.sleep(0.05)
    return following(*args, **options)
torch.nn.functional.mse_loss = slowly
sys.argv.pop(0)
runpy.run_path(sys.argv[0], run_name="__main__")
"""


class Cluster:
    """Both nodes can be controlled from host 0, whose slurmctld and munged serve both."""

    def __init__(self, bed: Hosts, folder: Path) -> None:
        self.bed = bed
        path = f"{Path(sys.executable).parent}:/usr/bin:/usr/sbin:/bin:/sbin"
        self.environment = {"SLURM_CONF": str(folder / "slurm.conf"), "PATH": path}
        key = folder / "munge.key"
        key.write_bytes(bytes(range(128)))
        key.chmod(0o600)
        addresses = {f"address{host}": bed.address(host) for host in range(2)}
        (folder / "slurm.conf").write_text(CONFIGURATION.format(folder=folder, **addresses))
        files = [f"--{name}-file={folder}/munged.{name}" for name in ("log", "pid", "seed")]
        self.start(
            0, "munged", "--foreground", "--force", f"--socket={folder}/munge.socket", f"--key-file={key}", *files
        )
        self.start(0, "slurmctld", "-D", "-i")
        for host in range(2):
            self.start_node(host)

    def start(self, host: int, name: str, *arguments: str) -> None:
        self.bed.start(host, [shutil.which(name, path=self.environment["PATH"]), *arguments], **self.environment)

    def start_node(self, host: int) -> None:
        self.start(host, "slurmd", "-D", "-N", f"host{host}")

    def run(self, *command: object) -> str:
        done = self.bed.run(0, command, **self.environment)
        assert done.status == 0, done.output
        return done.output

    def wait_for(self, condition: Callable[[], bool], timeout: float = 300.0) -> None:
        limit = time.monotonic() + timeout
        while not condition():
            assert time.monotonic() < limit, self.run("scontrol", "show", "node") + self.run("scontrol", "show", "job")
            time.sleep(0.2)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    for name in ("bed", "slurm"):
        (tmp_path / name).mkdir(mode=0o700)
    with hosts(2, 1, tmp_path / "bed") as bed:
        made = Cluster(bed, tmp_path / "slurm")
        # The controller answers a moment after its start.
        made.wait_for(lambda: bed.run(0, ["sinfo", "-h", "-o", "%D %t"], **made.environment).output == "2 idle\n")
        yield made


def test_a_job_that_is_interrupted_runs_again(cluster: Cluster, tmp_path: Path) -> None:
    """SLURM requeues the job when a node is lost, and the script when the program fails."""
    driver, output = tmp_path / "driver.py", tmp_path / "output.txt"
    driver.write_text(DRIVER)
    output.touch()
    program = [driver, EXAMPLES / "elastic.py", tmp_path / "checkpoints"]
    script = EXAMPLES / "launchers" / "slurm.sh"
    job = cluster.run("sbatch", f"--output={output}", "--parsable", script, *program).strip()

    cluster.wait_for(lambda: " step 30 " in output.read_text())
    cluster.bed.kill(1)
    cluster.wait_for(lambda: cluster.run("sinfo", "-h", "-N", "-n", "host1", "-o", "%t").startswith("down"))
    cluster.bed.boot(1)
    cluster.start_node(1)
    cluster.wait_for(lambda: " step 100 " in output.read_text())
    cluster.run("scancel", "--signal=KILL", f"{job}.0")
    cluster.wait_for(lambda: "JobState=COMPLETED" in cluster.run("scontrol", "show", "job", job))

    texts = output.read_text().split(" start with 2 ranks")[1:]
    runs = [dict(re.findall(r"^\S+ step (\d+) (.*)$", each, re.M)) for each in texts]
    # SLURM tells a lost node a minute later to end its step. If the job runs there again by then, it starts once more.
    assert len(runs) in (3, 4) and [*runs[-1]][-1] == "200"
    repeated = 0
    for before, after in itertools.pairwise(filter(None, runs)):
        first = int(next(iter(after)))
        assert first % 20 == 1 and 1 < first <= len(before) + 1 + int(next(iter(before)))
        both = before.keys() & after.keys()
        assert all(before[step] == after[step] for step in both)
        repeated += len(both)
    assert repeated
