"""A link or a host fails: training goes on with the same losses, or all ranks end with errors that name the host."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path

import pytest
import torch
from bed.hosts import Hosts, Running, hosts
from bed.stack import Stack
from bed.training import train

pytestmark = pytest.mark.slow
STEPS = 60


def start(bed: Hosts, timeout: float, steps: int = STEPS, **environment: str) -> list[Running]:
    running = bed.torchrun("-m", "bed.training", steps, timeout, options=["--max-restarts=0"], **environment)
    for each in running:
        each.wait_for("step 10 ")
    return running


def losses_of(output: str) -> dict[int, list[float]]:
    found: dict[int, list[float]] = {}
    for rank, loss in re.findall(r"rank (\d) step \d+ loss (\S+)", output):
        found.setdefault(int(rank), []).append(float(loss))
    return found


def errors_of(output: str) -> dict[int, str]:
    return {int(rank): error for rank, error in re.findall(r"^rank (\d) raised (.*)$", output, re.MULTILINE)}


@pytest.mark.parametrize("seconds", [10, 60])
def test_a_link_that_works_again_before_the_timeout(tmp_path: Path, seconds: float) -> None:
    """Nothing is lost: TCP sends again, and the losses are those of the unsharded model."""
    with hosts(2, 2, tmp_path, mbit=100) as bed:
        running = start(bed, timeout=900)
        bed.cut(1)
        time.sleep(seconds)
        assert all("has ended" not in each.text() for each in running)
        bed.restore(1)
        done = [each.finish(600) for each in running]
    assert [each.status for each in done] == [0, 0], done
    losses = {rank: each for host in done for rank, each in losses_of(host.output).items()}
    assert sorted(losses) == [0, 1, 2, 3]
    for each in losses.values():
        torch.testing.assert_close(torch.tensor(each), torch.tensor(train(Stack(), STEPS)), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("host", [0, 1])
@pytest.mark.parametrize("power", [False, True], ids=["cut", "power"])
def test_a_host_that_is_lost(tmp_path: Path, host: int, power: bool) -> None:
    """The ranks of the other host end soon after the timeout. Without the host of the store, they cannot ask others."""
    with hosts(2, 2, tmp_path, mbit=100) as bed:
        running = start(bed, timeout=20, steps=10_000)
        time.sleep(6)  # ranks learn the host of rank 0 with its first announcement, which comes every 5 s
        bed.cut(host)
        if power:
            bed.kill(host)
        began = time.monotonic()
        other = running[1 - host].finish(300)
        assert other.status != 0 and time.monotonic() - began < 200
        if not power:
            assert running[host].finish(300).status != 0  # it is alone
    errors = errors_of(other.output)
    assert len(errors) == 2, other.output
    for rank, text in errors.items():
        assert text.startswith(f"CollectiveError: Rank {rank} wanted to "), text
        if host:
            assert all(f"rank {each} on host1 has shown no sign of life for" in text for each in (2, 3)), text
        else:
            assert "rank 0 or the launcher on host0, has ended or cannot be reached" in text


def test_the_table_names_hosts(tmp_path: Path) -> None:
    """A rank that is stopped, whose state another rank of its host finds out; then its host is cut off."""
    with hosts(2, 2, tmp_path) as bed:
        file = tmp_path / "hang.json"
        for each in bed.torchrun("-m", "bed.hanging", "is_stopped", file, 2):
            each.finish(300)
        report = json.loads(file.read_text())
        assert report["missing"] == [3]
        assert [row["host"] for row in report["rows"]] == ["host0", "host0", "host1", "host1"]
        assert report["rows"][3]["state"].startswith("stopped (SIGSTOP)")
        running = start(bed, timeout=900, UNSHARD_EXPLAIN_HANGS="5")
        bed.cut(1)
        running[0].wait_for("Look at the host of each silent rank")
        running[1].wait_for("cannot be reached. Rank 0, host0 process")
        bed.restore(1)
        assert [each.finish(600).status for each in running] == [0, 0]
