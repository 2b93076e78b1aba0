"""What `unshard.tools.plan` says before a run, against what the run takes.

    python -m benchmarks.memory_plan --json plan.json             # a GPU as one rank of a simulated job of 8
    python -m benchmarks.memory_plan --device cpu --world 2 --cases 10m:1x128 --variants plain,checkpoint

`measured` is `torch.cuda.max_memory_allocated()` of the third step, with everything that the process has allocated;
`workspaces` is what cuBLAS holds before the first step. `tracker` is `FSDPMemTracker` of PyTorch for the same model
sharded with FSDP2, where it runs, without workspaces. On a CPU, `measured` is the peak in the profiler's record, and
the plan is larger: it counts what Gloo's exchange receives, and the simulated group receives nothing. MiB. A row that
fails shows its error.
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from . import measure, places, sides, tables
from .command import ParamGroup, parser_for
from .models import Case, units
from .places import Place
from .sides import Training
from .tables import Row

COLUMNS = {
    "case": "case",
    "side": "variant",
    "plan_mib": "plan",
    "measured_mib": "measured",
    "ratio": "plan / measured",
}
COLUMNS |= {"workspaces_mib": "workspaces", "tracker_mib": "tracker", "plan_s": "plan s", "at": "peak in"}
_STEPS = 3

Shard = Callable[[nn.Module, Case, Place], nn.Module]


def _keep(model: nn.Module, case: Case, place: Place) -> nn.Module:
    return sides._unshard(model, case, place, reshard_after_forward=False)


VARIANTS: dict[str, tuple[Shard, bool, bool]] = {
    # how it is sharded; whether each unit is recomputed in backward; whether the optimizer is flat
    "plain": (sides._unshard, False, False),
    "checkpoint": (sides._unshard, True, False),
    "offload": (sides._unshard_offload, False, False),
    "keep": (_keep, False, False),
    "flat": (sides._unshard, False, True),
    "wrapper": (sides._unshard_wrapper, False, False),
}
_IN_FP32 = ("plain", "checkpoint")


def arguments() -> argparse.ArgumentParser:
    parser = parser_for(
        __doc__, cases="100m:1x512,1b:1x1024,1b:4x2048", cpu_cases="tiny:2x64,10m:1x128", own_sides=True
    )
    parser.add_argument("--variants", default=",".join(VARIANTS), help="all in bf16, the first two also in fp32")
    parser.add_argument("--no-tracker", action="store_true", help="leave FSDPMemTracker out")
    return parser


def rows_of(options: argparse.Namespace) -> list[tuple[Case, str]]:
    wanted, found = options.variants.split(","), []
    for case in options.cases:
        for name in wanted:
            found.append((replace(case, dtype_name="bf16"), name))
            if name in _IN_FP32:
                found.append((replace(case, dtype_name="fp32"), name))
    return found


def program(case: Case, variant: str, place: Place) -> Any:
    from unshard.tools.program import Program

    shard, recomputes, is_flat = VARIANTS[variant]

    def build() -> nn.Module:
        model = case.build(place.device)
        return _recomputing(model) if recomputes else model

    def optimizer(model: nn.Module) -> Any:
        made: Any = torch.optim.AdamW(sides._groups(model), lr=1e-5, fused=True)
        return sides._flat(made, step_in_backward=False) if is_flat else made

    def batch(rank: int, step: int) -> Tensor:
        return case.batch(place.device, rank)

    return Program(build, batch, lambda model: shard(model, case, place), case.loss, optimizer)


def _recomputing(model: nn.Module) -> nn.Module:
    for unit in units(model):
        unit.forward = partial(checkpoint, unit.forward, use_reentrant=False)  # type: ignore[method-assign]
    return model


def planned(options: argparse.Namespace, place: Place) -> dict[tuple[Case, str], Row]:
    """All plans, before this process becomes part of a job."""
    from unshard.tools import plan

    found: dict[tuple[Case, str], Row] = {}
    for case, variant in rows_of(options):
        part = ParamGroup(case, variant)
        began = time.perf_counter()
        with part.attempt(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            result = plan(program(case, variant, place), world=place.world, device=place.device_type, advise=False)
            part.row |= {"plan_mib": result.peak / measure.MIB, "at": result.peak_at, "plan": result.to_dict()}
        found[case, variant] = part.row | {"plan_s": time.perf_counter() - began}
    return found


def compare(place: Place, given: tuple[argparse.Namespace, dict[tuple[Case, str], Row]]) -> dict[str, list[Row]]:
    rows, (options, plans) = [], given
    for (case, variant), row in plans.items():
        part = ParamGroup(case, variant)
        part.row |= row
        if not part.failed:
            with part.attempt(), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                part.row |= _measured(case, variant, place)
                part.row["ratio"] = part.row["plan_mib"] / part.row["measured_mib"]
        if variant in _IN_FP32 and place.on_gpu and not options.no_tracker:
            tracked = ParamGroup(case, variant)
            with tracked.attempt(), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                part.row["tracker_mib"] = _tracked(case, VARIANTS[variant][1], place) / measure.MIB
            if tracked.failed:
                part.row["tracker_error"] = tracked.row["error"]
        measure.release(place)
        rows.append(part.row)
    tables.show(place, f"plan and run, {place}, MiB", rows, COLUMNS)
    for row in rows:
        if "tracker_error" in row and place.speaks:
            print(f"  tracker of {row['case']} {row['side']}: {row['tracker_error']}")
    return {"rows": rows}


def _start(case: Case, variant: str, place: Place) -> Training:
    made = program(case, variant, place)
    model = made.sharded(made.model())
    return Training(case, model, made.optimizer(model), made.batch_of(0, 0), lambda: None)


def _measured(case: Case, variant: str, place: Place) -> Row:
    measure.release(place)
    if not place.on_gpu:
        found = measure._peak_on_cpu(partial(_start, case, variant, place), Training.step)
        return {"measured_mib": found["peak"] / measure.MIB}
    warm = torch.ones(64, 64, device="cuda", dtype=case.dtype, requires_grad=True)
    (warm @ warm).sum().backward()
    del warm
    workspaces = torch.cuda.memory_allocated()
    training = _start(case, variant, place)
    for _ in range(_STEPS):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        training.step()
    torch.cuda.synchronize()
    most, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    asked = measure._asked("peak")
    figures = {"measured": most, "workspaces": workspaces, "reserved": reserved, "asked": asked}
    return {f"{name}_mib": value / measure.MIB for name, value in figures.items()}


def _tracked(case: Case, recomputes: bool, place: Place) -> int:
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker

    with FakeTensorMode():
        model = case.build(place.device)
        model = sides._fsdp2(_recomputing(model) if recomputes else model, case, place)
        optimizer = torch.optim.AdamW(sides._groups(model), lr=1e-5, fused=True)
        batch = case.batch(place.device, 0)
        tracker = FSDPMemTracker(model, optimizer)
        tracker.track_inputs((batch,))
        with tracker:
            for step in range(2):
                case.loss(model, batch).backward()
                optimizer.step()
                optimizer.zero_grad()
                if step == 0:
                    tracker.reset_mod_stats()
        snapshot = tracker.get_tracker_snapshot("peak")
    return max(int(each["Total"]) for each in snapshot.values())


def main(arguments_given: list[str] | None = None) -> None:
    options = arguments().parse_args(arguments_given)
    place = places.chosen(options).for_memory()
    tables.save(options.json, place, options, **places.run(place, compare, (options, planned(options, place))))


if __name__ == "__main__":
    main()
