"""Training steps in which ranks run different numbers of micro-batches: `unshard.step` beside FSDP2.

    python -m benchmarks.uneven --place nccl --world 2 --size 100m         # two ranks on as many GPUs, or on one
    torchrun --nproc-per-node 2 -m benchmarks.uneven --place gloo --size tiny
    python -m benchmarks.uneven --place nccl --world 2 --even 1x2048       # what `unshard.step` costs even steps

In each step, each rank runs 1 to 4 micro-batches, whose lengths are log-normal around `--median` tokens. All sides run
the same ones. Gradients are those of the mean over all tokens of all ranks. `fsdp2` uses FSDP2's defaults: the ranks
agree on the largest number of micro-batches, and those with fewer run dummies. `fsdp2-tuned` keeps parameters gathered
and gradients unreduced until the last micro-batch. Until then, ranks send nothing, so it needs no dummies. The other
sides use `unshard.step`: `keep` and `follow` are its `units`, and `-known` passes `backwards`. With `--even`, each rank
runs one micro-batch of the same length. `plain` is unshard without `unshard.step`, and `fsdp2` runs no dummies.

One step first shows that all sides have the same gradients. Then they take turns in each round. `step ms` is the median
of the slowest rank's time. A round's ratio to the first side is the median over its steps; the table shows the median
of all rounds, the lowest and the highest. The peak is the highest of all ranks, on a GPU.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable
from math import log
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import unshard

from . import measure, places, sides, tables
from .command import ParamGroup, parser_for
from .models import DECODERS, Case
from .places import Place
from .sides import Training
from .step import turned
from .tables import Row

COLUMNS = {"case": "case", "side": "side", "wall": "step ms", "ratio": "ratio", "low": "low", "high": "high"}
COLUMNS |= {"tokens_per_second": "tokens/s", "peak_mib": "peak MiB"}

MOST = 4  # micro-batches of a rank in a step
SIGMA, SPREAD = 0.8, 8  # lengths are clipped to the median divided and multiplied by SPREAD
TOLERANCE = 0.03  # of gradients: in bf16, scaling the loss rounds the whole backward differently (0.012 in 100m)
CHECKED_STEP = "gradients 53"  # a draw in which the first four ranks have 1, 2, 3 and 4 micro-batches
CHECKED = ("embedding.weight", "blocks.0.attention.qkv.weight", "blocks.1.down.weight", "norm.weight", "head.weight")

Run = Callable[[Training, list[Tensor], Place], None]


class Work(NamedTuple):
    """One step: this rank's micro-batches. `tokens` and `longest` are those of all ranks."""

    batches: list[Tensor]
    tokens: int
    longest: int


def loss_sum(model: nn.Module, batch: Tensor) -> Tensor:
    """Return the sum over all tokens, in fp32: a bf16 loss would round the scale of the gradients."""
    return F.cross_entropy(model(batch).flatten(0, 1).float(), batch.flatten(), reduction="sum")


def _plain(training: Training, batches: list[Tensor], place: Place) -> None:
    """One micro-batch, as long as those of the other ranks."""
    (loss_sum(training.model, batches[0]) / batches[0].numel()).backward()


def _dummies(training: Training, batches: list[Tensor], place: Place) -> None:
    most = torch.tensor(len(batches), device=place.device)
    dist.all_reduce(most, dist.ReduceOp.MAX)
    dist.all_reduce(tokens := _tokens(batches, place))
    scale = place.world / tokens  # FSDP2 divides by the number of ranks
    missing = int(most) - len(batches)
    for batch, factor in [*((batch, scale) for batch in batches), *[(training.batch, 0 * scale)] * missing]:
        (loss_sum(training.model, batch) * factor).backward()


def _tuned(training: Training, batches: list[Tensor], place: Place) -> None:
    """Gather in the first forward, reduce in the last backward: the same collectives with any number in between."""
    model: Any = training.model
    tokens = _tokens(batches, place)
    added_up: Any = dist.all_reduce(tokens, async_op=True)
    for number, batch in enumerate(batches):
        last = number == len(batches) - 1
        if last or number == 0:
            model.set_requires_gradient_sync(last)
            model.set_reshard_after_backward(last)
        loss = loss_sum(model, batch)
        if number == 0:
            added_up.wait()
        (loss * (place.world / tokens)).backward()


