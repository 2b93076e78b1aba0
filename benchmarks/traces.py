"""Reads what a profiler has recorded: which kernels ran, and for which operation each was launched."""

from __future__ import annotations

import json
import os
import tempfile
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

from torch.profiler import profile

from .loopback import RANGE
from .traffic import COPIES

Event = dict[str, Any]

_ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
_LAUNCHES = ("cuda_runtime", "cuda_driver")
_RANGES = ("cpu_op", "user_annotation")


def events_of(record: profile) -> list[Event]:
    """The events of the trace file, the one form in which torch tells launches and allocations one by one."""
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "trace.json")
        record.export_chrome_trace(path)
        with open(path) as file:
            return json.load(file)["traceEvents"]


def device_time(events: list[Event]) -> dict[str, float]:
    """Milliseconds of kernels: `copies` of the side, `collectives` (the simulated ones too), and `compute`."""
    launched = {
        event["args"]["correlation"]: event
        for event in events
        if event.get("cat") in _LAUNCHES and "correlation" in event.get("args", {})
    }
    kernels = [event for event in events if event.get("cat") in _ON_DEVICE]
    launches = [launched.get(kernel.get("args", {}).get("correlation")) for kernel in kernels]
    kinds = _kinds((event for event in events if event.get("cat") in _RANGES), [each for each in launches if each])
    total: dict[str, float] = defaultdict(float, copies=0.0, collectives=0.0, compute=0.0)
    for kernel, launch in zip(kernels, launches, strict=True):
        kind = "compute" if launch is None else kinds[id(launch)]
        if kernel["name"].startswith("nccl"):
            kind = "collectives"
        total[kind] += kernel.get("dur", 0) / 1e3
    return dict(total)


def nccl_time(events: list[Event]) -> dict[str, float]:
    """Milliseconds of NCCL's kernels. A kernel runs from when this rank comes to it until all have done their part."""
    total = {"gathering": 0.0, "reducing": 0.0}
    for kernel in events:
        if kernel.get("cat") == "kernel" and kernel["name"].startswith("nccl"):
            gathers = "AllGather" in kernel["name"]
            total["gathering" if gathers else "reducing"] += kernel.get("dur", 0) / 1e3
    return total


def _kinds(ranges: Iterable[Event], launches: list[Event]) -> dict[int, str]:
    """What each launch was for: ranges that are open on its thread at that moment say so, the outermost first."""
    found: dict[int, str] = {}
    per_thread: dict[Any, list[tuple[float, int, Event]]] = defaultdict(list)
    by_number: dict[Any, Event] = {}
    for each in ranges:
        per_thread[each["tid"]].append((each["ts"], 0, each))
        by_number[each.get("args", {}).get("External id")] = each
    threads = set(per_thread)
    for each in launches:
        # A thread that torch did not start may have another number here; the launch then says which operation it is of.
        known = each["tid"] in threads
        at = each if known else by_number.get(each["args"].get("External id"), each)
        per_thread[at["tid"]].append((at["ts"], 1, each))
    for moments in per_thread.values():
        moments.sort(key=lambda moment: (moment[0], moment[1], -moment[2].get("dur", 0)))
        opened: list[tuple[float, str]] = []
        for now, is_launch, event in moments:
            while opened and opened[-1][0] < now:
                opened.pop()
            if is_launch:
                kinds = [kind for _, kind in opened if kind]
                found[id(event)] = kinds[0] if kinds else "compute"
            else:
                opened.append((now + event.get("dur", 0), _kind(event["name"])))
    return found


def _kind(name: str) -> str:
    space, _, operation = name.rpartition("::")
    if name == RANGE or space in ("c10d", "_c10d_functional", "nccl"):
        return "collectives"
    return "copies" if space in ("aten", "fsdp") and operation in COPIES else ""
