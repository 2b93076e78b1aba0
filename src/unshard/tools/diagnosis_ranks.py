"""What the ranks of `doctor` measure: clocks, collectives, and a small sharded model beside an unsharded one."""

from __future__ import annotations

import copy
import dataclasses
import json
import os
import re
import socket
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from ..comm.transports import transport_for
from ..errors import ArgumentError
from ..fsdp2.fully_shard import fully_shard
from ..torch_private import job_store

FAILED = (
    "Check that ranks reach each other: the host name resolves, and GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME, if set, "
    "name a network interface of this machine. Set NCCL_DEBUG=INFO for details."
)
_TIMEOUT = timedelta(seconds=60)
_CLOCK_ROUNDS = 8
_FAR_APART = 0.1  # seconds between clocks that make logs of ranks hard to compare
_SMALL = 4096  # bytes; the time of a collective of this size is its latency
_LARGE = {"cpu": 2**24, "cuda": 2**28}
_REPETITIONS = {"cpu": 5, "cuda": 20}
_SLOW = 4  # flag collectives that reach less than this fraction (1/4) of the link
_STEPS, _TOLERANCE = 3, 1e-4
_SAME = ("Python", "torch", "unshard", "CUDA", "driver", "NCCL")
"""What has to be equal on all hosts of a job."""

_LINKS = (
    (r"(?i)pcie|NVL$", None),  # bridges may or may not connect them
    (r"H800|A800", 200),
    (r"B[23]00", 900),
    (r"H[12]00", 450),
    (r"A100", 300),
    (r"V100", 150),
    (r"\bL4\b|L40|A10G?\b|A40\b", 32),
    (r"\bT4\b", 16),
)
"""GB/s of the NVLink or PCIe connection of a GPU in one direction, by device name."""


@dataclass(frozen=True)
class Row:
    """One line of a diagnosis."""

    what: str
    value: str
    ok: bool | None = None
    """None if there is nothing to compare the value with."""
    advice: str = ""
    """What to do, or a hint."""
    measured: float | None = None
    """Bytes per second of a collective, seconds between clocks, or a relative difference."""
    expected: float | None = None

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def main() -> None:
    """Run as one of the processes that `doctor` starts. Rank 0 leaves the rows in the store."""
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    port = int(os.environ["UNSHARD_DOCTOR_PORT"])
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=_TIMEOUT)

    def say(text: str) -> None:
        store.set(f"stage{rank}", text)

    try:
        say("joining the process group")
        device = _device()
        rendezvous = dist.PrefixStore("job", store)
        _join(device, store=rendezvous, rank=rank, world_size=ranks)
        rows = _measure(device, say)
        if rank == 0:
            store.set("rows", json.dumps([row.to_dict() for row in rows]))
        dist.barrier()
        dist.destroy_process_group()
    except Exception as error:
        store.set(f"error{rank}", f"{type(error).__name__}: {' '.join(str(error).split())}")
        raise SystemExit(1) from error


def measured_by_job(machine: list[Row], quick: bool, say: Callable[[str], object]) -> list[Row]:
    """Measure on the ranks of a job, all of which call this. Return the rows of all machines, and the measured ones."""
    device, joined = _device(), dist.is_initialized()
    if not joined:
        _join(device)
    everywhere: list[Any] = [None] * dist.get_world_size()
    mine = (socket.gethostname(), machine if os.environ.get("LOCAL_RANK", "0") == "0" else [])
    dist.all_gather_object(everywhere, mine)
    rows = merged({host: rows for host, rows in everywhere if rows})
    if not quick:
        rows += _measure(device, say)
    if not joined:
        dist.barrier()
        dist.destroy_process_group()
    return rows


def merged(hosts: dict[str, list[Row]]) -> list[Row]:
    """Return one row for each checked thing of all hosts. Values that differ are named with their hosts."""
    found: dict[str, dict[str, Row]] = {}
    for host, rows in hosts.items():
        for row in rows:
            found.setdefault(row.what, {})[host] = row
    return [_merged(what, rows, len(hosts)) for what, rows in found.items()]


