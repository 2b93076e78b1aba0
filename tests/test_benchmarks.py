"""Every benchmark runs on a CPU and leaves a complete table; how fast anything was is not tested."""

from __future__ import annotations

import collections
import json
import math
import re
import shlex
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest import mock
from xml.dom import minidom

import pytest
import torch

from benchmarks import __main__ as listing
from benchmarks import convergence, picture, sides, trace, traces, uneven
from benchmarks.loopback import RANGE
from benchmarks.models import Case, unit_sizes
from benchmarks.places import Place

SIDES = ["unsharded", "fsdp2", "fsdp1", "unshard"]
SIMULATED = ["--place", "simulated", "--device", "cpu", "--world", "2", "--sides", ",".join(SIDES)]

Run = Callable[..., dict[str, Any]]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    def run(command: str, *arguments: str) -> dict[str, Any]:
        path = tmp_path / "figures.json"
        import_module(f"benchmarks.{command}").main([*arguments, "--json", str(path)])
        return json.loads(path.read_text())

    return run


def rows_of(found: dict[str, Any], *positive: str) -> dict[str, dict[str, Any]]:
    """The rows by side, after a check that none failed and that the named figures are there and make sense."""
    for row in found["rows"]:
        assert "error" not in row, row
        for name in positive:
            assert math.isfinite(row[name]) and row[name] > 0, (name, row)
    return {row["side"]: row for row in found["rows"]}


@pytest.mark.slow
def test_step_on_two_real_ranks(run: Run, capfd: pytest.CaptureFixture[str]) -> None:
    found = run(
        "step", "--place", "gloo", "--cases", "tiny:1x4:fp32", "--sides", "unsharded,unshard", "--rounds", "1",
        *("--steps", "2", "--warmup", "1", "--interleave"),
    )  # fmt: skip
    rows = rows_of(found, "wall", "forward", "backward", "optimizer", "host", "peak_mib")
    for row in rows.values():
        assert row["tokens_per_second"] == pytest.approx(2 * 4 / row["wall"] * 1000)
    assert found["environment"]["world"] == 2 and found["environment"]["device"] == "CPU"
    assert list(rows) == ["unsharded", "unshard"]
    assert [(row["side"], row["peer"]) for row in found["ratios"]] == [("unshard", "unsharded")]
    assert found["ratios"][0]["wall"] > 0
    assert "unshard / unsharded: wall" in capfd.readouterr().out


def test_a_watched_side_is_the_same_training(run: Run) -> None:
    options = "--place", "simulated", "--cases", "tiny:1x4:fp32", "--rounds", "1", "--steps", "1", "--warmup", "1"
    with mock.patch.object(sides, "start", wraps=sides.start) as start:
        found = run("step", *options, "--sides", "unshard-watched,unshard", "--interleave")
    rows = rows_of(found, "wall")
    assert list(rows) == ["unshard-watched", "unshard"]
    assert start.call_count == 2 + 1  # one for each peak, and one that both sides share


@pytest.mark.slow
def test_uneven_steps_on_two_real_ranks(run: Run, capfd: pytest.CaptureFixture[str]) -> None:
    options = "--place", "gloo", "--size", "tiny", "--median", "16", "--rounds", "1", "--steps", "1", "--warmup", "1"
    rows = rows_of(run("uneven", *options), "wall", "ratio", "low", "high", "tokens_per_second")
    assert list(rows) == ["fsdp2", "fsdp2-tuned", "keep", "keep-known", "follow", "follow-known"]
    assert rows["fsdp2"]["ratio"] == 1 and rows["fsdp2"]["difference"] == 0
    # Both libraries round differently, but not much.
    assert 0 < max(row["difference"] for row in rows.values()) < uneven.TOLERANCE
    assert "largest relative difference of gradients to those of fsdp2" in capfd.readouterr().out


