"""Hosts that are lost while examples/elastic.py trains: torchrun restarts it, and it resumes from its checkpoint."""

from __future__ import annotations

import importlib.util
import random
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from bed.hosts import Hosts, Running, hosts
from bed.pool import shared

from unshard import checkpoint

EXAMPLE = Path(__file__).parents[3] / "examples" / "elastic.py"
EVERY, PAUSE = 5, 0.05
FIELDS = r"sample (\d+) lr (\S+) loss (\S+)"

# The example with pauses, so that a host can be lost in any part of a step.
DRIVER = """
import sys, time
from datetime import timedelta
import torch.distributed as dist
sys.path.insert(0, {examples!r})
import elastic
elastic.STEPS, elastic.EVERY = {steps}, {every}
following = elastic.Samples.next
def slowly(samples):
    time.sleep({pause})
    return following(samples)
elastic.Samples.next = slowly
dist.init_process_group(timeout=timedelta(seconds=300))
elastic.train(sys.argv[1])
dist.destroy_process_group()
"""

# torchrun notices a lost host after 3 s instead of 15, and waits 1 s for more hosts instead of 30.
OPTIONS = ["--rdzv-conf=keep_alive_interval=1,keep_alive_max_attempt=3,last_call_timeout=1", "--max-restarts=100"]
ENVIRONMENT = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "LOGLEVEL": "INFO"}


class Job:
    """The example on all hosts. Its checkpoints are in a folder that all hosts see."""

    def __init__(self, bed: Hosts, folder: Path, nodes: str, steps: int = 10_000, **launch: str) -> None:
        self.bed, self.steps, self.checkpoints = bed, steps, folder / "checkpoints"
        self._program = folder / "driver.py"
        settings = {"steps": steps, "every": EVERY, "pause": PAUSE}
        self._program.write_text(DRIVER.format(examples=str(EXAMPLE.parent), **settings))
        self._options, self._launch = [f"--nnodes={nodes}", *OPTIONS], {**launch, **ENVIRONMENT}
        self.running: dict[int, Running] = {}

    def start(self, host: int, *options: str) -> None:
        given = [*self._options, *options]
        program = [self._program, self.checkpoints]
        self.running[host] = self.bed.torchrun_on(host, *program, elastic=True, options=given, **self._launch)

    def lose(self, host: int) -> float:
        """Return when all its processes had ended."""
        self.bed.kill(host)
        return time.time()

    def wait_for(self, host: int, pattern: str, after: int = 0, timeout: float = 300.0) -> int:
        """Return where the output of a host has this pattern, after this position."""
        limit = time.monotonic() + timeout
        while not (found := re.compile(pattern, re.MULTILINE).search(self.running[host].text(), after)):
            running = self.running[host]
            assert running.process.poll() is None and time.monotonic() < limit, f"no {pattern!r}:\n{running.text()}"
            time.sleep(0.02)
        return found.end()


@dataclass
class Start:
    """One start of the example, as rank 0 has printed it."""

    ranks: int
    began: float
    resumed: float
    step: int
    sample: int
    steps: dict[int, tuple[str, ...]]
    first: float


def starts(text: str) -> list[Start]:
    found: list[Start] = []
    for line in text.splitlines():
        if match := re.match(r"(\S+) start with (\d+) ranks", line):
            found.append(Start(int(match[2]), float(match[1]), 0.0, -1, -1, {}, 0.0))
        elif match := re.match(r"(\S+) resume at step (\d+), sample (\d+)", line):
            found[-1].resumed, found[-1].step, found[-1].sample = float(match[1]), int(match[2]), int(match[3])
        elif match := re.match(rf"(\S+) step (\d+) {FIELDS}", line):
            found[-1].first = found[-1].first or float(match[1])
            found[-1].steps[int(match[2])] = match.groups()[2:]
    return found