def _merged(what: str, rows: dict[str, Row], hosts: int) -> Row:
    worst = min(rows.values(), key=lambda row: (row.ok is not False, not row.advice))
    values: dict[str, list[str]] = {}
    for host, row in rows.items():
        values.setdefault(row.value, []).append(host)
    if len(values) == 1 and len(rows) == hosts:
        return worst
    value = "; ".join(f"{', '.join(names)}: {value}" for value, names in values.items())
    if what in _SAME:
        return Row(what, value, False, "Install the same version on all hosts.")
    return dataclasses.replace(worst, value=value)


def _device() -> torch.device:
    """Return the GPU of this rank, or the CPU if not every rank of this machine has its own GPU."""
    local, ranks = int(os.environ.get("LOCAL_RANK", "0")), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return torch.device("cuda", local) if ranks <= torch.cuda.device_count() else torch.device("cpu")


def _join(device: torch.device, **place: Any) -> None:
    if device.type == "cuda":
        torch.cuda.set_device(device)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    try:
        dist.init_process_group(backend, timeout=_TIMEOUT, **place)
    except ValueError as error:  # variables such as MASTER_ADDR are missing
        raise ArgumentError(
            f"RANK is set, but this process cannot join a job ({error}). Start it with torchrun."
        ) from error


def _measure(device: torch.device, say: Callable[[str], object]) -> list[Row]:
    ranks = dist.get_world_size()
    backend = "NCCL" if device.type == "cuda" else "Gloo"
    places: list[Any] = [None] * ranks
    dist.all_gather_object(places, socket.gethostname())
    hosts = len(set(places))
    on = f" on {hosts} hosts" if hosts > 1 else ""
    rows = [Row("ranks", f"{ranks}{on}, {backend} on {device.type}", True)]
    if ranks > 1:
        say("comparing clocks")
        rows.append(_clocks())
        say("measuring collectives")
        rows += _collectives(device, hosts)
    say("training a small model")
    return [*rows, _proof(device)]


# -- clocks ---------------------------------------------------------------------------------------------------------


