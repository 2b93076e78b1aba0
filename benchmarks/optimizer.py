"""The host time of clipping, of the optimizer's step and of zero_grad, against the number of parameters.

    python -m benchmarks.optimizer                                # one rank: NCCL on a GPU, Gloo without one
    python -m benchmarks.optimizer --parameters 200,2000 --steps 10

Every side clips as its users do: torch's function for the unsharded model and FSDP2, the method of FSDP1,
`unshard.optim.clip_grad_norm_` for unshard. Milliseconds, medians; the device is idle before each part, so that none
waits for another's kernels, and `us each` is the sum per parameter in microseconds.
"""

from __future__ import annotations

import argparse

from . import measure, places, sides, tables
from .command import ParamGroup, parser_for
from .models import Case
from .places import Place
from .sides import Training
from .tables import Row

COLUMNS = {
    "parameters": "parameters",
    "side": "side",
    "clip": "clip ms",
    "step": "step ms",
    "zero_grad": "zero_grad ms",
}
COLUMNS |= {"total": "total ms", "micro": "us each"}
FIGURES = {"clip": "clip", "step": "step", "zero_grad": "zero_grad", "total": "total"}


def arguments() -> argparse.ArgumentParser:
    parser = parser_for(__doc__, one_rank=True)
    parser.add_argument("--parameters", type=_numbers, default="200,2000,20000", help="how many, one table for each")
    parser.add_argument("--dtype", choices=("bf16", "fp32"), default="bf16", help="of the computation")
    parser.add_argument("--steps", type=int, default=5, help="timed steps")
    parser.add_argument("--warmup", type=int, default=2, help="steps before the clock runs")
    more = "parameters beyond which FSDP2 is left out: the first clip over so many DTensors may take very long"
    parser.add_argument("--fsdp2-limit", type=int, default=5000, help=more)
    return parser


def _numbers(text: str) -> list[int]:
    return [int(each) for each in text.split(",")]


def compare(place: Place, options: argparse.Namespace) -> dict[str, list[Row]]:
    rows, ratios = [], []
    for number in options.parameters:
        case, found = Case(f"{number}params", 1, 1, options.dtype), []
        for side in options.sides:
            part = ParamGroup(case, side)
            with part.attempt():
                part.row |= _time(side, case, place, options)
            part.row["parameters"] = number
            found.append(part.row)
            measure.release(place)
        against = tables.ratios(found, FIGURES)
        tables.show(place, f"{number} parameters, {place}", found, COLUMNS)
        tables.show_ratios(place, against, FIGURES)
        rows += found
        ratios += [{"parameters": number, **each} for each in against]
    return {"rows": rows, "ratios": ratios}


def _time(side: str, case: Case, place: Place, options: argparse.Namespace) -> Row:
    training = sides.start(side, case, place)
    number = sum(1 for _ in training.model.parameters())
    if side == "fsdp2" and number > options.fsdp2_limit:
        raise RuntimeError(f"left out, {number} DTensors are more than --fsdp2-limit")
    for _ in range(options.warmup):
        _timed(training, place)
    with measure.quiet():
        row = measure.medians([_timed(training, place) for _ in range(options.steps)])
    row["micro"] = row["total"] * 1e3 / number
    return row


def _timed(training: Training, place: Place) -> dict[str, float]:
    """The parts of one update, for gradients that a real backward has left."""
    training.forward().backward()
    row = {}
    for name, part in (
        ("clip", training.clip),
        ("step", training.optimizer.step),
        ("zero_grad", training.optimizer.zero_grad),
    ):
        place.meet()
        clock = measure.Clock()
        part()
        row[name] = clock.lap()
    return {**row, "total": sum(row.values())}


def main(arguments_given: list[str] | None = None) -> None:
    options = arguments().parse_args(arguments_given)
    place = places.chosen(options)
    tables.save(options.json, place, options, **places.run(place, compare, options))


if __name__ == "__main__":
    main()