@pytest.mark.slow
def test_even_steps_on_two_real_ranks(run: Run) -> None:
    options = "--place", "gloo", "--size", "tiny", "--even", "1x24", "--rounds", "2", "--steps", "1", "--warmup", "1"
    rows = rows_of(run("uneven", *options, "--interleave"), "wall", "ratio", "tokens_per_second")
    assert list(rows) == ["plain", "keep", "keep-known", "fsdp2"]


def test_uneven_work_is_the_same_for_all_sides() -> None:
    options = uneven.arguments().parse_args(["--median", "512", "--size", "tiny"])
    options.case = Case.parse("tiny:1x64")
    ranks = [Place("gloo", 4, "cpu", rank=rank) for rank in range(4)]
    assert [len(uneven._drawn(options, rank, uneven.CHECKED_STEP).batches) for rank in ranks] == [1, 2, 3, 4]
    for step in map(str, range(20)):
        works = [uneven._drawn(options, rank, step) for rank in ranks]
        lengths = [batch.numel() for work in works for batch in work.batches]
        assert {work.tokens for work in works} == {sum(lengths)} and {work.longest for work in works} == {max(lengths)}
        assert all(1 <= len(work.batches) <= 4 for work in works)
        assert all(64 <= length <= 4096 and length % 8 == 0 for length in lengths)
        again = uneven._drawn(options, ranks[0], step).batches
        assert all(map(torch.equal, works[0].batches, again))


@pytest.mark.skipif(torch.cuda.is_available(), reason="of a machine without a GPU")
def test_ranks_of_nccl_need_gpus_or_a_service(run: Run) -> None:
    with pytest.raises(ValueError, match="--world 2 needs as many GPUs, or CUDA's multi-process service"):
        run("step", "--place", "nccl", "--world", "2")


def test_time_of_nccl_is_told_apart() -> None:
    kernels = {"ncclDevKernel_AllGather_RING_LL(x)": 2000, "ncclDevKernel_ReduceScatter_Sum_f32_RING_LL(x)": 3000}
    events = [{"cat": "kernel", "name": name, "dur": time} for name, time in {**kernels, "gemm": 5000}.items()]
    assert traces.nccl_time([*events, {"cat": "cpu_op", "name": "nccl:all_gather"}]) == {
        "gathering": 2.0,
        "reducing": 3.0,
    }


def test_exposed_time_of_a_trace() -> None:
    """The compute stream waits for a gather and for a reduction, which runs beside a pack, and then for the host."""

    def kernel(name: str, stream: int, begin: int, end: int) -> dict[str, Any]:
        event = {"name": name, "cat": "kernel", "ts": begin * 1000, "dur": (end - begin) * 1000}
        return {**event, "args": {"stream": stream}}

    computed = [kernel("gemm", 7, begin, end) for begin, end in [(0, 10), (16, 20), (30, 40), (50, 60)]]
    sent = [kernel("ncclDevKernel_AllGather_RING_LL(x)", 20, begin, end) for begin, end in [(5, 15), (31, 39)]]
    sent.append(kernel("ncclDevKernel_ReduceScatter_Sum_f32_RING_LL(x)", 21, 18, 28))
    packed = kernel("chunk_cat", 8, 21, 23)
    found = traces.exposed_time([*computed, packed, *sent, {"name": "nccl:all_gather", "cat": "cpu_op", "ts": 0}])
    assert found == {"gathering": 5.0, "reducing": 8.0, "alone": 5.0 + 6.0}