def _clocks() -> Row:
    """Measure how far the clock of each rank is from that of rank 0, which answers with its time over the store."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    names = [uuid.uuid4().hex]
    dist.broadcast_object_list(names)  # keys of an earlier call stay in the store
    store = dist.PrefixStore(f"unshard doctor {names[0]}", job_store())
    best = (0.0, 0.0)
    for other in range(1, ranks) if rank == 0 else [rank]:
        rounds = []
        for number in range(_CLOCK_ROUNDS):
            ask, answer = f"ask {other} {number}", f"answer {other} {number}"
            if rank == 0:
                store.get(ask)
                store.set(answer, repr(time.time()))
                continue
            before, start = time.time(), time.perf_counter()
            store.set(ask, "")
            there = float(store.get(answer))
            trip = time.perf_counter() - start
            rounds.append((trip / 2, before + trip / 2 - there))
        best = min(rounds, default=best)
    found: list[Any] = [None] * ranks
    dist.all_gather_object(found, best)
    return clock_row([offset for _, offset in found], max(error for error, _ in found))


def clock_row(offsets: list[float], error: float) -> Row:
    far = max(range(len(offsets)), key=lambda rank: abs(offsets[rank]))
    apart = max(offsets) - min(offsets)
    value = f"rank {far} is {offsets[far] * 1e3:+.1f} ms from rank 0 (±{error * 1e3:.1f} ms)"
    advice = "Synchronize the clocks (chrony, ntpd): times in logs and recordings of ranks cannot be compared."
    fine = apart <= _FAR_APART + error
    return Row("clocks", value, fine, "" if fine else advice, apart)


# -- collectives ----------------------------------------------------------------------------------------------------


def _collectives(device: torch.device, hosts: int) -> list[Row]:
    expected, beside = _memcpy() if device.type == "cpu" else _link(device)
    if hosts > 1:
        expected, beside = None, "of several hosts"
    rows = []
    for name in ("all-gather", "reduce-scatter"):
        latency = _seconds(name, _SMALL, device)
        size = _LARGE[device.type]
        ranks = dist.get_world_size()
        speed = size * (ranks - 1) / ranks / _seconds(name, size, device)
        rows.append(speed_row(name, speed, latency, expected, beside, device.type == "cuda"))
    return rows


def speed_row(name: str, speed: float, latency: float, expected: float | None, beside: str, flagged: bool) -> Row:
    known = f"{beside} {expected / 1e9:.1f} GB/s" if expected else beside
    value = f"{speed / 1e9:.2f} GB/s ({known}), {latency * 1e6:.0f} us for {_SMALL // 1024} KiB"
    slow = flagged and expected is not None and speed < expected / _SLOW
    advice = (
        "GPUs exchange data much slower than their link. See `nvidia-smi topo -m`, unset NCCL_P2P_DISABLE and "
        "NCCL_SHM_DISABLE, and look for the transport in the output of NCCL_DEBUG=INFO."
    )
    return Row(
        name, value, False if slow else True if flagged and expected else None, advice if slow else "", speed, expected
    )


def _seconds(name: str, size: int, device: torch.device) -> float:
    """Return the median duration of a collective whose unsharded tensor has `size` bytes, on the slowest rank."""
    transport = transport_for(dist.group.WORLD, device, check_order=False)
    ranks = dist.get_world_size()
    shard = torch.ones(size // 4 // ranks, device=device)
    whole = torch.ones(shard.numel() * ranks, device=device)
    times = []
    for _ in range(_REPETITIONS[device.type] + 1):
        dist.barrier()
        _finish(device)
        start = time.perf_counter()
        if name == "all-gather":
            transport.all_gather([whole], [shard]).wait()
        else:
            transport.reduce_scatter([shard], [whole], average=True).wait()
        _finish(device)
        times.append(time.perf_counter() - start)
    found: list[Any] = [None] * ranks
    dist.all_gather_object(found, median(times[1:]))  # the first one makes connections
    return max(found)


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _memcpy() -> tuple[float, str]:
    source = torch.ones(_LARGE["cpu"] // 4)
    target, times = torch.empty_like(source), []
    for _ in range(_REPETITIONS["cpu"] + 1):
        start = time.perf_counter()
        target.copy_(source)
        times.append(time.perf_counter() - start)
    return _LARGE["cpu"] / median(times[1:]), "memcpy"


def _link(device: torch.device) -> tuple[float | None, str]:
    speed = link_speed(torch.cuda.get_device_name(device))
    return speed, "link" if speed else "link unknown"


def link_speed(name: str) -> float | None:
    """Return the bytes per second that GPUs of this name exchange in one direction, or None if unknown."""
    found = next((speed for pattern, speed in _LINKS if re.search(pattern, name)), None)
    return found and found * 1e9


# -- training -------------------------------------------------------------------------------------------------------


def _proof(device: torch.device) -> Row:
    """Train a small model sharded over all ranks, and unsharded on every rank with the batches of all ranks."""
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(0)
        blocks = [nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 32)) for _ in range(4)]
        unsharded = nn.Sequential(*blocks, nn.Linear(32, 8)).to(device)
        batches = torch.randn(_STEPS, dist.get_world_size(), 16, 32).to(device)
    sharded, mesh = copy.deepcopy(unsharded), init_device_mesh(device.type, (dist.get_world_size(),))
    for block in sharded:
        fully_shard(block, mesh=mesh)
    fully_shard(sharded, mesh=mesh)
    start = time.perf_counter()
    for model, of_step in ((sharded, lambda batch: batch[dist.get_rank()]), (unsharded, lambda batch: batch)):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for batch in batches:
            model(of_step(batch)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    difference = 0.0
    for mine, reference in zip(sharded.parameters(), unsharded.parameters(), strict=True):
        off = (mine.full_tensor() - reference).abs().max() / reference.abs().max()  # type: ignore[attr-defined]
        difference = max(difference, off.nan_to_num(nan=torch.inf).item())
    return proof_row(difference, time.perf_counter() - start)


def proof_row(difference: float, seconds: float) -> Row:
    value = f"{_STEPS} steps in {seconds:.1f} s, sharded and unsharded; largest relative difference {difference:.1e}"
    fine = difference <= _TOLERANCE
    advice = "Sharded training gives wrong results here. Report it with the output of `unshard doctor --json`."
    return Row("training", value, fine, "" if fine else advice, difference)
