"""Reads what a profiler has recorded: which kernels ran, and for which operation each was launched.

Communication is *exposed* while the compute stream has nothing to do because it waits for a collective. So the time
counts from the later of two moments, the end of the last kernel and the call that made the stream wait, to the end of
the collective. If the host is late, the stream is idle before that call. This idle time is not exposed, although a
collective may run meanwhile: the stream would be idle without the collective, too. `unshard.tools.timeline` counts from
the same moment.
"""

from __future__ import annotations

import itertools
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
_WAITS = ("cudaStreamWaitEvent", "cuStreamWaitEvent")
_RANGES = ("cpu_op", "user_annotation")
_PACKS = "_pack"
"""The kernel of unshard that copies gradients. It is launched outside of torch's operators."""


def events_of(record: profile) -> list[Event]:
    """The events of the trace file, the one form in which torch tells launches and allocations one by one."""
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "trace.json")
        record.export_chrome_trace(path)
        with open(path) as file:
            return json.load(file)["traceEvents"]


def device_time(events: list[Event]) -> dict[str, float]:
    """Milliseconds of kernels: `copies` of the side, `collectives` (the simulated ones too), and `compute`."""
    total: dict[str, float] = defaultdict(float, copies=0.0, collectives=0.0, compute=0.0)
    for kernel, kind in kernels_of(events):
        total[kind] += kernel.get("dur", 0) / 1e3
    return dict(total)


def kernels_of(events: list[Event]) -> list[tuple[Event, str]]:
    """What ran on the device: kernels and copies, each with its kind: `copies`, `collectives` or `compute`."""
    launched = _launches(events)
    kernels = [event for event in events if event.get("cat") in _ON_DEVICE]
    launches = [launched.get(kernel.get("args", {}).get("correlation")) for kernel in kernels]
    kinds = _kinds((event for event in events if event.get("cat") in _RANGES), [each for each in launches if each])
    found = []
    for kernel, launch in zip(kernels, launches, strict=True):
        kind = "compute" if launch is None else kinds[id(launch)]
        kind = "copies" if kernel["name"] == _PACKS else kind
        found.append((kernel, "collectives" if kernel["name"].startswith("nccl") else kind))
    return found


def operators_of(events: list[Event]) -> list[tuple[Event, str]]:
    """What ran on the CPU, with its kind: the outermost operators of a thread, and Gloo's collectives."""
    found, ends = [], defaultdict[Any, float](float)
    for each in sorted((each for each in events if each.get("cat") in _RANGES), key=lambda each: each["ts"]):
        sent = each["name"].startswith("gloo:")
        if sent or (each["name"].startswith(("aten::", "fsdp::")) and each["ts"] >= ends[each["tid"]]):
            ends[each["tid"]] = _end(each)
            found.append((each, "collectives" if sent else _kind(each["name"]) or "compute"))
    return found


def _launches(events: list[Event]) -> dict[Any, Event]:
    return {
        event["args"]["correlation"]: event
        for event in events
        if event.get("cat") in _LAUNCHES and "correlation" in event.get("args", {})
    }


def nccl_time(events: list[Event]) -> dict[str, float]:
    """Milliseconds of NCCL's kernels. A kernel runs from when this rank comes to it until all have done their part."""
    total = {"gathering": 0.0, "reducing": 0.0}
    for kernel in events:
        if kernel.get("cat") == "kernel" and kernel["name"].startswith("nccl"):
            gathers = "AllGather" in kernel["name"]
            total["gathering" if gathers else "reducing"] += kernel.get("dur", 0) / 1e3
    return total


def exposed_time(events: list[Event]) -> dict[str, float]:
    """Milliseconds in which the compute stream was idle until a kernel of NCCL ended: `gathering` and `reducing`.

    In an idle time, the last kernel of NCCL that ends before the next kernel of the compute stream begins is the one
    that was waited for. The wait begins with the first call between the launches of the kernels before and after that
    makes a stream wait, in a thread that launched one of them: backward ends in a thread of autograd. Traces without
    launches do not tell when it begins: they count the part of the idle time in which a kernel of NCCL ran. The compute
    stream is the one with the longest time in kernels that are not NCCL's. `alone` is the time in which a kernel of
    NCCL ran and no other kernel of this process did, on any stream.
    """
    kernels = sorted((each for each in events if each.get("cat") in _ON_DEVICE), key=lambda each: each["ts"])
    sent = [each for each in kernels if each["name"].startswith("nccl")]
    others = [each for each in kernels if not each["name"].startswith("nccl")]
    total = {"gathering": 0.0, "reducing": 0.0, "alone": _outside(united(sent), united(others)) / 1e3}
    times: dict[Any, float] = defaultdict(float)
    for each in others:
        times[each["args"]["stream"]] += each.get("dur", 0)
    compute_stream = max(times, key=lambda stream: times[stream])
    computed = [each for each in others if each["args"]["stream"] == compute_stream]
    launched, waits = _launches(events), [each for each in events if each["name"].startswith(_WAITS)]
    idle = _end(computed[0])
    for before, after in itertools.pairwise(computed):
        ends = [each for each in sent if idle < _end(each) <= after["ts"]]
        if ends:
            last = max(ends, key=_end)
            around = [launched.get(each["args"].get("correlation")) for each in (before, after)]
            waited = _waited(idle, _end(last), around, waits, united(sent))
            total["gathering" if "AllGather" in last["name"] else "reducing"] += waited / 1e3
        idle = max(idle, _end(after))
    return total


def _waited(
    idle: float, end: float, around: list[Event | None], waits: list[Event], sent: list[tuple[float, float]]
) -> float:
    """The part of an idle time until the `end` of a collective in which the compute stream waited for it."""
    before, after = around
    if before is None or after is None:
        return end - idle - _outside([(idle, end)], sent)
    threads = before["tid"], after["tid"]
    mine = (each["ts"] for each in waits if each["tid"] in threads and before["ts"] < each["ts"] < after["ts"])
    return max(0.0, end - max(idle, min(mine, default=end)))


def _end(event: Event) -> float:
    return event["ts"] + event.get("dur", 0)


def united(kernels: Iterable[Event]) -> list[tuple[float, float]]:
    """The times in which at least one of `kernels`, which are sorted by their begin, ran."""
    spans: list[tuple[float, float]] = []
    for each in kernels:
        if spans and each["ts"] <= spans[-1][1]:
            spans[-1] = spans[-1][0], max(spans[-1][1], _end(each))
        else:
            spans.append((each["ts"], _end(each)))
    return spans


def _outside(spans: list[tuple[float, float]], others: list[tuple[float, float]]) -> float:
    """The length of `spans` without what they have in common with `others`."""
    common = sum(
        max(0.0, min(end, other_end) - max(begin, other_begin))
        for begin, end in spans
        for other_begin, other_end in others
    )
    return sum(end - begin for begin, end in spans) - common


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