def test_exposed_time_of_a_late_host() -> None:
    """It counts from the call that makes the compute stream wait, if the stream has been idle before."""

    def kernel(name: str, number: int, stream: int, begin: int, end: int) -> dict[str, Any]:
        args = {"stream": stream, "correlation": number}
        return {"name": name, "cat": "kernel", "ts": begin * 1000, "dur": (end - begin) * 1000, "args": args}

    def call(name: str, number: int, at: int, thread: int = 1) -> dict[str, Any]:
        event = {"name": name, "cat": "cuda_runtime", "ts": at * 1000, "dur": 0, "tid": thread}
        return {**event, "args": {"correlation": number}}

    launch, wait = "cudaLaunchKernel", "cudaStreamWaitEvent"
    gather, reduction = "ncclDevKernel_AllGather_RING_LL(x)", "ncclDevKernel_ReduceScatter_Sum_f32_RING_LL(x)"
    events = [
        *(call(launch, 1, 0), kernel("gemm", 1, 7, 1, 10)),
        # The host is late: the stream is idle from 10 on and waits from 14 to 20. Other calls are too early, too late,
        # or of another thread.
        *(call(launch, 90, 2), kernel(gather, 90, 20, 3, 20)),
        *(call(wait, 50, 12, thread=2), call(wait, 51, 14), call(wait, 52, 19)),
        *(call(launch, 2, 21), call(wait, 53, 22), kernel("gemm", 2, 7, 23, 59)),
        # The host is early: the stream waits from the end of its kernel at 60 to 70.
        *(call(launch, 91, 24), kernel(reduction, 91, 21, 30, 70)),
        # A thread of autograd makes it wait, and the main thread launches the next kernel.
        *(call(launch, 95, 24, thread=3), kernel("cast", 95, 7, 59, 60), call(wait, 54, 25, thread=3)),
        *(call(launch, 3, 26), kernel("gemm", 3, 7, 70, 80)),
        # Nothing waits for this collective. The stream is idle because the host is late.
        *(call(launch, 92, 27), kernel(gather, 92, 20, 75, 85)),
        *(call(launch, 4, 90), kernel("gemm", 4, 7, 91, 99)),
    ]
    found = traces.exposed_time(events)
    assert found == {"gathering": 6.0, "reducing": 10.0, "alone": 10.0 + 10.0 + 5.0}
    # Without the launches, nothing says when the waits begin.
    found = traces.exposed_time([each for each in events if each["cat"] == "kernel"])
    assert (found["gathering"], found["reducing"]) == (10.0 + 5.0, 10.0)


@pytest.mark.slow
def test_exposed_communication_on_two_real_ranks(run: Run, capfd: pytest.CaptureFixture[str]) -> None:
    found = run("exposed", "--place", "gloo", "--size", "tiny", "--rounds", "1", "--steps", "2", "--warmup", "1")
    assert [(row["rank"], row["steps"]) for row in found["rows"]] == [(0, "both"), (1, "both")]
    assert all(0 < row["exposed"] < row["step"] for row in found["rows"])
    assert found["cost"]["cost"] > 0 and "what the timeline costs" in capfd.readouterr().out


@pytest.mark.slow
def test_convergence_on_two_real_ranks(run: Run, tmp_path: Path) -> None:
    options = "--steps", "20", "--seeds", "1", "--precisions", "bf16,fp16", "--layers", "1", "--dim", "32"
    rows = run("convergence", "--place", "gloo", *options, "--seq", "16", "--batch", "4")["convergence"]
    assert [(row["precision"], row["seed"], row["steps"]) for row in rows] == [
        ("bf16", 0, [1, 10, 20]),
        ("fp16", 0, [1, 10, 20]),
    ]
    for row in rows:
        assert row["same_losses"] and row["same_weights"] and row["difference"] == 0
        assert row["losses"]["fsdp2"] == row["losses"]["unshard"] and row["losses"]["fsdp2"][0] == pytest.approx(
            5.5, abs=0.2
        )
        assert row["last"] < row["first"] - 0.05
    drawn = drawn_from(tmp_path / "figures.json")
    assert drawn.count('class="stroke-FSDP2"') == drawn.count('class="stroke-unshard"') == 2
    assert drawn.count("bitwise identical") == 2


