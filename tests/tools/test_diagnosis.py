"""`unshard.tools.doctor`: what is red and what to do about it, on this machine, on its ranks and over several hosts."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import threading
import time
from collections import namedtuple
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from bed.world import world

from unshard import __version__
from unshard.errors import ArgumentError
from unshard.tools import diagnosis, diagnosis_ranks, doctor
from unshard.tools.diagnosis import Diagnosis
from unshard.tools.diagnosis_ranks import Row


@pytest.fixture(autouse=True)
def plain(monkeypatch: pytest.MonkeyPatch) -> None:
    """No variables of a job or of NCCL."""
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "OMP_NUM_THREADS", "NCCL_DEBUG"):
        monkeypatch.delenv(name, raising=False)


def rows_by_name(found: Diagnosis) -> dict[str, Row]:
    assert len({row.what for row in found.rows}) == len(found.rows)
    return {row.what: row for row in found.rows}


def test_this_machine() -> None:
    found = doctor(1, quick=True)
    rows = rows_by_name(found)
    assert rows["torch"].value == torch.__version__ and rows["unshard"].value == __version__
    assert rows["Python"].value == sys.version.split()[0] and rows["Python"].ok
    assert "ranks" not in rows  # not with `quick`
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert rows["open files"].value == f"at most {soft:,}" and rows["open files"].ok == (soft >= 1024)
    told = json.loads(json.dumps(found.to_dict()))
    assert list(told)[:2] == ["kind", "unshard"] and told["kind"] == "doctor" and told["ok"] == found.ok
    assert [row["what"] for row in told["rows"]] == list(rows)
    assert {"what", "value", "ok", "advice"} <= told["rows"][0].keys()
    assert Diagnosis([Row("a", "1"), Row("b", "2", True)]).ok and not Diagnosis([Row("a", "1", False, "x")]).ok
    with pytest.raises(ArgumentError, match="nproc_per_node must be at least 1, got 0"):
        doctor(0)


Usage = namedtuple("Usage", "total used free")

# What is changed, the row that turns red, and a part of its advice.
RED = [
    ("shutil.disk_usage", lambda path: Usage(2**26, 0, 2**26), "shared memory", "--shm-size=8g"),
    ("shutil.disk_usage", lambda path: Usage(2**40, 2**40, 0), "temporary files", "set TMPDIR"),
    ("resource.getrlimit", lambda kind: (256, 4096), "open files", "`ulimit -n 65536`"),
    ("resource.getrlimit", lambda kind: (256, 4096), "processes", "`ulimit -u 65536`"),
    ("_available_memory", lambda: 2**20, "host memory", "give the container more"),
    ("_nvidia_smi", lambda *fields: [["580.1"] * len(fields)], "CUDA", "Install torch with CUDA"),
]


@pytest.mark.parametrize(("place", "instead", "what", "advice"), RED, ids=[each[2] for each in RED])
def test_red_lines_say_what_to_do(
    place: str, instead: Any, what: str, advice: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if what == "CUDA" and torch.version.cuda is not None:
        pytest.skip("torch is built with CUDA")
    monkeypatch.setattr(f"unshard.tools.diagnosis.{place}", instead)
    found = doctor(1, quick=True)
    row = rows_by_name(found)[what]
    assert row.ok is False and advice in row.advice and not found.ok
    table, _, rest = str(found).partition("\n\nWhat to do:\n")
    assert f"\nNO  {what} " in table and f"- {what}: {row.advice}" in rest.splitlines()


def test_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "64")
    monkeypatch.setenv("NCCL_P2P_DISABLE", "1")
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "0")
    monkeypatch.setattr("os.sched_getaffinity", lambda process: range(16))
    rows = rows_by_name(doctor(8, quick=True))
    assert rows["OMP_NUM_THREADS"].advice == "8 ranks with 64 threads share 16 cores. Set it to 2."
    assert rows["OMP_NUM_THREADS"].ok is False and rows["CPU cores"].ok
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    assert not rows_by_name(doctor(8, quick=True))["OMP_NUM_THREADS"].ok
    assert rows_by_name(doctor(4, quick=True))["OMP_NUM_THREADS"].ok
    monkeypatch.setenv("OMP_NUM_THREADS", "64")
    assert rows["NCCL_P2P_DISABLE"].ok is None and "NVLink" in rows["NCCL_P2P_DISABLE"].advice
    assert rows["CUDA_LAUNCH_BLOCKING"].advice == ""
    assert rows_by_name(doctor(1, quick=True))["OMP_NUM_THREADS"].ok  # one rank may use all cores
    rows = rows_by_name(doctor(17, quick=True))
    assert rows["CPU cores"].ok is None and "17 ranks share 16 cores" in rows["CPU cores"].advice


def test_a_newer_torch_is_a_hint(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "9.1.0a0+git12")
    found = doctor(1, quick=True)
    assert rows_by_name(found)["torch"].ok is None
    assert "Hints:\n- torch: unshard was tested with torch 2.11 to " in str(found)


def test_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = SimpleNamespace(name="NVIDIA H200", total_memory=140 * 2**30, uuid="a")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda number: gpu)
    in_use = [["GPU-a", "71680"], ["GPU-b", "[N/A]"]]
    monkeypatch.setattr(diagnosis, "_nvidia_smi", lambda *fields: in_use if len(fields) == 2 else [])
    rows = rows_by_name(doctor(1, quick=True))
    assert rows["GPU 0"].value == "NVIDIA H200, 140.0 GiB, 70.0 GiB in use" and rows["GPU 0"].ok is None
    assert "nvidia-smi" in rows["GPU 0"].advice and "GPU 1" in rows
    gpu.uuid = "c"
    assert rows_by_name(doctor(1, quick=True))["GPU 0"].ok


def test_links_of_gpus() -> None:
    known = {
        "NVIDIA H200": 450,
        "NVIDIA H100 80GB HBM3": 450,
        "NVIDIA H100 PCIe": None,
        "NVIDIA H800": 200,
        "NVIDIA B200": 900,
        "NVIDIA A100-SXM4-80GB": 300,
        "NVIDIA A100-PCIE-40GB": None,
        "Tesla V100-SXM2-32GB": 150,
        "NVIDIA A10G": 32,
        "NVIDIA L4": 32,
        "Tesla T4": 16,
        "NVIDIA GeForce RTX 4090": None,
    }
    assert {name: diagnosis_ranks.link_speed(name) for name in known} == {
        name: speed and speed * 1e9 for name, speed in known.items()
    }


def test_slow_collectives() -> None:
    row = diagnosis_ranks.speed_row("all-gather", 100e9, 20e-6, 450e9, "link", True)
    assert row.ok is False and "topo -m" in row.advice and row.measured == 100e9 and row.expected == 450e9
    assert row.value == "100.00 GB/s (link 450.0 GB/s), 20 us for 4 KiB"
    assert diagnosis_ranks.speed_row("all-gather", 300e9, 20e-6, 450e9, "link", True).ok is True
    assert diagnosis_ranks.speed_row("all-gather", 1e9, 20e-6, None, "link unknown", True).ok is None
    assert diagnosis_ranks.speed_row("all-gather", 0.1e9, 1e-3, 10e9, "memcpy", False).ok is None  # on the CPU


def test_hosts_that_differ() -> None:
    here = [Row("torch", "2.13.0", True), Row("open files", "at most 65,536", True), Row("NCCL_DEBUG", "INFO")]
    there = [Row("torch", "2.12.1", True), Row("open files", "at most 256", False, "Raise it."), Row("MPS", "no")]
    rows = {row.what: row for row in diagnosis_ranks.merged({"a": here, "b": there, "c": here})}
    assert rows["torch"].value == "a, c: 2.13.0; b: 2.12.1" and rows["torch"].ok is False
    assert rows["torch"].advice == "Install the same version on all hosts."
    assert rows["open files"].value == "a, c: at most 65,536; b: at most 256" and rows["open files"].ok is False
    assert rows["open files"].advice == "Raise it."
    assert rows["NCCL_DEBUG"].value == "a, c: INFO" and rows["MPS"].value == "b: no" and rows["MPS"].ok is None
    assert diagnosis_ranks.merged({"a": here, "b": here}) == here


# -- ranks -----------------------------------------------------------------------------------------------------------


@world(1, 2)
def test_the_ranks_of_a_job(world_size: int) -> None:
    """With a process group that the job has made, and keeps."""
    torch.manual_seed(3)
    before = torch.get_rng_state()
    found = doctor()
    rows = rows_by_name(found)
    assert dist.is_initialized() and torch.equal(torch.get_rng_state(), before)
    assert rows["ranks"].value == f"{world_size}, Gloo on cpu" and rows["torch"].value == torch.__version__
    assert rows["training"].ok and rows["training"].measured < 1e-5
    if world_size > 1:
        assert rows["clocks"].ok and abs(rows["clocks"].measured) < 0.1
        for each in (rows["all-gather"], rows["reduce-scatter"]):
            assert each.ok is None and 1e6 < each.measured < 1e11 and each.expected > 1e8 and "memcpy" in each.value
    all_ranks: list[Any] = [None] * world_size
    dist.all_gather_object(all_ranks, [row.value for row in found.rows if row.measured is None])
    assert all_ranks.count(all_ranks[0]) == world_size
    assert "ranks" not in rows_by_name(doctor(quick=True))


@world(3)
def test_clocks_that_differ() -> None:
    late = 5.0 if dist.get_rank() == 1 else 0.0
    clock = SimpleNamespace(time=lambda: time.time() + late, perf_counter=time.perf_counter)
    diagnosis_ranks.time = clock  # type: ignore[attr-defined]
    try:
        row = diagnosis_ranks._clocks()
    finally:
        diagnosis_ranks.time = time  # type: ignore[attr-defined]
    assert row.ok is False and row.value.startswith(("rank 1 is +50", "rank 1 is +49"))
    assert "chrony" in row.advice and row.measured == pytest.approx(5.0, abs=0.5)


@world(2)
def test_training_that_goes_wrong() -> None:
    """Gradients are summed over the ranks instead of averaged."""
    right = diagnosis_ranks.fully_shard

    def wrong(module: Any, **options: Any) -> Any:
        right(module, **options).set_gradient_divide_factor(1.0)

    diagnosis_ranks.fully_shard = wrong  # type: ignore[attr-defined]
    try:
        row = diagnosis_ranks._proof(torch.device("cpu"))
    finally:
        diagnosis_ranks.fully_shard = right  # type: ignore[attr-defined]
    assert row.ok is False and row.measured > 1e-3 and "Report it" in row.advice
    assert diagnosis_ranks.proof_row(float("inf"), 1.0).ok is False


def starts(monkeypatch: pytest.MonkeyPatch, program: str, rows: list[Row] | None = None) -> None:
    """Let the doctor start programs that do not import torch. With `rows`, they leave these in the store."""

    def start(rank: int, ranks: int, port: int, output: Path) -> subprocess.Popen[bytes]:
        if rank == 0 and rows is not None:
            client = dist.TCPStore("127.0.0.1", port, is_master=False)
            client.set("stage0", "measuring")
            client.set("rows", json.dumps([row.to_dict() for row in rows]))
        with output.open("wb") as file:
            return subprocess.Popen([sys.executable, "-S", "-c", program, str(rank)], stdout=file, stderr=file)

    monkeypatch.setattr(diagnosis, "_start", start)


def test_local_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    starts(monkeypatch, "import time; time.sleep(0.3)", [Row("ranks", "3", True), Row("clocks", "x", False, "y")])
    said: list[str] = []
    found = doctor(3, say=said.append)
    assert found.rows[-2:] == [Row("ranks", "3", True), Row("clocks", "x", False, "y")] and not found.ok
    assert said == ["starting 3 ranks", "measuring"]


def test_a_rank_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others, which would wait for it, are ended."""
    starts(monkeypatch, "import sys, time; sys.exit('no such device') if sys.argv[1] == '1' else time.sleep(600)")
    row = doctor(2).rows[-1]
    assert row.ok is False and row.value == "rank 1 failed while starting: no such device" and row.advice
    starts(monkeypatch, "import os; os.kill(os.getpid(), 9)")
    assert "ended with signal 9 while starting: no output" in doctor(1).rows[-1].value


def test_ranks_that_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    starts(monkeypatch, "import time; time.sleep(600)")
    monkeypatch.setattr(diagnosis, "_PATIENCE", 0.2)
    before = threading.active_count()
    row = doctor(2).rows[-1]
    assert row.ok is False and row.value.startswith("rank 0 did not finish in 0 s while starting")
    assert threading.active_count() <= before


@pytest.mark.slow
def test_real_local_ranks() -> None:
    rows = rows_by_name(doctor(2))
    assert rows["ranks"].value == "2, Gloo on cpu" and rows["training"].ok and rows["clocks"].ok
