"""What the library's own Python costs: bytecodes and calls per unit and step, and calls from a hook to its collective.

Counted on one rank of a simulated job on a CPU, in bf16 with fp32 reduction, with units of nine parameters. The figures
are differences between two depths of the same model, so what a model costs as a whole is left out. They are the same in
every run with one version of Python and torch.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

import unshard
from unshard import MixedPrecisionPolicy, fully_shard

from .places import Place, run

WIDTH = 192  # large enough that no parameter is packed
PARAMETERS = 9
DEPTHS = (4, 12)
STEPS = 3
_OURS = str(Path(unshard.__file__).parent)
COLLECTIVES = ("all_gather", "gather", "reduce_scatter")
"""Methods of transports that issue a collective."""


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH) for _ in range(PARAMETERS))

    def forward(self, x: Tensor) -> Tensor:
        for weight in self.weights:
            x = x @ weight
        return x


class Counts:
    """Bytecodes and calls by function, and the deepest way from a hook of a module to a collective."""

    def __init__(self) -> None:
        self.bytecodes: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()
        self.ways: Counter[tuple[str, ...]] = Counter()

    def trace(self, frame: FrameType, event: str, argument: Any) -> Any:
        if not frame.f_code.co_filename.startswith(_OURS):
            return None
        name = _name(frame)
        if event == "call":
            self.calls[name] += 1
            frame.f_trace_opcodes, frame.f_trace_lines = True, False
            if frame.f_code.co_name in COLLECTIVES and f"{_OURS}/comm" in frame.f_code.co_filename:
                self.ways[_way(frame)] += 1
        elif event == "opcode":
            self.bytecodes[name] += 1
        return self.trace


def _name(frame: FrameType) -> str:
    function = getattr(frame.f_code, "co_qualname", frame.f_code.co_name)  # from Python 3.11 on with its class
    return f"{Path(frame.f_code.co_filename).relative_to(_OURS)}:{function}"


def _way(frame: FrameType | None) -> tuple[str, ...]:
    found: list[str] = []
    while frame is not None and frame.f_code.co_filename.startswith(_OURS):
        found.append(_name(frame))
        frame = frame.f_back
    return tuple(reversed(found))


@contextmanager
def counted() -> Iterator[Counts]:
    counts = Counts()
    sys.settrace(counts.trace)
    try:
        yield counts
    finally:
        sys.settrace(None)


def counts_of(place: Place, depth: int) -> Counts:
    """Of some steps of a model of so many units, once everything is learned."""
    model = nn.Sequential(*[Block() for _ in range(depth)])
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    for block in model:
        fully_shard(block, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)

    def step() -> None:
        model(torch.ones(2, WIDTH)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(4):
        step()
    with counted() as counts:
        for _ in range(STEPS):
            step()
    return counts


def per_unit(small: Counter[str], large: Counter[str]) -> Counter[str]:
    units = (DEPTHS[1] - DEPTHS[0]) * STEPS
    return Counter({name: count for name in large if (count := (large[name] - small[name]) / units)})  # type: ignore[misc]


def measure(place: Place, options: Any) -> tuple[Counts, Counts]:
    return counts_of(place, DEPTHS[0]), counts_of(place, DEPTHS[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--world", type=int, default=8, help="ranks of the simulated job")
    parser.add_argument("--functions", type=int, default=0, help="show so many functions, the costliest first")
    options = parser.parse_args()
    small, large = run(Place("simulated", options.world, "cpu"), measure, options)
    bytecodes, calls = per_unit(small.bytecodes, large.bytecodes), per_unit(small.calls, large.calls)
    print(f"bytecodes per unit and step  {sum(bytecodes.values()):8.0f}")
    print(f"calls per unit and step      {sum(calls.values()):8.0f}")
    for way, _ in large.ways.most_common():
        print(f"\n{len(way) - 1} calls from a hook to a collective:\n  " + "\n  ".join(way))
    if options.functions:
        print()
    for name, count in bytecodes.most_common(options.functions):
        print(f"{count:8.0f} bytecodes {calls[name]:6.1f} calls  {name}")


if __name__ == "__main__":
    main()