def test_a_difference_of_one_bit_is_found() -> None:
    losses = torch.tensor([[5.0, 4.0], [5.5, 4.5]])
    weights = {"weight": torch.ones(2)}
    other = losses.clone()
    other[1, 1] = torch.nextafter(other[1, 1], torch.tensor(9.0))
    row = convergence._compared({"fsdp2": (losses, weights, 1.0), "unshard": (other, weights, 1.0)})
    assert not row["same_losses"] and row["same_weights"] and 0 < row["difference"] < 2e-7
    row = convergence._compared({"fsdp2": (losses, weights, 1.0), "unshard": (losses, {"weight": torch.zeros(2)}, 1.0)})
    assert row["same_losses"] and not row["same_weights"]


@pytest.mark.slow
def test_trace_of_two_real_ranks(run: Run, tmp_path: Path) -> None:
    found = run("trace", "--place", "gloo", "--size", "tiny", "--batch", "1x4", "--steps", "1", "--warmup", "2")
    assert [row["side"] for row in found["rows"]] == ["fsdp2", "unshard"]
    assert all(row["all-gather"] > 0 and 0 < row["compute"] < row["traced"] for row in found["rows"])
    for side in range(2):
        events = [each for each in found["traceEvents"] if each["pid"] == side and each["ph"] == "X"]
        kinds = collections.Counter(each["cat"] for each in events)
        # Two blocks twice, the root once; each reduced once.
        assert (kinds["all-gather"], kinds["reduce-scatter"], kinds["collective call"]) == (5, 3, 8)
        assert kinds["compute"] > 20 and kinds["forward"] == kinds["backward"] == kinds["optimizer"] == 1
        assert min(each["ts"] for each in events) == 0
    assert "FSDP2: " in drawn_from(tmp_path / "figures.json")


def test_a_trace_has_a_row_for_each_stream() -> None:
    """A trace by hand: a copy and a product on one stream, NCCL on two others."""
    names = {"forward": (10, 40), "backward": (50, 40), "optimizer": (90, 10)}
    events: list[traces.Event] = [
        {"cat": "user_annotation", "name": name, "tid": 1, "ts": begin, "dur": length}
        for name, (begin, length) in names.items()
    ]
    operators = {"aten::copy_": (12, 5), "c10d::_allgather_base_": (20, 4), "aten::mm": (30, 5), "unseen": (40, 1)}
    for name, (begin, length) in operators.items():
        events.append({"cat": "cpu_op", "name": name, "tid": 1, "ts": begin, "dur": length, "args": {}})
    kernels = [("void at::native::(anonymous namespace)::copy<float, 4>(int)", 13, 7), ("nvjet_tst_128", 31, 7)]
    kernels += [
        ("ncclDevKernel_AllGather_RING_LL(x)", 21, 20),
        ("ncclDevKernel_ReduceScatter_Sum_f32_RING_LL(x)", 60, 21),
    ]
    for number, (name, launched, stream) in enumerate(kernels):
        args = {"correlation": number, "stream": stream}
        events.append(
            {"cat": "cuda_runtime", "name": "cudaLaunchKernel", "tid": 1, "ts": launched, "dur": 1, "args": args}
        )
        events.append(
            {"cat": "kernel", "name": name, "tid": stream, "ts": launched + 2, "dur": 3.04 + number, "args": args}
        )
    kept = trace._kept(events, 0, "FSDP2")
    rows = {each["tid"]: each["args"]["name"] for each in kept if each["name"] == "thread_name"}
    assert list(rows.values()) == ["CPU", "compute", "all-gather", "reduce-scatter"]
    assert [
        (rows[each["tid"]], each["name"], each["cat"], each["ts"], each["dur"]) for each in kept if each["ph"] == "X"
    ] == [
        ("CPU", "forward", "forward", 0, 40),
        ("CPU", "_allgather_base_", "collective call", 10, 4),
        ("CPU", "backward", "backward", 40, 40),
        ("CPU", "optimizer", "optimizer", 80, 10),
        ("compute", "copy", "copies", 5, 3.0),
        ("compute", "nvjet_tst_128", "compute", 23, 4.0),
        ("all-gather", "AllGather", "all-gather", 13, 5.0),
        ("reduce-scatter", "ReduceScatter", "reduce-scatter", 52, 6.0),
    ]
    assert trace._idle(kept) == pytest.approx((90 - 3 - 4) / 1e3)