def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location("elastic", EXAMPLE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Enough(Exception):
    pass


def train(folder: str, steps: int, last: int) -> str:
    """Run the example on ranks of the pool up to a step, and return what rank 0 prints."""
    module, lines = example(), []
    module.STEPS, module.EVERY = steps, EVERY

    def say(text: str) -> None:
        lines.append(f"0 {text}")
        if text.startswith(f"step {last} "):
            raise Enough

    module.say = say
    with pytest.raises(Enough):
        module.train(folder)
    return "\n".join(lines)


def check(found: list[Start], steps: int, folder: Path, tolerance: float) -> None:
    """Each start goes on where the last checkpoint was, and its steps are those of a run without interruption."""
    last = max(step for start in found for step in start.steps)
    (reference,) = starts(shared().run(train, 2, {"folder": str(folder), "steps": steps, "last": last})[0])
    worst = 0.0
    for before, start in zip([None, *found], found, strict=False):
        if start.step < 0:
            continue  # lost before it had loaded
        assert start.sample == 12 * start.step
        assert list(start.steps) == list(range(start.step + 1, start.step + 1 + len(start.steps)))
        reached = max((step for each in found[: found.index(start)] for step in each.steps), default=0)
        assert start.step % EVERY == 0 and start.step >= ((reached - 1) // EVERY - 1) * EVERY, (before, start.step)
        for step, (sample, rate, loss) in start.steps.items():
            expected = reference.steps[step]
            assert (sample, rate) == expected[:2]
            worst = max(worst, abs(float(loss) / float(expected[2]) - 1))
            assert start.ranks != 2 or tolerance or loss == expected[2], step
    assert worst <= tolerance
    print(f"{last} steps, {len(found)} starts, losses differ by up to {worst:.2g}")


def clock(text: str, pattern: str, after: float) -> float:
    """The time of torchrun's first line with this pattern that is later than `after`."""
    day = time.strftime("%Y-%m-%d ", time.localtime(after))
    for match in re.finditer(rf"^[IWE]\d{{4}} (\d\d:\d\d:\d\d)(\.\d+) .*{pattern}", text, re.MULTILINE):
        at = time.mktime(time.strptime(day + match[1], "%Y-%m-%d %H:%M:%S")) + float(match[2])
        if at > after:
            return at
    raise AssertionError(f"no {pattern!r} after {after}:\n{text}")


def parts(lost: float, text: str) -> str:
    """The seconds from the loss to the next step, taken apart."""
    noticed = clock(text, "(FAILED|Detected)", lost)
    restarted = clock(text, "Starting worker group", noticed)
    start = next(each for each in starts(text) if each.began > restarted)
    return (
        f"{start.first - lost:.1f} s to the next step: noticed {noticed - lost:.1f}, rendezvous "
        f"{restarted - noticed:.1f}, start {start.began - restarted:.1f}, load {start.resumed - start.began:.2f}, "
        f"step {start.first - start.resumed:.2f}"
    )


@pytest.fixture
def job(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Job]:
    (tmp_path / "bed").mkdir()
    settings: dict[str, Any] = {"nodes": "1:2", "hosts": 2, **getattr(request, "param", {})}
    with hosts(settings.pop("hosts"), 1, tmp_path / "bed") as bed:
        yield Job(bed, tmp_path, **settings)


@pytest.mark.slow
@pytest.mark.parametrize("job", [{}, {"launcher": "unshard.cli run"}], indirect=True, ids=["torchrun", "unshard run"])
def test_a_lost_host(job: Job, tmp_path: Path) -> None:
    """The other host goes on alone."""
    for host in range(2):
        job.start(host)
    position = job.wait_for(0, r" step 12 ")
    lost = job.lose(1)
    job.wait_for(0, r" step 20 ", position)
    text = job.running[0].text()
    print(parts(lost, text))
    assert "rank 1 on host1 has shown no sign of life" in text
    found = starts(text)
    assert [start.ranks for start in found] == [2, 1]
    check(found, job.steps, tmp_path / "reference", 1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("job", [{"nodes": "2"}, {"nodes": "1:2"}], indirect=True, ids=["same", "fewer"])
def test_ten_losses_at_random_moments(job: Job, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """The host is replaced at once, or only when the other one has gone on alone."""
    fewer, chance = "fewer" in request.node.name, random.Random()
    for host in range(2):
        job.start(host)
    position = job.wait_for(0, "start with 2 ranks")
    for number in range(10):
        time.sleep(chance.uniform(0, 3))
        lost = job.lose(1)
        known = checkpoint.latest(job.checkpoints)
        if fewer:
            position = job.wait_for(0, "start with 1 ranks", position)
            position = job.wait_for(0, r"\d step ", position)
            print(f"loss {number}:", parts(lost, job.running[0].text()))
        job.bed.boot(1)
        job.start(1)
        position = job.wait_for(0, "start with 2 ranks", position)
        position = job.wait_for(0, "resume at step ", position)
        resumed = starts(job.running[0].text())[-1]
        assert known is None or resumed.step >= int(known.name.removeprefix("step_"))
        if not fewer:
            job.wait_for(0, r"\d step ", position)
            print(f"loss {number}:", parts(lost, job.running[0].text()))
    job.wait_for(0, r" step \d*9 ", position)
    found = starts(job.running[0].text())
    assert len(found) >= 11
    check(found, job.steps, tmp_path / "reference", 1e-4 if fewer else 0.0)


@pytest.mark.slow
@pytest.mark.parametrize("job", [{"nodes": "2"}], indirect=True, ids=["same"])
def test_the_host_of_the_rendezvous_is_lost(job: Job, tmp_path: Path) -> None:
    """torchrun ends on the other host. Started again on both, the job resumes."""
    for host in range(2):
        job.start(host)
    job.wait_for(0, r" step 12 ")
    lost = job.lose(0)
    done = job.running[1].finish()
    print(f"torchrun ended {time.time() - lost:.1f} s after the loss, with status {done.status}\n{done.output[-3000:]}")
    assert done.status
    first = starts(job.running[0].text())
    job.bed.boot(0)
    for host in range(2):
        job.start(host)
    job.wait_for(0, r" step 20 ")
    check(first + starts(job.running[0].text()), job.steps, tmp_path / "reference", 0.0)