def _tokens(batches: list[Tensor], place: Place) -> Tensor:
    return torch.full((), float(sum(batch.numel() for batch in batches)), device=place.device)


def _uneven(units: Any, known: bool) -> Run:
    def run(training: Training, batches: list[Tensor], place: Place) -> None:
        with unshard.step(training.model, units=units, backwards=len(batches) if known else None) as step:
            for batch in batches:
                step.backward(loss_sum(training.model, batch), weight=batch.numel())

    return run


STEPS = {f"{units}{end}": _uneven(units, bool(end)) for units in ("keep", "follow") for end in ("", "-known")}
UNEVEN: dict[str, Run] = {"fsdp2": _dummies, "fsdp2-tuned": _tuned, **STEPS}
EVEN: dict[str, Run] = {"plain": _plain, "keep": STEPS["keep"], "keep-known": STEPS["keep-known"], "fsdp2": _plain}


def _runs(options: argparse.Namespace) -> dict[str, Run]:
    return EVEN if options.even else UNEVEN


def _start(side: str, case: Case, place: Place) -> Training:
    training = sides.start("fsdp2" if side.startswith("fsdp2") else "unshard", case, place)
    if side == "fsdp2-tuned":
        model: Any = training.model
        model.set_reshard_after_forward(False)
    return training


def _drawn(options: argparse.Namespace, place: Place, step: str) -> Work:
    """Return a step's work, the same for all sides. Each rank draws the lengths of all ranks."""
    lengths = [_lengths(options, random.Random(f"{step}, rank {rank}")) for rank in range(place.world)]
    dice = torch.Generator().manual_seed(place.rank)
    vocabulary, samples = DECODERS[options.size]["vocabulary"], options.case.samples
    batches = [torch.randint(vocabulary, (samples, each), generator=dice) for each in lengths[place.rank]]
    tokens = samples * sum(map(sum, lengths))
    return Work([batch.to(place.device) for batch in batches], tokens, longest=max(map(max, lengths)))