def drawn_from(*paths: Path, options: tuple[str, ...] = ()) -> str:
    target = paths[0].with_suffix(".svg")
    picture.main([str(target), *map(str, paths), *options])
    minidom.parse(str(target))
    return target.read_text()


def test_bars_are_as_long_as_the_figures(tmp_path: Path) -> None:
    where = {"place": "CPU, 2 ranks, Gloo", "torch": "2.13.0", "unshard": "0.2.0", "nccl": "2.28.9"}
    paths = [tmp_path / f"{world}.json" for world in (2, 4)]
    for path in paths:
        rows = [
            {"case": "100m:1x512:bf16", "side": "fsdp2", "wall": 200.0, "peak_mib": 3000.0},
            {"case": "100m:1x512:bf16", "side": "unshard", "wall": 100.0, "peak_mib": 1500.0},
            {"case": "100m:1x512:bf16", "side": "unsharded", "error": "no such luck"},
            {"case": "100m:1x512:bf16", "side": "unshard-flat", "wall": 400.0, "peak_mib": 1500.0},
            {"case": "1b:1x512:bf16", "side": "unshard", "wall": 900.0, "peak_mib": 9000.0},
        ]
        path.write_text(json.dumps({"environment": {**where, "world": int(path.stem)}, "rows": rows}))
    drawn = drawn_from(*paths)
    bars = re.findall(r'<rect class="(\w+)" x="[\d.]+" y="[\d.]+" width="([\d.]+)" height="16.0"', drawn)
    lengths = {side: {float(width) for name, width in bars if name == side} for side, _ in bars}
    assert len(bars) == 8 and list(lengths) == ["FSDP2", "unshard"]
    assert all(len(each) == 1 for each in lengths.values())
    assert lengths["FSDP2"].pop() == pytest.approx(2 * lengths["unshard"].pop(), abs=0.2)
    for text in ("2 ranks", "4 ranks", "3,000", "NCCL 2.28.9", "100M parameters, bf16, 1 x 512 tokens"):
        assert text in drawn
    assert "9,000" in drawn_from(*paths, options=("--case", "1b:1x512"))

    row = {"case": "1b:1x1024:bf16", "side": "fsdp2", "eager": 80.0, "eager_host": 60.0}
    row |= {"replayed": 20.0, "replayed_host": 1.0}
    paths[0].write_text(json.dumps({"environment": where, "rows": [row, {**row, "side": "fsdp1", "error": "no"}]}))
    drawn = drawn_from(paths[0])
    assert "FSDP2, replayed" in drawn and "FSDP1" not in drawn.partition("</style>")[2]


@pytest.mark.slow
def test_step_goes_on_when_a_side_fails(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*unused: object) -> None:
        raise RuntimeError("no such luck\nsecond line")

    monkeypatch.setitem(sides._SHARDERS, "fsdp1", broken)
    found = run("step", *SIMULATED, "--cases", "tiny:1x4:fp32", "--rounds", "1", "--steps", "1", "--warmup", "1")
    rows = {row["side"]: row for row in found["rows"]}
    assert list(rows) == SIDES
    assert rows.pop("fsdp1")["error"] == "RuntimeError: no such luck"
    assert all(row["wall"] > 0 and row["peak_mib"] > 0 for row in rows.values())
    assert {row["peer"] for row in found["ratios"]} == {"fsdp2", "unsharded"}


