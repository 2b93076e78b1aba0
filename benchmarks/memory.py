"""The peak of memory in a step, against what a plan of the engine needs, side by side.

    python -m benchmarks.memory --cases 1b:1x1024,1b:4x2048       # a GPU as one rank of a simulated job of 8
    python -m benchmarks.memory --device cpu --world 2 --cases 10m:1x128

The plan, for sharded sides: this rank's share of parameters and optimizer state, plus the two largest units in the
dtype of the computation, plus gradients (this rank's share, and the largest unit's before it is reduced: as autograd
makes it, and in the dtype of the reduction), plus activations. Those are measured on the unsharded side, which drops
each gradient as soon as it is there. Peaks of activations and of gradients need not coincide, so a side can stay below
the plan. `peak` counts what the allocator gave, `asked for` what the side wanted: a block is not split to leave less
than a MiB, so the two can differ by some MiB, by chance. `reserved` is what the allocator took from the device: memory
that is freed in one stream cannot serve another one at once. MiB, in a steady state, one side at a time; on a CPU
always as one rank of a simulated job.
"""

from __future__ import annotations

import argparse

import torch

from . import measure, places, sides, tables
from .command import ParamGroup, parser_for
from .models import Case, unit_sizes
from .places import Place
from .sides import Training
from .tables import Row

COLUMNS = {"case": "case", "side": "side", "rest_mib": "at rest", "peak_mib": "peak", "plan_mib": "plan"}
COLUMNS |= {"of_plan": "peak / plan", "asked_mib": "asked for", "reserved_mib": "reserved"}
FIGURES = {"rest_mib": "at rest", "peak_mib": "peak", "asked_mib": "asked for", "reserved_mib": "reserved"}
_MASTER = 4  # bytes of a parameter, of its gradient and of each of the optimizer's two numbers: all float32


def arguments() -> argparse.ArgumentParser:
    return parser_for(__doc__, cases="100m:1x512,1b:1x1024,1b:4x2048", cpu_cases="10m:1x128:fp32,10m:1x8:bf16")


def compare(place: Place, options: argparse.Namespace) -> dict[str, list[Row]]:
    rows, ratios = [], []
    for case in options.cases:
        found, plan = _compare_case(case, place, options)
        against = tables.ratios(found, FIGURES)
        tables.show(place, f"{case}, {place}, MiB", found, COLUMNS)
        if place.speaks:
            print("  plan: " + ", ".join(f"{name} {size:.1f}" for name, size in plan.items()))
        tables.show_ratios(place, against, FIGURES)
        rows += [{**row, "plan_parts_mib": plan} for row in found]
        ratios += [{"case": str(case), **each} for each in against]
    return {"rows": rows, "ratios": ratios}


def _compare_case(case: Case, place: Place, options: argparse.Namespace) -> tuple[list[Row], dict[str, float]]:
    plan, rows = _plan(case, place), []
    for side in options.sides:
        part = ParamGroup(case, side)
        with part.attempt():
            found = measure.peak(place, lambda side=side: sides.start(side, case, place))
            part.row |= {f"{name}_mib": size / measure.MIB for name, size in found.items()}
            if side != "unsharded":
                part.row["plan_mib"] = sum(plan.values())
                part.row["of_plan"] = part.row["peak_mib"] / part.row["plan_mib"]
        rows.append(part.row)
    return rows, plan


def _plan(case: Case, place: Place) -> dict[str, float]:
    activations, sizes = _activations(case, place)
    largest, share = sorted(sizes, reverse=True), sum(sizes) / place.world
    narrow = case.dtype.itemsize
    gradients = share * _MASTER + largest[0] * (narrow + (_MASTER if narrow != _MASTER else 0))
    plan = {"state": 3 * _MASTER * share, "units": sum(largest[:2]) * narrow, "gradients": gradients}
    return {name: size / measure.MIB for name, size in {**plan, "activations": activations}.items()}


def _activations(case: Case, place: Place) -> tuple[int, list[int]]:
    """Bytes of what autograd keeps and needs beside parameters and gradients; and the sizes of the units."""
    sizes: list[int] = []

    def start() -> Training:
        training = sides.start("unsharded", case, place)
        sizes.extend(unit_sizes(training.model))
        for parameter in training.model.parameters():
            parameter.register_post_accumulate_grad_hook(_drop)
        return training

    found = measure.peak(place, start, lambda training: training.forward().backward())
    return found["peak"] - found["rest"], sizes


def _drop(parameter: torch.Tensor) -> None:
    parameter.grad = None


def main(arguments_given: list[str] | None = None) -> None:
    options = arguments().parse_args(arguments_given)
    place = places.chosen(options).for_memory()
    tables.save(options.json, place, options, **places.run(place, compare, options))


if __name__ == "__main__":
    main()