def _lengths(options: argparse.Namespace, dice: random.Random) -> list[int]:
    if options.even:
        return [options.case.length]
    least, most = options.median / SPREAD, options.median * SPREAD
    drawn = [dice.lognormvariate(log(options.median), SIGMA) for _ in range(dice.randint(1, MOST))]
    return [-(-round(min(max(each, least), most)) // 8) * 8 for each in drawn]


def compare(place: Place, options: argparse.Namespace) -> dict[str, list[Row]]:
    title = str(options.case) if options.even else f"{options.size}:uneven"
    parts = [ParamGroup(title, side) for side in options.sides]
    _compare_gradients(parts, place, options)
    walls: dict[str, list[list[float]]] = {part.side: [] for part in parts}  # milliseconds by round and step
    kept: dict[str, Training] = {}
    tokens = 0
    for number in range(options.rounds):
        works = [_drawn(options, place, f"round {number}, step {step}") for step in range(options.steps)]
        tokens += sum(work.tokens for work in works)
        for part in turned(parts, number):
            if not part.failed:
                with part.attempt():
                    training = kept.get(part.side) or _start(part.side, options.case, place)
                    walls[part.side].append(_timed(part, training, works, place, options))
                    if options.interleave:
                        kept[part.side] = training
                    del training
                if not options.interleave:
                    measure.release(place)
    for part in parts:
        if not part.failed:
            part.row |= _summary(walls[part.side], walls[parts[0].side], tokens)
    tables.show(place, f"{title}, {place}", [part.row for part in parts], COLUMNS)
    return {"rows": [part.row for part in parts]}


def _compare_gradients(parts: list[ParamGroup], place: Place, options: argparse.Namespace) -> None:
    work = _drawn(options, place, CHECKED_STEP)
    expected: dict[str, Tensor] = {}
    for part in parts:
        with part.attempt():
            training = _start(part.side, options.case, place)
            _runs(options)[part.side](training, work.batches, place)
            gradients: Any = {name: training.model.get_parameter(name).grad for name in CHECKED}
            found = {name: gradient.full_tensor().double().cpu() for name, gradient in gradients.items()}
            del training, gradients
            expected = expected or found
            relative = {name: ((found[name] - each).norm() / each.norm()).item() for name, each in expected.items()}
            part.row["difference"] = max(relative.values())
            if any(not each <= TOLERANCE for each in relative.values()):  # also NaN
                raise ValueError(f"gradients differ from those of {parts[0].side}, relative by parameter: {relative}")
        measure.release(place)
    if place.speaks:
        largest = max(part.row.get("difference", 0.0) for part in parts)
        print(f"\nlargest relative difference of gradients to those of {parts[0].side}: {largest:.1e}", flush=True)


def _timed(
    part: ParamGroup, training: Training, works: list[Work], place: Place, options: argparse.Namespace
) -> list[float]:
    run, walls = _runs(options)[part.side], []
    # The longest first: the allocator then has the memory for the timed steps.
    for work in sorted(works, key=lambda work: -work.longest)[: options.warmup]:
        run(training, work.batches, place)
        training.update()
    if place.on_gpu:
        torch.cuda.reset_peak_memory_stats()
    with measure.quiet():
        for work in works:
            place.meet()
            began = time.perf_counter()
            run(training, work.batches, place)
            training.update()
            place.synchronize()
            walls.append(place.slowest((time.perf_counter() - began) * measure.MS))
    if place.on_gpu:
        peak = place.slowest(torch.cuda.max_memory_allocated() / measure.MIB)
        part.row["peak_mib"] = max(peak, part.row.get("peak_mib", 0.0))
    return walls


def _summary(rounds: list[list[float]], base: list[list[float]], tokens: int) -> Row:
    steps = [wall for walls in rounds for wall in walls]
    row: Row = {"wall": statistics.median(steps), "tokens_per_second": tokens / sum(steps) * measure.MS}
    pairs = [list(zip(*both, strict=True)) for both in zip(rounds, base, strict=False)]  # none if the base failed
    if ratios := [statistics.median(ours / theirs for ours, theirs in each) for each in pairs]:
        row |= {"ratio": statistics.median(ratios), "low": min(ratios), "high": max(ratios)}
    return row | {"walls": rounds}


def arguments() -> argparse.ArgumentParser:
    parser, gpu = parser_for(__doc__, own_sides=True), torch.cuda.is_available()
    parser.add_argument("--sides", default="all", help=f"{', '.join(UNEVEN)}; with --even: {', '.join(EVEN)}")
    parser.add_argument("--size", choices=DECODERS, default="100m" if gpu else "tiny", help="of the model")
    parser.add_argument("--median", type=int, default=512 if gpu else 16, help="median of the lengths, before rounding")
    even = "one equal micro-batch per rank (write --equal under torchrun, which takes --even for its own --event-...)"
    parser.add_argument("--even", "--equal", nargs="?", const="1x2048", metavar="SAMPLESxLENGTH", help=even)
    parser.add_argument("--rounds", type=int, default=5, help="how often the sides take turns")
    parser.add_argument("--steps", type=int, default=8, help="timed steps of a side per round")
    parser.add_argument("--warmup", type=int, default=4, help="steps of a round before the clock runs, at most --steps")
    parser.add_argument(
        "--interleave",
        action="store_true",
        help="build all sides once and keep them: quicker, but peaks include the other sides",
    )
    parser.set_defaults(place="nccl" if gpu else "gloo", world=2)
    return parser


def main(arguments_given: list[str] | None = None) -> None:
    options = (parser := arguments()).parse_args(arguments_given)
    # Dummies have the smallest length.
    options.case = Case.parse(f"{options.size}:{options.even or f'1x{max(8, options.median // SPREAD)}'}")
    known = _runs(options)
    options.sides = list(known) if options.sides == "all" else options.sides.split(",")
    if missing := [side for side in options.sides if side not in known]:
        parser.error(f"no such side: {', '.join(missing)}; there are {', '.join(known)}")
    if options.place == "simulated":
        parser.error("other ranks are needed: --place nccl or --place gloo")
    tables.save(options.json, place := places.chosen(options), options, **places.run(place, compare, options))


if __name__ == "__main__":
    main()