@pytest.mark.slow
def test_collectives(run: Run) -> None:
    rows = rows_of(run("collectives", *SIMULATED, "--cases", "tiny:1x4:bf16", "--warmup", "2"))
    assert list(rows) == SIDES
    assert rows.pop("unsharded")["gathers"] == 0
    for row in rows.values():
        # Two blocks twice, the root once; each reduced once.
        assert (row["gathers"], row["reductions"]) == (5, 3)
        assert row["sent_mib"] > 0 and row["copies"] > 0 and row["copied_mib"] > 0
    assert rows["unshard"]["copied_mib"] < rows["fsdp2"]["copied_mib"]


@pytest.mark.slow
def test_optimizer(run: Run) -> None:
    found = run("optimizer", "--place", "gloo", "--sides", "unsharded,fsdp2,unshard", "--parameters", "8,16",
                "--dtype", "fp32", "--steps", "1", "--warmup", "1")  # fmt: skip
    rows_of(found, "clip", "step", "zero_grad", "total", "micro")
    assert [row["parameters"] for row in found["rows"]] == [8] * 3 + [16] * 3


@pytest.mark.slow
def test_memory(run: Run) -> None:
    rows = rows_of(run("memory", *SIMULATED, "--cases", "tiny:1x4:fp32"), "rest_mib", "peak_mib")
    model = Case.parse("tiny:1x4:fp32").build(torch.device("cpu"))
    state = 3 * 4 * sum(unit_sizes(model)) / 2**20
    # Parameters and two numbers of state each; a step counter and the batch come on top.
    assert state < rows["unsharded"]["rest_mib"] < 1.05 * state
    assert state / 2 < rows["fsdp2"]["rest_mib"] < 1.05 * state / 2
    for side in SIDES[1:]:
        assert 0.5 < rows[side]["of_plan"] < 1.5
        assert rows[side]["rest_mib"] < rows[side]["peak_mib"]


@pytest.mark.slow
def test_checkpoint_on_two_real_ranks(run: Run, tmp_path: Path) -> None:
    found = run(
        "checkpoint", "--place", "gloo", "--world", "2", "--cases", "tiny:1x4:fp32", "--rounds", "2", "--bound", "1",
        *("--folder", str(tmp_path)),
    )  # fmt: skip
    rows = rows_of(found, "mib", "first", "blocked", "total", "load")
    assert list(rows) == ["save", "saver", "unprepared", "bounded", "dcp", "dcp-async"]
    assert all(row["blocked"] <= row["total"] and row["host_mib"] >= 0 for row in rows.values())
    assert [each.name for each in tmp_path.iterdir()] == ["figures.json"]


@pytest.mark.slow
def test_endurance(run: Run) -> None:
    rows = rows_of(
        run("endurance", *SIMULATED, "--cases", "tiny:1x4:fp32", "--steps", "10", "--warmup", "4"),
        *("objects", "memory_mib", "first", "last", "drift"),
    )
    assert list(rows) == SIDES
    # Torch 2.11 keeps specs of the counters that its optimizers add to; later versions keep none.
    assert rows["unshard"]["more_objects"] < max(0, rows["fsdp2"]["more_objects"]) + 100


@pytest.mark.slow
def test_scaling(run: Run, capfd: pytest.CaptureFixture[str]) -> None:
    options = "--parts", "step,start,checkpoint", "--kinds", "plain,sliced", "--rounds", "1", "--steps", "1"
    found = run("scaling", "--worlds", "8,16", *options)
    assert [(row["kind"], row["world"]) for row in found["step"]] == [
        *(("plain", 8), ("plain", 16), ("sliced", 8), ("sliced", 16)),
    ]
    assert all(row["formula"] == "equal" and row["wall"] > 0 and row["cpu_ratio"] > 0 for row in found["step"])
    assert all(row["first"] > 0 for row in found["start"]) and len(found["start"]) == 8
    assert [row["tensors"] for row in found["checkpoint"]] == [873, 873]
    assert "checkpoints of a model" in capfd.readouterr().out


@pytest.mark.slow
def test_shards_on_the_host(run: Run) -> None:
    hosts = ["fsdp2-offload", "unshard-offload", "unshard-offload-step-in-backward", "unshard-offload-state"]
    assert not set(hosts) & set(sides.known("all"))
    options = "--cases", "tiny:1x4:fp32", "--rounds", "1", "--steps", "1", "--warmup", "2"
    found = run("step", *SIMULATED, *options, "--sides", ",".join(hosts))
    assert list(rows_of(found, "wall", "optimizer", "peak_mib")) == hosts
    assert [(row["side"], row["peer"]) for row in found["ratios"]] == [(each, hosts[0]) for each in hosts[1:]]


def test_device_time_goes_to_what_launched_it() -> None:
    """A trace by hand: kernels of a copy, of a copy inside a simulated collective, and of a product."""
    segments = [
        ("aten::_to_copy", 0, 10),
        ("aten::copy_", 1, 8),
        (RANGE, 20, 20),
        ("aten::copy_", 22, 10),
        ("aten::mm", 50, 5),
    ]
    events: list[traces.Event] = [
        {"cat": "cpu_op", "name": name, "tid": 1, "ts": start, "dur": length} for name, start, length in segments
    ]
    for number, (moment, length) in enumerate([(3, 1000), (24, 2000), (52, 4000), (60, 8000)]):
        launch = {"cat": "cuda_runtime", "name": "cudaLaunchKernel", "tid": 1, "ts": moment, "dur": 1}
        kernel = {"cat": "kernel", "name": "void kernel()", "tid": 7, "ts": 100 + number, "dur": length}
        events += [{**each, "args": {"correlation": number}} for each in (launch, kernel)]
    assert traces.device_time(events) == {"copies": 1.0, "collectives": 2.0, "compute": 12.0}
    # The same launches under another thread's number, found by the number of the operation.
    for event in events:
        number = {0: 1, 1: 3, 2: 4}.get(event.get("args", {}).get("correlation"))
        if event["cat"] == "cuda_runtime":
            event["tid"] = 99
            event["args"]["External id"] = number
    for number, event in enumerate(events[: len(segments)]):
        event["args"] = {"External id": number}
    assert traces.device_time(events) == {"copies": 1.0, "collectives": 2.0, "compute": 12.0}
    # The kernel that packs gradients is launched outside of operators.
    events[-1]["name"] = "_pack"
    assert traces.device_time(events) == {"copies": 9.0, "collectives": 2.0, "compute": 4.0}


@pytest.mark.parametrize("text", ["huge:1x4", "tiny", "tiny:4", "tiny:1x4:fp8"])
def test_a_case_that_does_not_exist_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="a case is SIZE"):
        Case.parse(text)


def test_cases_are_read_as_they_are_written() -> None:
    assert str(Case.parse("100m:1x512")) == "100m:1x512:bf16"
    small = Case.parse("small:1x2:fp32").build(torch.device("cpu"))
    assert sum(1 for _ in small.parameters()) == 2000
    assert len(unit_sizes(small)) == 50


def test_commands_of_the_documentation_exist() -> None:
    page = (Path(__file__).parents[1] / "docs" / "benchmarks.md").read_text()
    blocks = "".join(re.findall(r"^```sh\n(.*?)^```", page, re.MULTILINE | re.DOTALL))
    commands = re.findall(r"python -m benchmarks\.(\w+) (.*)", blocks.replace("\\\n", " ").replace("$world", "4"))
    assert len(commands) > 20 and {"step", "convergence", "trace", "picture"} <= {name for name, _ in commands}
    for name, options in commands:
        import_module(f"benchmarks.{name}").arguments().parse_args(shlex.split(options))


def test_the_listing_names_every_command() -> None:
    for name in listing.COMMANDS:
        assert import_module(f"benchmarks.{name}").__doc__
